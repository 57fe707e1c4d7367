"""What every engine keeps to, whoever runs the model; each engine's tests call it on an engine of theirs."""

import re
from dataclasses import replace

import numpy as np
import pytest

from regrasp.rewards.engine import Capabilities, JudgeEngine, Request, VideoInput

SCORES = ("1", "2", "3", "4", "5")
WINDOW = r"[123]{32}(\n[0-9.]{1,5}-[0-9.]{1,5}: [^\n]{1,20}){0,2}"
RUBRIC = r"ANSWER: \[(0\.0|0\.1|0\.2), (0\.0|0\.4|0\.8)\]"


def clip(times: list[float], *, level: int = 128, duration: float = 60.0) -> VideoInput:
    """Frames of plain grey at some times."""
    frames = np.full((len(times), 64, 64, 3), level, dtype=np.uint8)
    return VideoInput(frames=frames, timestamps_s=np.asarray(times), duration_s=duration)


def question(**fields: object) -> Request:
    """A request, by default for a word about half a second."""
    usual: dict = {"id": "one", "system": None, "prompt": "How far?", "videos": (clip([0.0, 0.5]),), "max_tokens": 8}
    return Request(**usual | fields)


def score_question(**fields: object) -> Request:
    """The terminal signal's request."""
    usual = {"prefill": "ANSWER: ", "constraint": "[1-5]", "score_tokens": SCORES, "max_tokens": 1}
    return question(**usual | fields)


async def keeps_the_contract(engine: JudgeEngine) -> Capabilities:
    """Put the three signals' kinds of questions, as far as the engine says it can answer; return what it says."""
    able = await engine.probe()
    assert await engine.probe() == able
    assert engine.name
    assert engine.model
    assert engine.version
    if able.logprobs and able.prefill:
        await _scores(engine, able)
    if able.constraint:
        await _window(engine)
        await _samples(engine, able)
    free = await engine.judge(question(max_tokens=4))
    assert len(free.texts) == len(free.finish) == 1
    await engine.close()
    return able


async def _scores(engine: JudgeEngine, able: Capabilities) -> None:
    asked = score_question(constraint="[1-5]" if able.constraint else None)
    reply = await engine.judge(asked)
    assert reply.probabilities is not None
    assert set(reply.probabilities) == set(SCORES)
    assert sum(reply.probabilities.values()) == pytest.approx(1)
    assert reply.mass is None or 0 <= reply.mass <= 1 + 1e-6
    if able.constraint:
        assert reply.texts == (max(SCORES, key=lambda score: reply.probabilities[score]),)
    assert reply.prompt_tokens > 0
    assert reply.completion_tokens >= 1
    assert (await engine.judge(asked)).probabilities == pytest.approx(reply.probabilities)


async def _window(engine: JudgeEngine) -> None:
    window = clip([10 + 0.25 * frame for frame in range(64)])
    reply = await engine.judge(question(videos=(window,), constraint=WINDOW, max_tokens=200))
    assert re.fullmatch(WINDOW, reply.texts[0]) or reply.finish == ("length",)
    assert re.match("[123]{32}", reply.texts[0])


async def _samples(engine: JudgeEngine, able: Capabilities) -> None:
    videos = (clip([0.0, 0.5, 1.0, 1.5]), clip([0.0, 0.5, 1.0, 1.5], level=9))
    asked = question(
        videos=videos if able.several_videos else videos[:1],
        constraint=RUBRIC,
        n=3 if able.n else 1,
        temperature=1.0,
        seed=5,
        max_tokens=40,
    )
    reply = await engine.judge(asked)
    assert len(reply.texts) == len(reply.finish) == asked.n
    assert all(re.fullmatch(RUBRIC, text) for text in reply.texts)
    assert (await engine.judge(asked)).texts == reply.texts
    others = [(await engine.judge(replace(asked, seed=seed))).texts for seed in range(6, 12)]
    assert len({reply.texts, *others}) > 1
