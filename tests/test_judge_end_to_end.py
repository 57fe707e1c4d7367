"""All three signals through a real model in this process: tiny, of random weights, and fed two AV1 cameras."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from regrasp.recap import annotate
from regrasp.rewards.engine import Capabilities, JudgeEngine, Reply, Request
from tests.datasets import EpisodeSpec, write_dataset
from tests.judge_engine import write_numbered
from tests.stage_runs import sidecar, succeeds
from tests.tiny_judge import write_tiny_judge

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "g1_bottle_v30"
GRADES = [{"label": "no", "points": 0}, {"label": "half", "points": 0.25}, {"label": "yes", "points": 0.5}]
FIELDS = {"rubric": [{"action": "grasp", "grading": GRADES}, {"action": "lift", "grading": GRADES}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny judge's folder."""
    return write_tiny_judge(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two synchronised cameras in AV1: 17.5 s at 4 frames per second, 70 frames."""
    folder = tmp_path_factory.mktemp("clips")
    return [write_numbered(folder / f"cam{c}.mp4", 70, camera=c, codec="av1", fps=4) for c in (0, 1)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Every request that reaches the engine."""
    requests: list[Request] = []
    make = annotate.make_engine

    class Listening:
        def __init__(self, engine: JudgeEngine) -> None:
            self.engine = engine
            self.name, self.model, self.version = engine.name, engine.model, engine.version

        async def probe(self) -> Capabilities:
            return await self.engine.probe()

        async def judge(self, request: Request) -> Reply:
            requests.append(request)
            return await self.engine.judge(request)

        async def close(self) -> None:
            await self.engine.close()

    monkeypatch.setattr(annotate, "make_engine", lambda config, model: Listening(make(config, model)))
    return requests


def run(signal: str, model: Path, out: Path, *words: object) -> dict:
    succeeds("annotate", signal, *words, "--output", out, "--engine", "transformers", "--model", model)
    (row,) = map(json.loads, out.read_text().splitlines())
    return row


def test_terminal_scores_parse(model: Path, clips: list[Path], tmp_path: Path, asked: list[Request]):
    row = run("terminal", model, tmp_path / "t.jsonl", "--video", *clips, "--task", "Lift it.")
    assert (row["invalid"], row["frames"]) == (False, [[64]])
    assert sum(row["probabilities"].values()) == pytest.approx(1)
    assert row["expected_score"] == pytest.approx(sum(int(k) * p for k, p in row["probabilities"].items()))
    (request,) = asked
    # 64 of 70 frames at even times from 0 to 17.25 s; a collage of two views, 48x72 each
    assert request.videos[0].frames.shape == (64, 48, 144, 3)
    assert request.videos[0].timestamps_s[[0, -1]].tolist() == pytest.approx([0, 17.25])
    assert "17.5 seconds long, as 64 frames" in request.prompt


def test_dense_windows_parse(model: Path, clips: list[Path], tmp_path: Path, asked: list[Request]):
    row = run("dense", model, tmp_path / "d.jsonl", "--video", *clips, "--task", "Lift it.")
    # 17.5 s: windows [0, 16) and [1.5, 17.5), and 35 half seconds
    assert (row["invalid"], row["invalid_clips"], row["frames"]) == (False, [], [[64], [64]])
    assert (len(row["half_seconds"]), len(row["per_second"])) == (35, 18)
    assert set(row["half_seconds"]) <= {1, 2, 3}
    times = sorted((request.videos[0].timestamps_s.tolist() for request in asked), key=lambda at: at[0])
    assert times == [pytest.approx(np.arange(64) / 4), pytest.approx(1.5 + np.arange(64) / 4)]
    assert sorted(request.prompt.split("shows ")[1][:15] for request in asked) == ["0.0 s to 16.0 s", "1.5 s to 17.5 s"]


SHORT = (
    'name: short\nversion: 1\nrubric: {prompt: "{task}\\n{rubric}", max_tokens: 24, temperature: 1, '
    "thinking: true, frames_per_second: 2, most_frames: 166}\n"
)
"""Thoughts of random weights are long: 24 tokens are enough of them."""


def test_rubric_answers_parse(model: Path, clips: list[Path], tmp_path: Path, asked: list[Request]):
    (tmp_path / "rubric.json").write_text(json.dumps(FIELDS))
    own = tmp_path / "short.yaml"
    own.write_text(SHORT)
    words = ["--rubric", tmp_path / "rubric.json", "--profile", own, "--num-samples", 3]
    row = run("rubric", model, tmp_path / "r.jsonl", "--video", *clips, "--task", "Lift it.", *words)
    assert (row["invalid"], row["valid_samples"], row["raw"]) == (False, 3, [])
    assert row["points"] in row["samples"]
    assert {point for sample in row["samples"] for point in sample} <= {0.0, 0.25, 0.5}
    # 2 frames per second of 17.5 s: 0, 0.5, …, 17.0 s, of each of two cameras
    assert [len(video.frames) for video in asked[0].videos] == [35, 35]
    assert asked[0].videos[1].timestamps_s.tolist() == pytest.approx([k / 2 for k in range(35)])


def test_a_datasets_episodes_go_from_pixels_to_returns(model: Path, tmp_path: Path):
    dataset = write_dataset(
        tmp_path / "pick",
        cameras={"top": (48, 72)},
        codec="av1",
        episodes=[EpisodeSpec(30), EpisodeSpec(20)],
        success_column=None,
    )
    words = ["--tag", "tiny", "--engine", "transformers", "--model", model]
    succeeds("annotate", "terminal", "--dataset", dataset, *words)
    succeeds("outcomes", "--dataset", dataset, "--from", "terminal:tiny", "--success-at", 3)
    succeeds("returns", "--rollouts", dataset, "--tag", "x")
    assert len(sidecar(dataset, "returns", "x")["return"]) == 50


def test_an_attempt_of_one_frame_gets_all_three_signals(model: Path, tmp_path: Path, asked: list[Request]):
    clip = write_numbered(tmp_path / "one.mp4", 1)
    words = ["--video", clip, "--task", "Lift it."]
    (tmp_path / "rubric.json").write_text(json.dumps(FIELDS))
    assert run("terminal", model, tmp_path / "t.jsonl", *words)["score"] in range(1, 6)
    assert len(run("dense", model, tmp_path / "d.jsonl", *words)["half_seconds"]) == 1
    row = run("rubric", model, tmp_path / "r.jsonl", *words, "--rubric", tmp_path / "rubric.json", "--num-samples", 1)
    assert len(row["points"]) == 2
    # dense shows the frame twice, as the two frames of its half second; a rubric is thought about, then answered
    assert [len(request.videos[0].frames) for request in asked] == [1, 2, 1, 1]


@pytest.mark.skipif(not REAL.is_dir(), reason="the shared recordings are not on this machine")
def test_a_real_recording_gets_all_three_signals(model: Path, tmp_path: Path, asked: list[Request]):
    (tmp_path / "rubric.json").write_text(json.dumps(FIELDS))
    (tmp_path / "short.yaml").write_text(SHORT)
    words = ["--dataset", REAL, "--episodes", "4:6", "--sidecars", tmp_path, "--tag", "tiny", "--model", model]
    rubric = ["--rubric", tmp_path / "rubric.json", "--profile", tmp_path / "short.yaml", "--num-samples", 1]
    rows: dict[str, dict[int, dict]] = {}
    for signal, more in (("terminal", []), ("dense", []), ("rubric", rubric)):
        succeeds("annotate", signal, *words, "--engine", "transformers", *more)
        lines = (tmp_path / f"g1_bottle_v30/{signal}_tiny.jsonl").read_text().splitlines()
        rows[signal] = {row["dataset"]["episode_index"]: row for row in map(json.loads, lines)}
    assert [row["invalid"] for found in rows.values() for row in found.values()] == [False] * 6
    # 410 and 445 frames at 30 per second are 13.67 and 14.83 s: one window each, of 28 and 30 half seconds with two
    # frames for each; 64 frames for the score of the whole; one every half second from 0 to 13.5 and to 14.5 s
    assert [rows["terminal"][number]["frames"] for number in (4, 5)] == [[[64]]] * 2
    assert [rows["dense"][number]["frames"] for number in (4, 5)] == [[[56]], [[60]]]
    assert [len(rows["dense"][number]["half_seconds"]) for number in (4, 5)] == [28, 30]
    assert [rows["rubric"][number]["frames"] for number in (4, 5)] == [[[28]] * 2, [[30]] * 2]
    shown = {request.id: request for request in asked if "0.0-" in request.id}["g1_bottle_v30/4 0.0-13.7 s"]
    assert shown.videos[0].frames.shape == (56, 252, 336, 3)
    # the frame nearest to a wanted time is at most half a frame away, save beyond the last one, at 409/30 s
    wanted = np.minimum(np.arange(56) / 4, 409 / 30)
    assert np.abs(shown.videos[0].timestamps_s - wanted).max() < 0.5 / 30 + 1e-4
    assert "0.0 s to 13.7 s" in shown.prompt
    assert '"Pick up the yellow bottle on the table."' in shown.prompt
