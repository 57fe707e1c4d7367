"""A judge whose answers follow from what it is asked, counted and as slow as a test wants."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from regrasp.rewards.engine import Capabilities, Reply, Request
from tests.dataset_pixels import encode_video, frame_pixels

ABLE = Capabilities(
    constraint=True, logprobs=True, several_videos=True, timestamps=True, prefill=True, n=True, thinking=True
)


def level_of(request: Request) -> float:
    """How bright the last frame is, 0 to 1: what the scripted judge scores by."""
    return float(request.videos[0].frames[-1].mean()) / 255


def bright_is_good(request: Request) -> Reply:
    """Score by brightness, as a well-behaved model would answer each of the three questions."""
    level = level_of(request)
    if request.score_tokens:
        weights = np.array([np.exp(-8 * abs(level - place / 4)) for place in range(len(request.score_tokens))])
        shares = (weights / weights.sum()).tolist()
        best = request.score_tokens[int(weights.argmax())]
        return Reply(texts=(best,), probabilities=dict(zip(request.score_tokens, shares, strict=True)), mass=0.9)
    if request.constraint and (found := re.match(r"\[123\]\{(\d+)\}", request.constraint)):
        digit = "1" if level < 0.3 else "2" if level < 0.6 else "3"
        return Reply(texts=(digit * int(found[1]) + ("" if digit == "3" else "\n0.0-99.0: it is too dark"),))
    if request.constraint and (marks := re.findall(r"\(([^)]*)\)", request.constraint)):
        options = [[part.replace("\\", "") for part in mark.split("|")] for mark in marks]
        chosen = [max(o, key=float) if level > 0.5 else min(o, key=float) for o in options]
        text = f"ANSWER: [{', '.join(chosen)}]"
        texts = tuple(text for _ in range(request.n))
        return Reply(texts=texts, thinking=tuple(f"thought {n}" for n in range(request.n)))
    return Reply(texts=("it looks as it looks",))


@dataclass
class ScriptedEngine:
    """A judge that answers by a function."""

    answer: Callable[[Request], Reply] = bright_is_good
    capabilities: Capabilities = ABLE
    delay_s: float = 0.0
    name: str = "scripted"
    model: str = "bright"
    version: str = "1"
    asked: list[Request] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    closed: bool = False

    async def probe(self) -> Capabilities:
        return self.capabilities

    async def judge(self, request: Request) -> Reply:
        self.asked.append(replace(request))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.delay_s)
            return self.answer(request)
        finally:
            self.at_once -= 1

    async def close(self) -> None:
        self.closed = True


def write_gray(path: Path, levels: list[int], *, fps: float = 10, times: list[float] | None = None) -> Path:
    """Write a video of plain grey frames, 48x64, each as bright as its level says."""
    at = times or [number / fps for number in range(len(levels))]
    frames = [(time_s, np.full((48, 64, 3), level, dtype=np.uint8)) for time_s, level in zip(at, levels, strict=True)]
    encode_video(path, frames, fps=fps, height=48, width=64)
    return path


def write_numbered(
    path: Path, count: int, *, fps: float = 10, camera: int = 0, codec: str = "h264", times: list[float] | None = None
) -> Path:
    """Write a video whose frames say their own number (``tests.dataset_pixels.read_pixels``), 48x72."""
    at = times or [number / fps for number in range(count)]
    frames = [(time_s, frame_pixels(0, number, 48, 72, camera)) for number, time_s in enumerate(at)]
    encode_video(path, frames, fps=fps, height=48, width=72, codec=codec)
    return path
