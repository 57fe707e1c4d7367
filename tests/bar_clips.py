"""Clips of two bars, a red and a blue one, that fill, stall or empty: attempts whose end anyone can score."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.dataset_pixels import encode_video

COLOURS = {"red": (220, 40, 40), "blue": (40, 70, 220)}
FRAMES, FPS, SIDE = 12, 10, 64
PROFILE = """
name: bars
version: 1
terminal: {prompt: "{task}", prefill: "ANSWER: ", frames_per_second: 10, most_frames: 4}
"""
"""A profile of few words and frames, so that a model learns it in seconds."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A clip, and how full each bar is in each of its frames."""

    path: Path
    red: np.ndarray
    blue: np.ndarray

    def job(self, colour: str) -> tuple[dict[str, object], int, str]:
        """The job of filling one of the bars, the attempt's score, and its outcome."""
        level = float(getattr(self, colour)[-1])
        score = 1 + int(np.digitize(level, [0.2, 0.4, 0.7, 0.9]))
        name = f"{self.path.stem}-{colour}"
        fields: dict[str, object] = {"id": name, "task": f"Fill the {colour} bar.", "videos": [self.path.name]}
        return fields, score, "success" if score == 5 else "failure"


def levels(kind: str, random: np.random.Generator) -> np.ndarray:
    """How full a bar is over time."""
    time = np.linspace(0, 1, FRAMES)
    match kind:
        case "fill":
            return np.minimum(random.uniform(0, 0.15) + time, 1)
        case "stall":
            return np.minimum(random.uniform(0, 0.1) + time, random.uniform(0.25, 0.6))
        case "empty":
            return np.maximum(random.uniform(0.6, 1) - time, random.uniform(0, 0.1))
        case "still":
            return np.full(FRAMES, random.uniform(0, 0.2))
    raise AssertionError(kind)


def write_bars(path: Path, red: np.ndarray, blue: np.ndarray, background: int) -> Bars:
    """Draw a clip."""
    pictures = []
    for frame, pair in enumerate(zip(red, blue, strict=True)):
        picture = np.full((SIDE, SIDE, 3), background, dtype=np.uint8)
        for place, (colour, level) in enumerate(zip(COLOURS.values(), pair, strict=True)):
            left, bottom = 8 + 28 * place, SIDE - 4
            picture[bottom - round(level * (SIDE - 8)) : bottom, left : left + 20] = colour
        pictures.append((frame / FPS, picture))
    encode_video(path, pictures, fps=FPS, height=SIDE, width=SIDE)
    return Bars(path=path, red=red, blue=blue)


def make_clips(folder: Path, count: int, *, seed: int) -> list[Bars]:
    """Draw attempts at one of the bars: a third fill it, a third stall, a third empty it, while the other bar does as
    its own luck has it.
    """
    random, clips = np.random.default_rng(seed), []
    for number in range(count):
        kind = ("fill", "stall", "empty")[number // 2 % 3]
        named = levels(kind, random)
        other = levels(str(random.choice(["still", "stall", "empty"])) if kind == "fill" else "fill", random)
        red, blue = (named, other) if number % 2 == 0 else (other, named)
        background = int(random.integers(60, 140))
        clips.append(write_bars(folder / f"{seed}-{number}.mp4", red, blue, background))
    return clips


def with_pieces(clips: list[Bars], *, seed: int) -> list[Bars]:
    """The clips, and of each one that is played backwards, one that is cut short and one that never moves."""
    random, made = np.random.default_rng(seed), []
    for clip in clips:
        background = int(random.integers(60, 140))
        still, cut = np.zeros(FRAMES, dtype=int), np.arange(random.integers(2, FRAMES))
        pieces = {"backwards": np.arange(FRAMES)[::-1], "cut": cut, "still": still}
        for name, frames in pieces.items():
            path = clip.path.with_stem(f"{clip.path.stem}-{name}")
            made.append(write_bars(path, clip.red[frames], clip.blue[frames], background))
    return [*clips, *made]


def write_jobs(folder: Path, name: str, clips: list[Bars], *, both: bool) -> list[str]:
    """Write jobs and their truth, and return the flags that name them.

    Args:
        folder: The clips' own.
        name: Of the files.
        clips: The clips.
        both: Ask about both bars of every clip, not only about the one that the attempt is at.
    """
    wanted = [
        clip.job(colour)
        for number, clip in enumerate(clips)
        for place, colour in enumerate(COLOURS)
        if both or place == number % 2
    ]
    jobs, truth = folder / f"{name}.jsonl", folder / f"{name}.csv"
    jobs.write_text("".join(json.dumps(job) + "\n" for job, _, _ in wanted))
    with truth.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "outcome", "score"])
        rows.writerows((job["id"], outcome, score) for job, score, outcome in wanted)
    return ["--jobs", str(jobs), "--labels", str(truth)]
