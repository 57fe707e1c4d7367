"""The dense signal: 1 (failure), 2 (suboptimal) or 3 (normal) for every half second, with reasons, in hindsight.

A window's score of a half second has seen up to 16 s around it: the signal is retrospective, and no online use of it
would be honest.
"""

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from regrasp.rewards.engine import Capabilities, Request
from regrasp.rewards.jobs import Job
from regrasp.rewards.judging import Desk, Exchange, Judged, camera_words, collage_video, seconds, seed_of
from regrasp.rewards.profiles import Ask, fill
from regrasp.rewards.views import Views
from regrasp.rewards.windows import STEP_S, Window, plan_windows, stitch

_REASON = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*s?\s*-\s*(\d+(?:\.\d+)?)\s*s?\s*:\s*(\S.*)$")
_MOST_REASONS = 8


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a stretch is not normal; seconds of the whole episode."""

    start_s: float
    end_s: float
    text: str


@dataclass(frozen=True, kw_only=True)
class WindowReply:
    """A window's scores, one for each half second, and its reasons; ``scores`` is None where the reply is invalid."""

    scores: tuple[int, ...] | None
    reasons: tuple[Reason, ...]
    raw: str


@dataclass(frozen=True, kw_only=True)
class DenseSignal:
    """Scores of every half second of an attempt."""

    ask: Ask
    frame_scores: bool = False
    name: str = "dense"

    def settings(self) -> dict[str, object]:
        """What decides the rows besides the profile."""
        return {"frame_scores": self.frame_scores}

    def check(self, capabilities: Capabilities, jobs: list[Job]) -> None:
        """Take any engine: a reply that was not constrained is read if it parses, and invalid if not."""

    def describe(self, job: Job, views: Views) -> str:
        """Say which windows are shown."""
        windows = plan_windows(views.duration_s)
        height, width = views.collage_size(self.ask.cell_height)
        spans = [f"{w.start_s:.1f}-{w.end_s:.1f} s" for w in windows]
        shown = ", ".join(spans if len(spans) <= 6 else [*spans[:5], "…", spans[-1]])
        frames = len(windows[0].frame_times())
        return f"{len(windows)} windows ({shown}), {frames} frames each, one picture of {width}x{height}"

    def first_request(self, job: Job, views: Views) -> Request:
        """The first window's question."""
        return self._request(job, views, plan_windows(views.duration_s)[0], constraint=True)

    async def judge(self, job: Job, views: Views, desk: Desk, capabilities: Capabilities) -> Judged:
        """Have every window judged, and stitch them."""
        windows = plan_windows(views.duration_s)

        async def one(window: Window) -> list[Exchange]:
            return await desk.ask(lambda: self._request(job, views, window, constraint=capabilities.constraint))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(window)) for window in windows]
        exchanges = [task.result()[0] for task in tasks]
        replies = [parse_window(e.reply.texts[0], w) for e, w in zip(exchanges, windows, strict=True)]
        fields = dense_fields(views.duration_s, windows, replies)
        if self.frame_scores:
            fields["frame_scores"] = frame_scores(views.timestamps, fields["half_seconds"])  # type: ignore[arg-type]
        return Judged(fields=fields, exchanges=exchanges)

    def _request(self, job: Job, views: Views, window: Window, *, constraint: bool) -> Request:
        numbers = views.nearest(window.frame_times())
        places = {
            "task": job.task,
            "duration": seconds(views.duration_s),
            "cameras": camera_words(job, views, collage=True),
            "frames": len(numbers),
            "start": seconds(window.start_s),
            "end": seconds(window.end_s),
            "steps": window.steps,
        }
        return Request(
            id=f"{job.id} {window.start_s:.1f}-{window.end_s:.1f} s",
            system=self.ask.system,
            prompt=fill(self.ask.prompt, places),
            videos=(collage_video(views, numbers, self.ask),),
            prefill=None,
            constraint=window_pattern(window.steps) if constraint else None,
            max_tokens=self.ask.max_tokens,
            temperature=self.ask.temperature,
            seed=seed_of(job, self.name, round(window.start_s * 1000)),
        )


def window_pattern(steps: int) -> str:
    """Return the regular expression of a window's reply: its digits, then at most 8 lines of reasons."""
    line = r"\n[0-9]{1,4}\.[0-9]-[0-9]{1,4}\.[0-9]: [^\n]{1,100}"
    return f"[123]{{{steps}}}({line}){{0,{_MOST_REASONS}}}"


def parse_window(text: str, window: Window) -> WindowReply:
    """Read a window's reply. Digits may be set apart by spaces or commas; a line that is no reason is left out."""
    head, _, rest = text.strip().partition("\n")
    digits = re.sub(r"[\s,]+", "", head)
    if not re.fullmatch(f"[123]{{{window.steps}}}", digits):
        return WindowReply(scores=None, reasons=(), raw=text)
    found = [_REASON.match(line) for line in rest.splitlines()]
    reasons = [Reason(start_s=float(m[1]), end_s=float(m[2]), text=m[3].strip()) for m in found if m]
    return WindowReply(scores=tuple(map(int, digits)), reasons=tuple(reasons), raw=text)


def dense_fields(duration_s: float, windows: Sequence[Window], replies: Sequence[WindowReply]) -> dict[str, object]:
    """Stitch the windows of an episode and sum them up.

    Returns:
        ``half_seconds``: a score for each, None where the window that it belongs to is invalid.
        ``per_second``: for each second the worse of its two scores.
        ``segments``: runs of one score, with a reason where it is not normal and one was given.
        ``fraction``: the share of the judged time at 1, 2 and 3; ``worst_score``, and ``mean_score`` over time.
        ``invalid_clips``: the windows whose replies did not parse, with these.
        ``retrospective``: always True.
    """
    owners = stitch(duration_s, windows)
    halves: list[int | None] = []
    for window, step in owners.tolist():
        scores = replies[window].scores
        halves.append(None if scores is None else scores[step])
    lengths = [min(STEP_S, duration_s - half * STEP_S) for half in range(len(halves))]
    time_at = {s: math.fsum(d for d, h in zip(lengths, halves, strict=True) if h == s) for s in (1, 2, 3)}
    judged = math.fsum(time_at.values())
    known = [score for score in halves if score is not None]
    invalid = [
        {"start": window.start_s, "end": window.end_s, "raw": reply.raw}
        for window, reply in zip(windows, replies, strict=True)
        if reply.scores is None
    ]
    return {
        "invalid": not known,
        "duration": duration_s,
        "segments": _segments(duration_s, halves, owners[:, 0].tolist(), replies),
        "half_seconds": halves,
        "per_second": [_worse(halves[second : second + 2]) for second in range(0, len(halves), 2)],
        "fraction": {str(score): time / judged for score, time in time_at.items()} if known else None,
        "worst_score": min(known, default=None),
        "mean_score": math.fsum(s * t for s, t in time_at.items()) / judged if known else None,
        "invalid_clips": invalid,
        "retrospective": True,
    }


def _worse(pair: list[int | None]) -> int | None:
    return min((score for score in pair if score is not None), default=None)


def _segments(
    duration_s: float, halves: list[int | None], owners: list[int], replies: Sequence[WindowReply]
) -> list[dict[str, object]]:
    segments: list[dict[str, object]] = []
    start = 0
    for half in range(1, len(halves) + 1):
        if half < len(halves) and halves[half] == halves[start]:
            continue
        begin, end = start * STEP_S, min(half * STEP_S, duration_s)
        segment: dict[str, object] = {"start": begin, "end": end, "score": halves[start]}
        if halves[start] in (1, 2):
            segment["reason"] = _reason(begin, end, [replies[n] for n in dict.fromkeys(owners[start:half])])
        segments.append(segment)
        start = half
    return segments


def _reason(begin: float, end: float, replies: list[WindowReply]) -> str | None:
    """The reason that overlaps a segment most; the earliest of equal ones, None where none does."""
    best, longest = None, 0.0
    for reason in (reason for reply in replies for reason in reply.reasons):
        overlap = min(end, max(reason.end_s, reason.start_s + STEP_S)) - max(begin, reason.start_s)
        if overlap > longest + 1e-9:
            best, longest = reason.text, overlap
    return best


def frame_scores(timestamps: Float[np.ndarray, " t"], halves: list[int | None]) -> list[int | None]:
    """Return for each frame the score of the half second in which it is shown."""
    places = np.floor((timestamps + 1e-6) / STEP_S).astype(np.int64).clip(0, len(halves) - 1)
    return [halves[place] for place in places.tolist()]
