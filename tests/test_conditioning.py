"""The advantage condition in a stock preprocessor: what it says, where labels come from, and that it travels alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.processor import (
    NewLineTaskProcessorStep,
    PolicyProcessorPipeline,
    make_default_policy_processor_steps,
    make_policy_processor_pipelines,
)

from regrasp.core.errors import ConfigError, MissingSidecar, SidecarError
from regrasp.models.conditioning import AdvantageConditionStep, add_condition_step
from regrasp.models.flow_policy import FlowConfig, FlowPolicy, make_regrasp_flow_pre_post_processors
from regrasp.models.label_table import read_label_table
from tests.datasets import EpisodeSpec, write_dataset

POSITIVE, NEGATIVE = "fold\nAdvantage: positive", "fold\nAdvantage: negative"


def _labels(path: Path, lengths: tuple[int, ...] = (3, 2), skip: tuple[int, ...] = ()) -> Path:
    """An advantages sidecar in which the first frame of each episode alone is positive."""
    rows = [(e, f, f == 0) for e, length in enumerate(lengths) if e not in skip for f in range(length)]
    names = ("episode_index", "frame_index", "advantage")
    pq.write_table(
        pa.table({name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}), path
    )
    return path


def _config() -> FlowConfig:
    return FlowConfig(
        device="cpu",
        chunk_size=4,
        n_action_steps=2,
        input_features={"observation.state": PolicyFeature(FeatureType.STATE, (3,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
    )


def _preprocessor(step: AdvantageConditionStep) -> PolicyProcessorPipeline:
    """The pipeline of a language policy such as SmolVLA, as far as the step that ends the task with a new line."""
    steps = make_default_policy_processor_steps(_config())
    inputs = [
        steps.rename_observations,
        steps.add_batch_dim,
        NewLineTaskProcessorStep(),
        steps.to_device,
        steps.normalize,
    ]
    preprocessor, _ = make_policy_processor_pipelines(input_steps=inputs, output_steps=[steps.to_cpu])
    add_condition_step(preprocessor, step)
    return preprocessor


def _training_batch(index: list[int], episode: list[int] | None = None, **more: Any) -> dict[str, Any]:
    batch: dict[str, Any] = {
        "observation.state": torch.zeros(len(index), 3),
        "action": torch.zeros(len(index), 4, 2),
        "index": torch.tensor(index),
        "task": ["fold"] * len(index),
    }
    return batch | ({} if episode is None else {"episode_index": torch.tensor(episode)}) | more


def _observation(rows: int = 2) -> dict[str, Any]:
    return {"observation.state": torch.zeros(rows, 3), "task": ["fold"] * rows}


# --- what is said


def test_training_says_the_label_of_each_frame(tmp_path: Path):
    step = AdvantageConditionStep(labels=str(_labels(tmp_path / "advantages_a.parquet")), dropout=0.0)
    batch = _preprocessor(step)(_training_batch([0, 1, 3, 4], [0, 0, 1, 1]))
    assert batch["task"] == [f"{text}\n" for text in (POSITIVE, NEGATIVE, POSITIVE, NEGATIVE)]


def test_inference_says_positive_and_reads_no_labels():
    step = AdvantageConditionStep(labels="/nowhere/advantages_a.parquet")
    assert _preprocessor(step)(_observation())["task"] == [f"{POSITIVE}\n"] * 2
    one = _preprocessor(step)({"observation.state": torch.zeros(3), "task": "fold"})
    assert one["task"] == [f"{POSITIVE}\n"]


@pytest.mark.parametrize(("condition", "text"), [("negative", NEGATIVE), ("none", "fold")])
def test_inference_can_ask_for_another_condition(condition: str, text: str):
    step = AdvantageConditionStep(condition=condition)
    assert _preprocessor(step)(_observation())["task"] == [f"{text}\n"] * 2


def test_an_observation_may_ask_for_a_condition_of_its_own():
    batch = _preprocessor(AdvantageConditionStep())(
        _observation() | {"observation.advantage": torch.tensor([1.0, -1.0])}
    )
    assert batch["task"] == [f"{POSITIVE}\n", f"{NEGATIVE}\n"]
    assert "observation.advantage" not in batch


def test_a_label_in_the_batch_goes_before_the_table():
    given = {"observation.advantage": torch.tensor([1.0, -1.0, 0.0])}
    batch = _preprocessor(AdvantageConditionStep(dropout=0.0))(_training_batch([0, 1, 2], **given))
    assert batch["task"] == [f"{POSITIVE}\n", f"{NEGATIVE}\n", "fold\n"]


def test_unconditional_negatives_say_nothing(tmp_path: Path):
    labels = str(_labels(tmp_path / "a.parquet"))
    step = AdvantageConditionStep(labels=labels, dropout=0.0, negatives="unconditional")
    assert _preprocessor(step)(_training_batch([0, 1, 2]))["task"] == [f"{POSITIVE}\n", "fold\n", "fold\n"]


@pytest.mark.parametrize("seed", [None, 7])
def test_dropout_says_nothing_for_its_share_of_training_samples(tmp_path: Path, seed: int | None):
    torch.manual_seed(0)
    labels = str(_labels(tmp_path / "a.parquet", lengths=(1,) * 4000))
    preprocessor = _preprocessor(AdvantageConditionStep(labels=labels, dropout=0.3, seed=seed))
    first, second = (preprocessor(_training_batch(list(range(4000))))["task"] for _ in range(2))
    assert np.mean([text == "fold\n" for text in first]) == pytest.approx(0.3, abs=0.04)
    assert {*first} == {"fold\n", f"{POSITIVE}\n"}
    assert (first == second) == (seed is not None)


def test_for_a_policy_without_text_the_condition_is_a_number(tmp_path: Path):
    labels = str(_labels(tmp_path / "a.parquet"))
    preprocessor, _ = make_regrasp_flow_pre_post_processors(_config())
    add_condition_step(preprocessor, AdvantageConditionStep(labels=labels, write="indicator"))
    batch = preprocessor(_training_batch([0, 1, 3]))
    assert batch["observation.advantage"].tolist() == [1.0, -1.0, 1.0]
    assert batch["task"] == ["fold"] * 3
    FlowPolicy(_config())(batch)
    assert "observation.advantage" not in preprocessor(_observation())  # the policy's own setting counts


def test_the_step_changes_nothing_of_its_callers(tmp_path: Path):
    batch = _training_batch([0, 1], **{"observation.advantage": torch.tensor([1.0, -1.0])})
    before = {key: value.clone() if isinstance(value, torch.Tensor) else list(value) for key, value in batch.items()}
    _preprocessor(AdvantageConditionStep(dropout=1.0))(batch)
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[k], v) if isinstance(v, torch.Tensor) else batch[k] == v for k, v in before.items())


def test_a_second_step_takes_the_place_of_the_first():
    preprocessor = _preprocessor(AdvantageConditionStep(dropout=0.5))
    add_condition_step(preprocessor, AdvantageConditionStep(dropout=0.1))
    steps = [step for step in preprocessor.steps if isinstance(step, AdvantageConditionStep)]
    assert [step.dropout for step in steps] == [0.1]
    assert preprocessor.steps.index(steps[0]) == 1


# --- where labels come from


def test_a_table_with_its_own_index_may_skip_episodes_and_be_in_any_order(tmp_path: Path):
    table = {"index": [7, 5], "episode_index": [3, 2], "advantage": [False, True]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    labels = read_label_table(tmp_path / "a.parquet")
    np.testing.assert_array_equal(labels.look_up(np.array([5, 7]), np.array([2, 3])), [1.0, -1.0])
    with pytest.raises(SidecarError, match="index 6, 8, -1; they hold 2 frames"):
        labels.look_up(np.array([6, 7, 8, -1]))


def test_labels_of_another_dataset_are_refused(tmp_path: Path):
    labels = read_label_table(_labels(tmp_path / "a.parquet", lengths=(3, 2)))
    with pytest.raises(SidecarError, match=r"index 2 is of episode 0 there and of 1 in the data"):
        labels.look_up(np.array([0, 2, 3]), np.array([0, 1, 1]))
    with pytest.raises(SidecarError, match="none for the frames with index 5"):
        labels.look_up(np.array([4, 5]))


def test_labels_that_skip_an_episode_cannot_be_placed(tmp_path: Path):
    with pytest.raises(SidecarError, match=r"skip episodes or frames.*add a column 'index'"):
        read_label_table(_labels(tmp_path / "a.parquet", lengths=(2, 3, 2), skip=(1,)))


def test_labels_that_cannot_be_read_say_why(tmp_path: Path):
    path = tmp_path / "a.parquet"
    with pytest.raises(MissingSidecar, match="regrasp advantages"):
        read_label_table(path)
    pq.write_table(pa.table({"index": [0], "episode_index": [0]}), path)
    with pytest.raises(SidecarError, match="lack the columns advantage; found index, episode_index"):
        read_label_table(path)
    pq.write_table(pa.table({"index": [0], "episode_index": [0], "advantage": pa.array([None], pa.bool_())}), path)
    with pytest.raises(SidecarError, match="without advantage"):
        read_label_table(path)
    pq.write_table(pa.table({"index": [0], "episode_index": [0], "advantage": [True]}).slice(0, 0), path)
    with pytest.raises(SidecarError, match="are empty"):
        read_label_table(path)


def test_training_without_labels_index_or_task_is_refused():
    preprocessor = _preprocessor(AdvantageConditionStep())
    with pytest.raises(MissingSidecar, match="was given none"):
        preprocessor(_training_batch([0]))
    batch = _training_batch([0])
    del batch["index"]
    with pytest.raises(ConfigError, match="the batch has neither"):
        preprocessor(batch)
    with pytest.raises(ConfigError, match="has no 'task'"):
        preprocessor({"observation.state": torch.zeros(1, 3), "index": torch.tensor([0])})
    seeded = _preprocessor(AdvantageConditionStep(seed=1))
    with pytest.raises(ConfigError, match="which the batch lacks"):
        seeded(batch | {"observation.advantage": torch.ones(1)})


@pytest.mark.parametrize(
    "settings", [{"negatives": "drop"}, {"write": "text"}, {"condition": "good"}, {"dropout": 1.5}]
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        AdvantageConditionStep(**settings)


# --- checkpoints

FRESH_PROCESS = """
import json, sys, torch
from lerobot.processor import PolicyProcessorPipeline
assert not any(name.startswith("regrasp") for name in sys.modules)
pipeline = PolicyProcessorPipeline.from_pretrained(sys.argv[1], config_filename="policy_preprocessor.json")
observation = {"observation.state": torch.zeros(2, 3), "task": ["fold", "wipe"]}
training = observation | {"action": torch.zeros(2, 4, 2), "index": torch.tensor([0, 1])}
print(json.dumps([pipeline(observation)["task"], pipeline(training)["task"]]))
"""


def test_a_saved_step_is_found_by_its_class_path_in_a_fresh_process(tmp_path: Path):
    labels = str(_labels(tmp_path / "advantages_a.parquet"))
    step = AdvantageConditionStep(labels=labels, dropout=0.0, negatives="unconditional", seed=3)
    _preprocessor(step).save_pretrained(tmp_path / "policy")
    saved = json.loads((tmp_path / "policy" / "policy_preprocessor.json").read_text())["steps"][1]
    assert saved["class"] == "regrasp.models.conditioning.AdvantageConditionStep"
    assert saved["config"] == step.get_config()
    command = [sys.executable, "-c", FRESH_PROCESS, str(tmp_path / "policy")]
    quiet = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet)
    assert done.returncode == 0, done.stderr
    inference, training = json.loads(done.stdout.splitlines()[-1])
    assert inference == ["fold\nAdvantage: positive\n", "wipe\nAdvantage: positive\n"]
    assert training == ["fold\nAdvantage: positive\n", "wipe\n"]


def test_stock_tools_may_override_the_steps_they_know(tmp_path: Path):
    _preprocessor(AdvantageConditionStep()).save_pretrained(tmp_path)
    loaded = PolicyProcessorPipeline.from_pretrained(
        tmp_path,
        config_filename="policy_preprocessor.json",
        overrides={
            "device_processor": {"device": "cpu"},
            "rename_observations_processor": {"rename_map": {"observation.robot": "observation.state"}},
            "normalizer_processor": {"stats": {}},
            "AdvantageConditionStep": {"condition": "negative"},
        },
    )
    assert loaded({"observation.robot": torch.zeros(3), "task": "fold"})["task"] == [f"{NEGATIVE}\n"]


def test_lerobot_train_trains_a_checkpoint_on_labels_and_saves_the_step_again(tmp_path: Path):
    dataset = write_dataset(tmp_path / "data", layout="v3.0", episodes=[EpisodeSpec(12), EpisodeSpec(9)])
    labels = str(_labels(tmp_path / "advantages_a.parquet", lengths=(12, 9)))
    info = json.loads((dataset / "meta/info.json").read_text())["features"]
    config = _config()
    config.push_to_hub = False
    config.input_features = {
        "observation.state": PolicyFeature(FeatureType.STATE, tuple(info["observation.state"]["shape"]))
    }
    config.output_features = {"action": PolicyFeature(FeatureType.ACTION, tuple(info["action"]["shape"]))}
    preprocessor, postprocessor = make_regrasp_flow_pre_post_processors(config)
    add_condition_step(preprocessor, AdvantageConditionStep(labels=labels, write="indicator"))
    for part in (FlowPolicy(config), preprocessor, postprocessor):
        part.save_pretrained(tmp_path / "policy")
    flags = {
        "discover_packages_path": "regrasp.models.flow_policy",
        "policy.path": tmp_path / "policy",
        "policy.device": "cpu",
        "dataset.repo_id": "local/data",
        "dataset.root": dataset,
        "steps": 2,
        "batch_size": 4,
        "num_workers": 0,
        "output_dir": tmp_path / "run",
    }
    command = [sys.executable, "-m", "lerobot.scripts.lerobot_train", *(f"--{k}={v}" for k, v in flags.items())]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "run/checkpoints/last/pretrained_model/policy_preprocessor.json").read_text())
    assert saved["steps"][1]["config"]["labels"] == labels
    assert FlowPolicy.from_pretrained(tmp_path / "run/checkpoints/last/pretrained_model").config.conditioned
