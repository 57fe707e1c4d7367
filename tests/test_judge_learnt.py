"""A tiny judge that learned what bars that fill, stall or empty look like is found usable; a random one is not."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.train_judge import main as train_judge
from tests.bar_clips import PROFILE, make_clips, with_pieces, write_jobs
from tests.stage_runs import Done, regrasp, succeeds
from tests.tiny_judge import write_tiny_judge


@dataclass(frozen=True)
class Trained:
    """A trained judge, the random one that it was, the profile of both, and the jobs that neither has seen."""

    judge: Path
    random: Path
    profile: Path
    held_out: list[str]

    def words(self, model: Path) -> list[object]:
        return ["--engine", "transformers", "--model", model, "--profile", self.profile]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train for half a minute on 288 attempts: each clip under both tasks, so that the task has to be read."""
    folder = tmp_path_factory.mktemp("bars")
    (folder / "bars.yaml").write_text(PROFILE)
    training = write_jobs(folder, "training", with_pieces(make_clips(folder, 36, seed=0), seed=2), both=True)
    held_out = write_jobs(folder, "held_out", make_clips(folder, 24, seed=1), both=False)
    start, random = write_tiny_judge(folder / "start", gain=4.0), write_tiny_judge(folder / "random")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = ["--profile", str(folder / "bars.yaml"), "--steps", "700", "--lr", "2e-3", "--device", "cpu"]
    loss = train_judge([str(start), str(folder / "judge"), *training, *settings])
    torch.set_num_threads(threads)
    assert loss < 0.2
    return Trained(folder / "judge", random, folder / "bars.yaml", held_out)


def check(trained: Trained, model: Path, folder: Path) -> tuple[Done, dict]:
    files = ["--output", folder / "rows.jsonl", "--report", folder / "report.json"]
    done = regrasp("annotate", "check", *trained.held_out, *trained.words(model), *files)
    return done, json.loads((folder / "report.json").read_text())


def test_a_judge_that_learned_ranks_clips_that_it_has_not_seen(trained: Trained, tmp_path: Path):
    jobs, out = trained.held_out[1], tmp_path / "terminal.jsonl"
    succeeds("annotate", "terminal", "--jobs", jobs, "--output", out, *trained.words(trained.judge))
    expected = {row["id"]: row["expected_score"] for row in map(json.loads, out.read_text().splitlines())}
    # of every six clips two fill, two stall and two empty
    names = [json.loads(line)["id"] for line in Path(jobs).read_text().splitlines()]
    fill, stall, empty = (
        np.array([expected[n] for k, n in enumerate(names) if k // 2 % 3 == kind]) for kind in (0, 1, 2)
    )
    assert fill.min() > stall.max()
    assert stall.min() > empty.max()
    assert (fill.mean(), empty.mean()) == pytest.approx((5, 1), abs=0.5)


def test_a_judge_that_learned_is_usable(trained: Trained, tmp_path: Path):
    done, report = check(trained, trained.judge, tmp_path)
    assert done.code == 0, done.out + done.err
    assert "The judge is usable" in done.out
    assert report["auroc"]["low"] > 0.9
    assert report["mae"]["value"] < 0.5
    for control in ("reversed", "truncated", "frozen", "wrong_instruction"):
        assert report[f"preferred_to_{control}"]["value"] == 1.0
    assert report["voc_spearman"]["low"] > 0.8
    assert report["voc_spearman_reversed"]["high"] < -0.8


def test_a_random_judge_is_not_usable(trained: Trained, tmp_path: Path):
    done, report = check(trained, trained.random, tmp_path)
    assert done.code == 2
    assert "NOT shown to be usable: it does not tell successes from failures" in done.out
    assert not report["usable"]
    assert report["auroc"]["low"] < 0.5
