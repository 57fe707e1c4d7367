"""The `vllm` engine for real, with a tiny model on a CPU. `sh scripts/judge_vllm.sh` sets it up and runs it.

vLLM for a CPU needs another torch than LeRobot, so this is no part of the usual tests, whose files begin with test_.
A server of vLLM's is tried in test_judge_real_server.py.
"""

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from regrasp.rewards.bench import LocalBench
from regrasp.rewards.dense import DenseSignal
from regrasp.rewards.engine import EngineUnavailable, JudgeEngine, RequestTooLong
from regrasp.rewards.engines import build_engine
from regrasp.rewards.engines.local_prompt import PromptMaker
from regrasp.rewards.engines.vllm_engine import VllmConfig, VllmEngine
from regrasp.rewards.engines.vllm_request import prompt_of
from regrasp.rewards.jobs import Job, read_jobs
from regrasp.rewards.judging import Signal
from regrasp.rewards.profiles import read_profile
from regrasp.rewards.rows import RowFile, read_rows
from regrasp.rewards.rubric import RubricSignal
from regrasp.rewards.run import judge_on
from regrasp.rewards.terminal import TerminalSignal
from tests.judge_engine import write_numbered
from tests.judge_engine_contract import RUBRIC, clip, keeps_the_contract, question, score_question
from tests.stage_runs import succeeds
from tests.tiny_judge import CONTEXT, write_tiny_judge

SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 16,
    # On a CPU, vLLM 0.32 ends where a seeded reply's prompt is read in parts: "CPU Generator does not use offset".
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": CONTEXT,
}
PROFILE = read_profile("generic")
SIGNALS: dict[str, Signal] = {
    "terminal": TerminalSignal(ask=PROFILE.ask("terminal")),
    "dense": DenseSignal(ask=PROFILE.ask("dense")),
    "rubric": RubricSignal(ask=replace(PROFILE.ask("rubric"), thinking=False), num_samples=9),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_judge(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """The loop that an engine in process lives in."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(model: Path, loop: asyncio.Runner) -> Iterator[VllmEngine]:
    one = VllmEngine(VllmConfig(model=str(model), context=CONTEXT, arguments=dict(SMALL)))
    loop.run(one.probe())
    yield one
    loop.run(one.close())


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    """Two cameras' views of three attempts: AV1, 20 s, 6 s, and two frames."""
    rubric = [
        {"action": "grasp", "grading": [{"label": "no", "points": 0}, {"label": "yes", "points": 0.4}]},
        {"action": "lift", "grading": [{"label": "no", "points": 0}, {"label": "yes", "points": 0.6}]},
    ]
    rows = []
    for number, frames in enumerate((200, 60, 2)):
        names = [f"{number}_{side}.mp4" for side in ("left", "right")]
        for camera, name in enumerate(names):
            write_numbered(tmp_path / name, frames, camera=camera, codec="av1" if number == 0 else "h264")
        rows.append({"id": f"attempt {number}", "task": "Shine.", "videos": names, "rubric": rubric})
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_jobs(tmp_path / "jobs.jsonl", rubric=True)


async def three_signals(engine: JudgeEngine, jobs: list[Job], folder: Path) -> dict[str, list[dict]]:
    """The rows of each signal; the engine stays open."""
    close, engine.close = engine.close, _nothing  # type: ignore[method-assign]
    rows = {}
    for name, signal in SIGNALS.items():
        with RowFile(folder / f"{name}.jsonl") as file:
            report = await judge_on(LocalBench(signal, engine, PROFILE, 8), jobs, file)
        assert report.failed == {}
        rows[name] = sorted(read_rows(folder / f"{name}.jsonl"), key=lambda row: row["id"])
    engine.close = close  # type: ignore[method-assign]
    return rows


async def _nothing() -> None:
    pass


def check_rows(rows: dict[str, list[dict]]) -> None:
    """Every reply parses, and is about the windows and frames that were planned."""
    assert [row["invalid"] for signal in rows.values() for row in signal] == [False] * 9
    assert [row["flags"] for signal in ("dense", "rubric") for row in rows[signal]] == [[]] * 6
    assert [row["frames"] for row in rows["terminal"]] == [[[64]], [[60]], [[2]]]
    for row in rows["terminal"]:
        assert sum(row["probabilities"].values()) == pytest.approx(1)
        assert 0 < row["mass"] < 1
    assert [row["calls"] for row in rows["dense"]] == [2, 1, 1]  # 0-16 s and 4-20 s; the shorter ones are one window
    assert [len(row["half_seconds"]) for row in rows["dense"]] == [40, 12, 1]
    assert [row["frames"][0] for row in rows["rubric"]] == [[40, 40], [12, 12], [1, 1]]
    assert [row["valid_samples"] for row in rows["rubric"]] == [9, 9, 9]


def test_the_engine_gives_the_three_signals(engine: VllmEngine, loop: asyncio.Runner, jobs: list[Job], tmp_path: Path):
    rows = loop.run(three_signals(engine, jobs, tmp_path))
    check_rows(rows)
    assert re.fullmatch(r"vllm \d+\.\d+\S*, model [0-9a-f]{12}", rows["dense"][0]["engine_version"])


def test_every_pair_of_frames_stands_under_its_absolute_time(engine: VllmEngine, loop: asyncio.Runner):
    window = [10 + 0.25 * frame for frame in range(8)]
    asked = question(videos=(clip(window), clip([3.0, 4.0, 5.0], level=9)), max_tokens=1)

    async def seen() -> str:
        loaded = await engine._load()
        output = await engine._generate(loaded, asked, prompt_of(loaded.prompts, asked, thinking=False), ())
        return loaded.tokenizer.decode(output.prompt_token_ids)

    # pairs (10.0, 10.25), ... have their middle at 10.125, ...; the odd count is filled with the last frame
    stamps = ["10.1", "10.6", "11.1", "11.6", "3.5", "5.0"]
    assert re.findall(r"<(\d+\.\d) seconds>", loop.run(seen())) == stamps


def test_the_same_frames_at_other_times_are_another_prompt(engine: VllmEngine, loop: asyncio.Runner):
    early, late = (score_question(videos=(clip([start, start + 0.5]),)) for start in (0.0, 30.0))
    first = loop.run(engine.judge(early))
    assert loop.run(engine.judge(late)).probabilities != first.probabilities
    assert loop.run(engine.judge(early)).probabilities == pytest.approx(first.probabilities)


def test_scores_are_those_of_transformers(engine: VllmEngine, loop: asyncio.Runner, model: Path):
    other = build_engine("transformers", {"model": str(model), "device": "cpu"})
    asked = score_question(videos=(clip([0.0, 0.5, 1.0, 1.5], level=200), clip([0.0, 0.5, 1.0, 1.5])))
    ours, theirs = loop.run(engine.judge(asked)), asyncio.run(other.judge(asked))
    assert ours.probabilities == pytest.approx(theirs.probabilities, rel=2e-3)
    assert ours.mass == pytest.approx(theirs.mass, rel=2e-3)
    assert (ours.texts, ours.prompt_tokens) == (theirs.texts, theirs.prompt_tokens)


def test_what_does_not_fit_says_what_to_lower(engine: VllmEngine, loop: asyncio.Runner):
    for asked in (question(prompt="a " * CONTEXT), question(max_tokens=CONTEXT, constraint="[1-5]")):
        with pytest.raises(RequestTooLong, match="Lower the number of frames"):
            loop.run(engine.judge(asked))


def test_many_requests_are_answered_together(engine: VllmEngine, loop: asyncio.Runner):
    asked = [question(constraint=RUBRIC, seed=seed, temperature=1.0, max_tokens=40) for seed in range(24)]

    async def both() -> tuple[float, float]:
        started = time.monotonic()
        alone = [(await engine.judge(one)).texts for one in asked]
        middle = time.monotonic()
        together = [reply.texts for reply in await asyncio.gather(*map(engine.judge, asked))]
        assert all(re.fullmatch(RUBRIC, text) for (text,) in together)
        assert together == alone  # draws depend on the seed, not on the batch
        return middle - started, time.monotonic() - middle

    one_by_one, at_once = loop.run(both())
    print(f"24 requests one by one {one_by_one:.2f} s, at once {at_once:.2f} s")
    assert at_once < one_by_one


def test_the_engine_keeps_the_contract(engine: VllmEngine, loop: asyncio.Runner):
    async def kept() -> None:
        close, engine.close = engine.close, _nothing  # type: ignore[method-assign]
        able = await keeps_the_contract(engine)
        engine.close = close  # type: ignore[method-assign]
        assert able == replace(
            able, constraint=True, logprobs=True, several_videos=True, timestamps=True, prefill=True, n=True
        )
        assert not able.thinking
        loaded = await engine._load()
        assert isinstance(loaded.prompts, PromptMaker)
        assert loaded.prompts.as_videos

    loop.run(kept())


def test_the_command_line_runs_the_engine_and_ends_it(model: Path, jobs: list[Job], tmp_path: Path):
    attempt = ["--video", *jobs[1].videos, "--task", "Shine.", "--output", tmp_path / "rows.jsonl"]
    options = ["--engine-options", f"context={CONTEXT}", f"arguments={json.dumps(SMALL)}"]
    assert "1 judged" in succeeds("annotate", "terminal", *attempt, "--engine", "vllm", "--model", model, *options)
    left = subprocess.run(["ps", "-o", "args", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    assert left.count("EngineCore") <= 1  # that of the module's own engine


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(EngineUnavailable, match="cannot be run by vLLM"):
        asyncio.run(VllmEngine(VllmConfig(model=str(tmp_path))).probe())


def test_a_model_that_thinks_is_asked_in_two_calls_unless_vllm_knows_how_it_thinks(
    tmp_path: Path, loop: asyncio.Runner
):
    folder = str(write_tiny_judge(tmp_path, thinking=True))
    asked = question(thinking=True, max_tokens=60, temperature=1.0, seed=1, n=4)

    async def judged() -> tuple[str, ...]:
        one = VllmEngine(VllmConfig(model=folder, context=CONTEXT, arguments=dict(SMALL)))
        assert not (await one.probe()).thinking
        texts = (await one.judge(asked)).texts
        await one.close()
        return texts

    assert len(set(loop.run(judged()))) > 1
