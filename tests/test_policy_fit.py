"""Training a policy: what it reads, what it leaves out, what it writes, and that it resumes to the same weights."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from regrasp.core.errors import ConfigError, DatasetError, MissingSidecar, NonFiniteData, OutcomeError, SidecarError
from regrasp.learn.episode_rows import DatasetRows, EpisodeRef, FrameTable
from regrasp.learn.image_cache import Images
from regrasp.learn.policy_data import (
    FrameLabels,
    PolicyFrames,
    VectorRows,
    action_rows,
    advantage_weights,
    mixture_moments,
)
from regrasp.recap.policy_episodes import find_policy_episodes, read_labels
from regrasp.recap.policy_fit import PolicyFitConfig, run
from regrasp.recap.selection import Selection, open_datasets
from tests.datasets import EpisodeSpec, edit_parquet, write_dataset

LENGTHS = [7, 5, 9, 6, 8, 6]
SUCCESS = [True, False, True, True, False, True]
SMALL = {"steps": 12, "batch_size": 8, "checkpoint_every": 4, "hidden_dim": 16, "chunk_size": 4, "action_steps": 2}


def label(dataset: Path, lengths: Sequence[int], tag: str = "base", *, seed: int = 0) -> None:
    """Write labels as RLinf would: positive where the advantage is above 0."""
    advantage = np.random.default_rng(seed).normal(size=sum(lengths))
    columns = {
        "episode_index": np.repeat(np.arange(len(lengths)), lengths),
        "frame_index": np.concatenate([np.arange(length) for length in lengths]),
        "num_valid_rewards": np.ones(sum(lengths), dtype=np.int64),
        "advantage_continuous": advantage,
        "advantage": advantage > 0,
    }
    others = ("return", "value_current", "value_next", "reward_sum", "reward_sum_raw")
    columns |= dict.fromkeys(others, np.zeros(sum(lengths)))
    pq.write_table(pa.table(columns), dataset / "meta" / f"advantages_{tag}.parquet")


@pytest.fixture
def data(tmp_path: Path) -> dict[str, tuple[Path, ...]]:
    """Three demonstrations and six rollouts, labelled."""
    demos, rollouts = tmp_path / "demos", tmp_path / "rollouts"
    write_dataset(demos, episodes=[EpisodeSpec(6), EpisodeSpec(8), EpisodeSpec(7)], camera_kind="none")
    episodes = [EpisodeSpec(n, success=s) for n, s in zip(LENGTHS, SUCCESS, strict=True)]
    write_dataset(rollouts, episodes=episodes, camera_kind="none")
    label(demos, [6, 8, 7], seed=1)
    label(rollouts, LENGTHS, seed=2)
    return {"demos": (demos,), "rollouts": (rollouts,)}


def fit(data: dict[str, tuple[Path, ...]], output: Path, **settings: object) -> PolicyFitConfig:
    return PolicyFitConfig(**data, output=output, device="cpu", holdout=0.34, **SMALL | settings)  # type: ignore[arg-type]


def weights(output: Path) -> bytes:
    return (output / "model.safetensors").read_bytes()


# --- the data


def frames_of(lengths: Sequence[int], chunk: int, folder: Path) -> PolicyFrames:
    """One dataset whose state and action at row r are [r] and [r, -r]."""
    folder.mkdir()
    total = sum(lengths)
    rows = np.arange(total, dtype=np.float32)
    np.save(folder / "states.npy", rows[:, None])
    np.save(folder / "actions.npy", np.stack([rows, -rows], axis=1))
    np.save(folder / "timestamps.npy", rows.astype(np.float64))
    starts = np.cumsum(lengths) - lengths
    episodes = [
        EpisodeRef(dataset=0, episode_index=n, first_row=int(s), length=length, task="t", width=1.0, success=True)
        for n, (s, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    table = FrameTable(episodes, 1)
    mapped = [DatasetRows(folder / "timestamps.npy", folder / "states.npy")]
    labels = [FrameLabels(indicator=np.sign(rows - 3).astype(np.float32), weight=rows)]
    images = Images([], mapped, (), (1, 1), folder / "images")
    return PolicyFrames(table, mapped, [VectorRows(folder / "actions.npy")], labels, images, chunk)


def test_a_chunk_is_the_next_actions_and_what_lies_after_the_episode_is_padding(tmp_path: Path):
    batch = frames_of([3, 4], 3, tmp_path / "rows").__getitems__([1, 3, 6])
    # rows 1 (2nd of an episode of 3), 3 (first of one of 4) and 6 (its last)
    assert batch.inputs["action"][:, :, 0].tolist() == [[1, 2, 2], [3, 4, 5], [6, 6, 6]]
    assert batch.inputs["action"][:, :, 1].tolist() == [[-1, -2, -2], [-3, -4, -5], [-6, -6, -6]]
    assert batch.inputs["action_is_pad"].tolist() == [[False, False, True], [False] * 3, [False, True, True]]
    assert batch.inputs["observation.state"][:, 0].tolist() == [1, 3, 6]
    assert batch.inputs["observation.advantage"].tolist() == [-1, 0, 1]
    assert batch.weight.tolist() == [1, 3, 6]


def test_statistics_are_those_of_the_weighted_mixture():
    parts = [np.array([[0.0, 5.0], [2.0, 5.0]], np.float32), np.array([[4.0, 5.0], [100.0, 5.0]], np.float32)]
    episodes = [
        EpisodeRef(dataset=d, episode_index=0, first_row=0, length=n, task="t", width=1.0, success=True)
        for d, n in ((0, 2), (1, 1))
    ]
    mean, deviation = mixture_moments(parts, episodes, [1.0, 2.0])
    # weights 1, 1, 2 on 0, 2, 4: mean 10/4, variance (6.25 + 0.25 + 2 * 2.25) / 4; the second dimension never moves
    assert mean.tolist() == [2.5, 5.0]
    assert deviation == pytest.approx([np.sqrt(11 / 4), 1.0])


def test_advantage_weights_are_exponential_clipped_and_of_mean_one():
    advantage = np.array([-1.0, 0.0, 1.0, 50.0])
    counted = np.array([True, True, True, False])
    (found,) = advantage_weights([advantage], [counted], temperature=1.0, limit=2.0)
    s = np.sqrt(2 / 3)
    raw = np.array([np.exp(-1 / s), 1.0, 2.0, 2.0])  # exp(1 / s) = 3.4 is cut to 2
    assert found == pytest.approx(raw / raw[:3].mean())
    (equal,) = advantage_weights([np.zeros(3)], [np.ones(3, bool)], temperature=1.0, limit=2.0)
    assert equal.tolist() == [1, 1, 1]


def test_labels_are_found_by_episode_and_frame(data: dict[str, tuple[Path, ...]]):
    file = data["rollouts"][0] / "meta" / "advantages_base.parquet"
    edit_parquet(file, lambda table: table.take(pa.array(np.random.default_rng(0).permutation(table.num_rows))))
    found = find_policy_episodes(open_datasets(Selection(**data)), "base", only_successes=False, holdout=0.34, seed=0)
    indicators = [one.indicator for one in read_labels(found, negatives="labelled", weighting=None)]
    for place, (lengths, seed) in enumerate((([6, 8, 7], 1), (LENGTHS, 2))):
        expected = np.where(np.random.default_rng(seed).normal(size=sum(lengths)) > 0, 1.0, -1.0)
        assert indicators[place].tolist() == expected.tolist()
    unconditional = read_labels(found, negatives="unconditional", weighting=None)[1].indicator
    assert set(unconditional.tolist()) == {0.0, 1.0}


def test_actions_are_those_of_the_dataset(data: dict[str, tuple[Path, ...]], tmp_path: Path):
    (dataset,) = open_datasets(Selection(rollouts=data["rollouts"]))
    expected = np.concatenate([dataset.stream(["action"]).take(sum(LENGTHS))["action"]])
    for _ in range(2):  # copied, then mapped again
        assert np.array_equal(action_rows(dataset, tmp_path / "rows").values, expected.astype(np.float32))


# --- the stage


def test_a_fit_writes_a_checkpoint_that_stock_lerobot_loads(data: dict[str, tuple[Path, ...]], tmp_path: Path):
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    result = run(fit(data, tmp_path / "policy", labels="base", condition_dropout=0.2))
    config = PreTrainedConfig.from_pretrained(tmp_path / "policy")
    policy = get_policy_class(config.type).from_pretrained(tmp_path / "policy")
    before, after = make_pre_post_processors(config, pretrained_path=str(tmp_path / "policy"))
    (dataset,) = open_datasets(Selection(rollouts=data["rollouts"]))
    state = torch.from_numpy(dataset.stream(["observation.state"]).take(3)["observation.state"])
    action = after(policy.select_action(before({"observation.state": state})))
    assert action.shape == (3, dataset.features["action"]["shape"][0])
    assert config.conditioned
    assert config.condition_dropout == 0.2
    record = json.loads((tmp_path / "policy" / "regrasp.json").read_text())
    assert record["stage"] == "policy fit"
    assert record["trained_on"] == (
        "3 of 3 episodes of demos (demos), 6 of 6 episodes of rollouts (rollouts), conditioned on base"
    )
    assert set(record["held_out"]) == {"loss", "loss_positive", "loss_negative", "loss_demo", "loss_rollout"}
    assert all(np.isfinite(value) for value in record["held_out"].values())
    assert [one["labels"]["tag"] for one in record["datasets"]] == ["base", "base"]
    assert "Held-out loss" in result.lines[2]
    lines = [json.loads(line) for line in (tmp_path / "policy" / "training" / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "gradient_norm", "learning_rate"} <= set(lines[0])
    assert "held_out/loss_positive" in lines[-1]


def test_plain_imitation_needs_no_labels_and_hears_no_condition(data: dict[str, tuple[Path, ...]], tmp_path: Path):
    run(fit({"demos": data["demos"]}, tmp_path / "sft"))
    config = json.loads((tmp_path / "sft" / "config.json").read_text())
    assert config["conditioned"] is False


def test_filtered_cloning_trains_on_successes_alone(data: dict[str, tuple[Path, ...]], tmp_path: Path):
    run(fit(data, tmp_path / "fbc", episodes="success"))
    record = json.loads((tmp_path / "fbc" / "regrasp.json").read_text())
    assert [one["episodes"] for one in record["datasets"]] == [3, 4]
    assert record["trained_on"].startswith("successes: 3 of 3 episodes of demos (demos), 4 of 6")


def test_advantage_weighting_changes_what_is_learnt(data: dict[str, tuple[Path, ...]], tmp_path: Path):
    run(fit(data, tmp_path / "plain"))
    run(fit(data, tmp_path / "awr", labels="base", weighting="advantage"))
    assert json.loads((tmp_path / "awr" / "config.json").read_text())["conditioned"] is False
    assert weights(tmp_path / "plain") != weights(tmp_path / "awr")


@pytest.mark.parametrize("stop", [3, 5, 11])
def test_a_fit_that_was_killed_resumes_to_the_same_files(
    data: dict[str, tuple[Path, ...]], tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
):
    config = fit(data, tmp_path / "whole", labels="base")
    run(config)
    broken = replace(config, output=tmp_path / "killed", resume=True)

    class Killed(BaseException):
        """Nothing that the code expects."""

    def progress(_steps: int):
        def advance(step: int) -> None:
            if step == stop:
                raise Killed

        return advance

    with monkeypatch.context() as patched:
        patched.setattr("regrasp.recap.policy_fit.count_steps", progress)
        with pytest.raises(Killed):
            run(broken)
    run(broken)
    for name in ("model.safetensors", "config.json", "regrasp.json", "training/metrics.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_an_output_folder_is_not_taken_over(data: dict[str, tuple[Path, ...]], tmp_path: Path):
    config = fit(data, tmp_path / "policy")
    run(config)
    with pytest.raises(ConfigError, match=r"holds a policy fit already.*--resume.*--overwrite"):
        run(config)
    with pytest.raises(ConfigError, match=r"hidden_dim was 16 and is now 24"):
        run(replace(config, hidden_dim=24, resume=True))
    before = weights(config.output)
    run(replace(config, hidden_dim=24, overwrite=True))
    assert weights(config.output) != before


def test_images_are_learnt_from(tmp_path: Path):
    episodes = [EpisodeSpec(5), EpisodeSpec(4), EpisodeSpec(4)]
    cameras = {"observation.images.front": (32, 32)}
    write_dataset(tmp_path / "demos", episodes=episodes, camera_kind="image", cameras=cameras)
    short = {"image_size": 32, "steps": 2, "checkpoint_every": 2, "workers": 1}
    run(fit({"demos": (tmp_path / "demos",)}, tmp_path / "policy", **short))
    features = json.loads((tmp_path / "policy" / "config.json").read_text())["input_features"]
    assert next(one["shape"] for key, one in features.items() if "images" in key) == [3, 32, 32]


# --- what is refused


def test_missing_labels_are_named(data: dict[str, tuple[Path, ...]], tmp_path: Path):
    with pytest.raises(MissingSidecar, match=r"no advantages tagged 'bse'.*Did you mean 'base'"):
        run(fit(data, tmp_path / "policy", labels="bse"))
    label(data["rollouts"][0], LENGTHS[:-1])
    with pytest.raises(SidecarError, match=r"episodes that it lacks \(5\)"):
        run(fit(data, tmp_path / "policy", labels="base"))


def test_filtering_by_an_unknown_outcome_is_refused(tmp_path: Path):
    episodes = [EpisodeSpec(5, success=None), EpisodeSpec(5, success=True)]
    write_dataset(tmp_path / "rollouts", episodes=episodes, camera_kind="none")
    with pytest.raises(OutcomeError, match=r"does not say it of 1 of 2: 0"):
        run(fit({"rollouts": (tmp_path / "rollouts",)}, tmp_path / "policy", episodes="success"))


def test_filtering_where_nothing_succeeded_is_refused(tmp_path: Path):
    episodes = [EpisodeSpec(5, success=False), EpisodeSpec(5, success=False)]
    write_dataset(tmp_path / "rollouts", episodes=episodes, camera_kind="none")
    with pytest.raises(ConfigError, match="None of the episodes of rollouts is a success"):
        run(fit({"rollouts": (tmp_path / "rollouts",)}, tmp_path / "policy", episodes="success"))


def test_an_action_that_is_not_finite_is_named_by_dataset_episode_and_frame(
    data: dict[str, tuple[Path, ...]], tmp_path: Path
):
    def spoil(table: pa.Table) -> pa.Table:
        values = np.stack(table["action"].to_numpy())
        values[9] = np.nan  # the third frame of the second episode; the first has 7
        return table.set_column(table.column_names.index("action"), "action", [values.tolist()])

    edit_parquet(next((data["rollouts"][0] / "data").rglob("*.parquet")), spoil)
    with pytest.raises(NonFiniteData, match=r"rollouts.*episode 1.*frame.* 2"):
        run(fit(data, tmp_path / "policy"))
    assert not (tmp_path / "policy").exists()


def test_several_tasks_are_never_mixed_unasked_since_the_policy_reads_no_text(tmp_path: Path):
    episodes = [EpisodeSpec(5, task=task) for task in ("open", "open", "open", "close", "close", "close")]
    rollouts = {"rollouts": (write_dataset(tmp_path / "rollouts", episodes=episodes, camera_kind="none"),)}
    with pytest.raises(ConfigError, match=r"reads no task text.* the data have 2: 'open', 'close'. .*--tasks 'open'"):
        run(fit(rollouts, tmp_path / "policy"))
    with pytest.raises(ConfigError, match=r"No episode is of the task 'clsoe'. Did you mean 'close'"):
        run(fit(rollouts, tmp_path / "policy", tasks=("clsoe",)))
    assert not (tmp_path / "policy").exists()
    run(fit(rollouts, tmp_path / "one", tasks=("close",)))
    record = json.loads((tmp_path / "one" / "regrasp.json").read_text())
    assert record["datasets"][0]["episodes"] == 3
    assert set(record["datasets"][0]["held_out_episodes"]) < {3, 4, 5}
    run(fit(rollouts, tmp_path / "both", tasks=("close", "open")))
    assert json.loads((tmp_path / "both" / "regrasp.json").read_text())["datasets"][0]["episodes"] == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weighting": "advantage"}, "needs advantages"),
        ({"guidance_scale": 2.0}, "needs a conditioned policy"),
        ({"steps": 0}, "--steps is at least 1"),
        ({"holdout": 1.0}, "--holdout is at least 0"),
        ({"resume": True, "overwrite": True}, "give one of them"),
    ],
)
def test_settings_out_of_range_are_refused(
    data: dict[str, tuple[Path, ...]], tmp_path: Path, settings: dict[str, object], message: str
):
    config = replace(fit(data, tmp_path / "policy"), **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        run(config)


def test_datasets_of_other_sizes_or_without_actions_are_refused(data: dict[str, tuple[Path, ...]], tmp_path: Path):
    write_dataset(tmp_path / "other", episodes=[EpisodeSpec(5)] * 3, camera_kind="none", action_dim=9)
    with pytest.raises(ConfigError, match=r"actions of one size; found demos \d+, other 9"):
        run(fit({**data, "rollouts": (tmp_path / "other",)}, tmp_path / "policy"))
    for file in (data["demos"][0] / "data").rglob("*.parquet"):
        edit_parquet(file, lambda table: table.drop_columns(["action"]))
    with pytest.raises(DatasetError, match="no column 'action'"):
        run(fit({"demos": data["demos"]}, tmp_path / "policy"))
