"""The rubric signal: points for each step of a user's rubric, as the middle one of several samples."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from regrasp.core.errors import ConfigError
from regrasp.rewards.engine import Capabilities, Reply, Request, VideoInput
from regrasp.rewards.jobs import Job, RubricStep
from regrasp.rewards.judging import Desk, Exchange, Judged, camera_words, need, seconds, seed_of
from regrasp.rewards.medoid import find_medoid
from regrasp.rewards.profiles import Ask, fill
from regrasp.rewards.views import Views, fit, uniform_frames

ANSWER = "ANSWER: "
_ANSWER = re.compile(r"ANSWER:\s*\[([^\]]*)\]")
_SAME = 1e-9
_MOST_ANSWER_TOKENS = 16
"""For each step of an answer that a constraint keeps to its list."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One reply: its points, None where it does not parse, and what the model thought before."""

    points: tuple[float, ...] | None
    text: str
    thinking: str | None


@dataclass(frozen=True, kw_only=True)
class RubricSignal:
    """Points for the steps of a rubric."""

    ask: Ask
    num_samples: int = 9
    keep_thinking: bool = False
    moments: int = 0
    """How many times the attempt is also marked as if it had been cut off, evenly over its length."""
    name: str = "rubric"

    def settings(self) -> dict[str, object]:
        """What decides the rows besides the profile."""
        cut = {"moments": self.moments} if self.moments else {}
        return {"num_samples": self.num_samples, "keep_thinking": self.keep_thinking, **cut}

    def check(self, capabilities: Capabilities, jobs: list[Job]) -> None:
        """Refuse an engine that takes one video only where a job has several, and a job without a rubric."""
        bare = next((job for job in jobs if not job.rubric), None)
        if bare is not None:
            message = (
                f"Job {bare.id!r} has no rubric. Mend: give it one in --jobs, or --rubric FILE.json for a dataset."
            )
            raise ConfigError(message)
        several = any(len(job.videos or (job.episode.cameras if job.episode else ())) > 1 for job in jobs)
        if several:
            why = "the rubric signal needs, since every camera is a video of its own"
            need(capabilities.several_videos, "several videos in one request", why, "judge one camera")

    def describe(self, job: Job, views: Views) -> str:
        """Say which videos are shown."""
        frames = len(self._numbers(views))
        sizes = ", ".join(f"{width}x{height}" for height, width in self._sizes(views))
        cut = f", and the same cut off at {self.moments} moments" if self.moments else ""
        return f"{len(views.names)} videos of {frames} frames ({sizes}), {self.num_samples} samples{cut}"

    def first_request(self, job: Job, views: Views) -> Request:
        """The question as an engine that can do everything is asked."""
        return self._request(job, views, constraint=True, thinking=self.ask.thinking, n=self.num_samples)

    async def judge(self, job: Job, views: Views, desk: Desk, capabilities: Capabilities) -> Judged:
        """Mark the attempt, and where ``moments`` are wanted also its beginnings."""
        shares = [moment / (self.moments + 1) for moment in range(1, self.moments + 1)]
        cut = [replace(job, control="prefix", shown=share) for share in shares]

        async with asyncio.TaskGroup() as group:
            whole = group.create_task(self._draw(job, lambda: views, desk, capabilities))
            parts = [group.create_task(self._draw(part, partial(Views, part), desk, capabilities)) for part in cut]
        exchanges, samples = whole.result()
        flags = ["identical samples at temperature above 0"] if self.ask.temperature > 0 and _same(samples) else []
        fields = rubric_fields(job.rubric, samples, keep_thinking=self.keep_thinking)
        if cut:
            shown = [views.shown_frames(share) for share in shares]
            marked = [rubric_fields(job.rubric, part.result()[1], keep_thinking=False).get("points") for part in parts]
            fields["moments"] = [{"frames": n, "points": points} for n, points in zip(shown, marked, strict=True)]
        asked = [*exchanges, *(exchange for part in parts for exchange in part.result()[0])]
        return Judged(fields=fields, exchanges=asked, flags=flags)

    async def _draw(
        self, job: Job, see: Callable[[], Views], desk: Desk, capabilities: Capabilities
    ) -> tuple[list[Exchange], list[Sample]]:
        """Draw the samples: in one request where the engine can, else one by one.

        A model whose thinking a constraint would suppress thinks first, freely, and answers in a second call.
        """
        split = self.ask.thinking and capabilities.constraint and not capabilities.thinking and capabilities.prefill
        whole = capabilities.constraint and (capabilities.thinking or not self.ask.thinking)
        together = capabilities.n and not split
        draws = 1 if together else self.num_samples
        n = self.num_samples if together else 1
        first = round(1_000_000 * job.shown) if job.shown < 1 else 0

        async def draw(number: int) -> list[Exchange]:
            def build() -> Request:
                thinks = self.ask.thinking and not split
                request = self._request(job, see(), constraint=whole, thinking=thinks, n=n)
                return replace(request, seed=seed_of(job, self.name, first + number))

            after = (lambda request, reply: _answer_after(request, reply, job.rubric),) if split else ()
            return await desk.ask(build, *after)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(draw(number)) for number in range(draws)]
        exchanges = [task.result() for task in tasks]
        samples = [sample for one in exchanges for sample in _samples(one, job.rubric, split=split)]
        return [e for one in exchanges for e in one], samples

    def _numbers(self, views: Views) -> np.ndarray:
        ask = self.ask
        if views.duration_s * ask.frames_per_second <= ask.most_frames:
            times = np.arange(0.0, views.duration_s - 1e-6, 1.0 / ask.frames_per_second)
            return np.unique(views.nearest(times))
        return uniform_frames(
            views.timestamps, per_second=ask.frames_per_second, most=ask.most_frames, duration_s=views.duration_s
        )

    def _sizes(self, views: Views) -> list[tuple[int, int]]:
        return [fit(size, (min(self.ask.cell_height, size[0]), 1 << 30)) for size in views.sizes]

    def _request(self, job: Job, views: Views, *, constraint: bool, thinking: bool, n: int) -> Request:
        numbers = self._numbers(views)
        places = {
            "task": job.task,
            "duration": seconds(views.duration_s),
            "cameras": camera_words(job, views, collage=False),
            "frames": len(numbers),
            "robot": job.robot or "not described",
            "steps": len(job.rubric),
            "rubric": rubric_words(job.rubric),
        }
        videos = tuple(
            VideoInput(
                frames=views.frames(view, numbers, size),
                timestamps_s=views.timestamps[numbers],
                duration_s=views.duration_s,
            )
            for view, size in enumerate(self._sizes(views))
        )
        return Request(
            id=job.id,
            system=self.ask.system,
            prompt=fill(self.ask.prompt, places),
            videos=videos,
            constraint=answer_pattern(job.rubric) if constraint else None,
            max_tokens=self.ask.max_tokens,
            temperature=self.ask.temperature,
            n=n,
            seed=seed_of(job, self.name),
            thinking=thinking,
        )


def rubric_words(steps: Sequence[RubricStep]) -> str:
    """Return a rubric as a prompt lists it."""
    lines = []
    for number, step in enumerate(steps, 1):
        lines.append(f"{number}. {step.action}")
        lines += [f"   {grade.points!r} = {grade.label}" for grade in step.grading]
    return "\n".join(lines)


def answer_pattern(steps: Sequence[RubricStep]) -> str:
    """Return the regular expression of an answer: each number one of its step's points, as literal decimals."""
    choices = ["(" + "|".join(re.escape(repr(grade.points)) for grade in step.grading) + ")" for step in steps]
    return rf"{ANSWER}\[{', '.join(choices)}\]"


def parse_answer(text: str, steps: Sequence[RubricStep]) -> tuple[float, ...] | None:
    """Read the last answer of a reply; None where it has another count of numbers, or one that is not allowed."""
    found = _ANSWER.findall(text)
    if not found:
        return None
    try:
        numbers = [float(part) for part in found[-1].split(",")]
    except ValueError:
        return None
    if len(numbers) != len(steps):
        return None
    points = []
    for number, step in zip(numbers, steps, strict=True):
        allowed = [grade.points for grade in step.grading if abs(grade.points - number) <= _SAME]
        if not allowed:
            return None
        points.append(allowed[0])
    return tuple(points)


def rubric_fields(steps: Sequence[RubricStep], samples: Sequence[Sample], *, keep_thinking: bool) -> dict[str, object]:
    """Sum up the samples of a job.

    Returns:
        ``points`` of the steps and their ``total``: the medoid of the samples that parsed, whose number is ``medoid``;
        ``spread``: the others' mean L1 distance to it; ``samples``, with None for those that did not parse, whose
        texts are in ``raw``; ``invalid`` where none did.
    """
    valid = [number for number, sample in enumerate(samples) if sample.points is not None]
    fields: dict[str, object] = {
        "steps": [step.action for step in steps],
        "samples": [sample.points and list(sample.points) for sample in samples],
        "valid_samples": len(valid),
        "invalid": not valid,
        "raw": [sample.text for sample in samples if sample.points is None],
    }
    if keep_thinking:
        fields["thinking"] = [sample.thinking for sample in samples]
    if valid:
        medoid = find_medoid([samples[number].points or () for number in valid])
        points = list(samples[valid[medoid.index]].points or ())
        fields |= {"points": points, "total": round(sum(points), 9)}
        fields |= {"medoid": valid[medoid.index], "spread": medoid.spread}
    return fields


def _answer_after(request: Request, reply: Reply, steps: Sequence[RubricStep]) -> Request:
    """The second call: the model's own thoughts, and then the answer, kept to the allowed points."""
    thoughts = reply.texts[0].partition(ANSWER.strip())[0].rstrip()
    return replace(
        request,
        prefill=f"{thoughts}\n{ANSWER}[",
        constraint=answer_pattern(steps).removeprefix(rf"{ANSWER}\["),
        max_tokens=_MOST_ANSWER_TOKENS * len(steps) + 8,
    )


def _samples(exchanges: list[Exchange], steps: Sequence[RubricStep], *, split: bool) -> list[Sample]:
    reply = exchanges[-1].reply
    if split:
        text = f"{ANSWER}[{reply.texts[0]}"
        return [Sample(points=parse_answer(text, steps), text=text, thinking=exchanges[0].reply.texts[0])]
    thinking = reply.thinking or (None,) * len(reply.texts)
    return [
        Sample(points=parse_answer(text, steps), text=text, thinking=thought)
        for text, thought in zip(reply.texts, thinking, strict=True)
    ]


def _same(samples: Sequence[Sample]) -> bool:
    """Whether several samples say the same to the letter, thoughts included: sampling does not work then."""
    return len(samples) > 1 and len({(sample.text, sample.thinking) for sample in samples}) == 1
