"""What the three signals share: how a job's frames become videos, and who prepares and asks for them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from regrasp.core.provenance import digest
from regrasp.rewards.engine import Capabilities, MissingCapability, Reply, Request, VideoInput
from regrasp.rewards.jobs import Job
from regrasp.rewards.profiles import Ask
from regrasp.rewards.views import Views

LAYOUTS = {
    1: "",
    2: "Each frame holds two views: left and right.",
    3: "Each frame holds three views: left, centre and right.",
    4: "Each frame holds four views: above, the top and the front or bottom one; below, the left and the right one.",
}
MASS_OUTSIDE = 0.5
"""Less probability than this on the answers that were asked for, and a reply is flagged."""


@runtime_checkable
class Desk(Protocol):
    """Where a signal has its requests prepared and answered, with as many at once as the run allows."""

    async def ask(self, build: Callable[[], Request], *after: Callable[[Request, Reply], Request]) -> "list[Exchange]":
        """Build a request in a thread and have it answered; then each that follows from the exchange before."""
        ...


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What was asked, without the pictures, and what came back."""

    prompt: str
    seed: int | None
    frames: tuple[int, ...]
    """How many frames each video had."""
    reply: Reply


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A row's own part: what a signal found, and what it took.

    Attributes:
        fields: The signal's outputs; ``invalid`` is True where a reply did not parse, with its text in ``raw``.
        exchanges: All that was asked.
        flags: What is odd, in words.
    """

    fields: dict[str, object]
    exchanges: list[Exchange]
    flags: list[str] = field(default_factory=list)


@runtime_checkable
class Signal(Protocol):
    """One of the three signals, set up for a run."""

    @property
    def name(self) -> str:
        """The signal's name: terminal, dense or rubric."""
        ...

    @property
    def ask(self) -> Ask:
        """How the profile asks for it."""
        ...

    def settings(self) -> dict[str, object]:
        """What decides its rows besides the profile, for the config's digest."""
        ...

    def check(self, capabilities: Capabilities, jobs: list[Job]) -> None:
        """Refuse an engine that cannot give this signal, before anything is asked."""
        ...

    def first_request(self, job: Job, views: Views) -> Request:
        """The first question about a job, for a look at what the model would see."""
        ...

    def describe(self, job: Job, views: Views) -> str:
        """What would be asked about a job, in one line."""
        ...

    async def judge(self, job: Job, views: Views, desk: Desk, capabilities: Capabilities) -> Judged:
        """Have a job judged."""
        ...


def collage_video(views: Views, numbers: Int[np.ndarray, " n"], ask: Ask) -> VideoInput:
    """Return frames of all views as one video."""
    return VideoInput(
        frames=views.collage(numbers, ask.cell_height),
        timestamps_s=views.timestamps[numbers],
        duration_s=views.duration_s,
    )


def seed_of(job: Job, signal: str, extra: int = 0) -> int:
    """Return a seed of 31 bits that is the same for the same job and signal on every run."""
    return int(digest([job.id, signal, extra])[:8], 16) & 0x7FFFFFFF


def need(capability: bool, what: str, why: str, mend: str) -> None:
    """Refuse an engine that lacks something.

    Raises:
        MissingCapability: ``capability`` is False.
    """
    if not capability:
        message = f"This engine was tried and does not give {what}, which {why}. Mend: {mend}."
        raise MissingCapability(message)


def seconds(value: float) -> str:
    """Return a time as prompts say it, to a tenth of a second."""
    return f"{value:.1f}"


def camera_words(job: Job, views: Views, *, collage: bool) -> str:
    """Return what the prompt says of the cameras."""
    names = job.cameras or tuple(views.names)
    described = "; ".join(f"{n}: {name}" for n, name in enumerate(names, 1)) if len(names) > 1 or job.cameras else ""
    parts = [LAYOUTS[len(views.names)] if collage else "", f"Cameras: {described}." if described else ""]
    return " ".join(part for part in parts if part)
