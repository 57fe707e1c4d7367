"""A training run that is killed and resumed is the run that was not."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from regrasp.core.errors import CheckpointError, ConfigError
from regrasp.learn.loop import TrainConfig, cosine_with_warmup, parameter_groups
from regrasp.learn.sampler import MixtureSampler
from regrasp.learn.trackers import check_tracker
from tests import learn_run


def lines(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def kill_when(folder: Path, step: int) -> None:
    """Start or resume a run in a process of its own, and kill it once it has logged ``step``."""
    root = Path(__file__).resolve().parents[1]
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.learn_run", str(folder)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"},
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(1200):
            found = lines_so_far(folder)
            if found and found[-1] >= step:
                break
            assert child.poll() is None, "the run ended before it was killed"
            time.sleep(0.05)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def lines_so_far(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    whole = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [json.loads(line)["step"] for line in whole]


def same_weights(one: Path, other: Path) -> bool:
    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_killed_twice_and_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    whole = learn_run.run(tmp_path / "whole")
    kill_when(tmp_path / "killed", 8)
    kill_when(tmp_path / "killed", 17)
    resumed = learn_run.run(tmp_path / "killed", resume=True)
    assert resumed.resumed_from is not None and 15 <= resumed.resumed_from < learn_run.STEPS
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    assert resumed.best_step == whole.best_step
    assert resumed.best_metrics == whole.best_metrics
    assert same_weights(resumed.weights, whole.weights)
    last = f"states/step_{learn_run.STEPS:08d}/model.safetensors"
    assert same_weights(tmp_path / "killed" / last, tmp_path / "whole" / last)


def test_what_a_kill_leaves_behind_is_removed(tmp_path: Path) -> None:
    short = dataclasses.replace(learn_run.CONFIG, steps=10)
    learn_run.run(tmp_path, config=short)
    before = lines(tmp_path)
    (tmp_path / "states" / ".step_00000015").mkdir()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 1.0}\n{"step": 12, "lo')
    learn_run.run(tmp_path, config=short, resume=True)
    assert lines(tmp_path) == before
    assert not list((tmp_path / "states").glob(".*"))


def test_the_last_and_the_best_state_are_kept_and_no_other(tmp_path: Path) -> None:
    result = learn_run.run(tmp_path)
    kept = sorted(path.name for path in (tmp_path / "states").iterdir())
    assert kept == sorted({f"step_{result.best_step:08d}", f"step_{learn_run.STEPS:08d}"})
    judged = {line["step"]: line["held_out/error"] for line in lines(tmp_path) if "held_out/error" in line}
    assert judged[result.best_step] == min(judged.values()) == result.best_metrics["error"]


def test_the_kept_weights_are_the_average_that_was_judged(tmp_path: Path) -> None:
    result = learn_run.run(tmp_path)
    model = learn_run.network().eval()
    model.load_state_dict(load_file(result.weights))
    assert learn_run.Line().evaluate(model) == result.best_metrics
    assert result.weights.name == "average.safetensors"


def test_starting_anew_forgets_what_was_there(tmp_path: Path) -> None:
    learn_run.run(tmp_path)
    first = lines(tmp_path)
    learn_run.run(tmp_path)
    assert lines(tmp_path) == first


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    learn_run.run(tmp_path, config=dataclasses.replace(learn_run.CONFIG, steps=5))
    extra = tmp_path / "states/step_00000005/extra.pt"
    extra.write_bytes(extra.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"step_00000005.*cannot be read"):
        learn_run.run(tmp_path, resume=True)


def test_a_loss_that_is_no_number_stops_the_run_before_it_is_kept(tmp_path: Path) -> None:
    wild = dataclasses.replace(learn_run.CONFIG, learning_rate=1e30, ema_decay=None)
    with pytest.raises(ConfigError, match=r"loss is (nan|inf) at step"):
        learn_run.run(tmp_path, config=wild)
    assert all(np.isfinite(line.get("loss", 0.0)) for line in lines(tmp_path))


def test_metrics_go_to_the_tracker_that_is_named(tmp_path: Path) -> None:
    learn_run.run(tmp_path, config=dataclasses.replace(learn_run.CONFIG, tracker="tensorboard"))
    events = EventAccumulator(str(tmp_path / "trackers/regrasp")).Reload()
    written = {line["step"]: line["loss"] for line in lines(tmp_path) if "loss" in line}
    assert {event.step: event.value for event in events.Scalars("loss")} == pytest.approx(written)


def test_no_tracker_leaves_metrics_to_the_file_alone(tmp_path: Path) -> None:
    learn_run.run(tmp_path, config=dataclasses.replace(learn_run.CONFIG, tracker="none"))
    assert not (tmp_path / "trackers").exists()
    assert lines(tmp_path)


def test_a_tracker_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no tracker 'tensorbord'\. Did you mean 'tensorboard'\?"):
        check_tracker("tensorbord")
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [])
    with pytest.raises(ConfigError, match=r"'wandb' needs a package .* not installed"):
        check_tracker("wandb")


def test_the_learning_rate_rises_linearly_and_falls_along_a_cosine() -> None:
    # Warm-up of 4 of 12 steps: 1/5 .. 4/5, then the cosine from 1; half way through its 8 steps it is at 1/2.
    factors = [cosine_with_warmup(step, 4, 12) for step in range(13)]
    assert factors[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert factors[8] == pytest.approx(0.5)
    assert factors[12] == pytest.approx(0.0)
    assert factors[5:] == sorted(factors[5:], reverse=True)


def test_biases_norms_and_embeddings_do_not_decay() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "linear": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    decaying, fixed = parameter_groups(model, 0.1)
    assert [p.shape for p in decaying["params"]] == [model["linear"].weight.shape]
    assert decaying["weight_decay"] == 0.1
    assert (len(fixed["params"]), fixed["weight_decay"]) == (4, 0.0)


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"steps": 0}, {"checkpoint_every": 30}, {"learning_rate": 0.0}, {"ema_decay": 1.0}):
        with pytest.raises(ConfigError):
            TrainConfig(**({"steps": 10, "learning_rate": 0.1} | wrong))


def test_a_mixture_draws_datasets_by_weight_times_frames_and_frames_uniformly() -> None:
    # 300 frames at weight 1 and 100 at weight 3 are drawn equally often: 300 and 300 of 600.
    sampler = MixtureSampler([300, 100], [1.0, 3.0], batch_size=1000, seed=0)
    items = np.concatenate([next(sampler) for _ in range(40)])
    assert abs((items >= 300).mean() - 0.5) < 0.01
    counts = np.bincount(items, minlength=400)
    assert counts.min() > 0
    assert abs(counts[:300].mean() * 3 - counts[300:].mean()) < 0.02 * counts[300:].mean()


def test_processes_share_a_batch_without_overlap() -> None:
    whole = MixtureSampler([50], [1.0], batch_size=8, seed=1)
    parts = [MixtureSampler([50], [1.0], batch_size=8, seed=1, process=p, processes=2) for p in (0, 1)]
    for _ in range(3):
        first, second = (next(part) for part in parts)
        assert sorted(first + second) == sorted(next(whole))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_goes_on_where_its_state_was_taken(workers: int) -> None:
    loader = learn_run.batches(workers)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    following = [next(iterator).y for _ in range(2)]
    again = learn_run.batches(workers)
    again.load_state_dict(state)
    resumed = iter(again)
    assert all(torch.equal(next(resumed).y, expected) for expected in following)


def test_a_state_is_not_lost_when_its_folder_is_copied(tmp_path: Path) -> None:
    learn_run.run(tmp_path / "one", config=dataclasses.replace(learn_run.CONFIG, steps=10))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    longer = [learn_run.run(tmp_path / name, config=learn_run.CONFIG, resume=True) for name in ("one", "two")]
    assert same_weights(longer[0].weights, longer[1].weights)
