"""What a judge is asked and what it answers, whichever engine runs the model.

A signal builds a ``Request``; an engine turns it into whatever its model or server takes and gives a ``Reply``. An
engine never interprets a reply: a text that does not parse is the signal's to call invalid.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, UInt8

from regrasp.core.errors import ConfigError, RegraspError


class EngineError(RegraspError, RuntimeError):
    """A judge could not answer: the server is down, refuses the request, or the model cannot take it."""


class EngineUnavailable(EngineError):
    """No request can succeed until the user mends something: nothing listens, the key or the model's name is wrong."""


class RequestTooLong(EngineError):
    """This request's frames and text are more tokens than the model's context holds."""


class MissingCapability(ConfigError):
    """A signal needs something of its engine that the engine cannot do or silently ignores."""


@dataclass(frozen=True, kw_only=True)
class VideoInput:
    """One video as the model sees it: a camera, or a collage of several."""

    frames: UInt8[np.ndarray, "n h w 3"]
    """RGB, in order of time."""
    timestamps_s: Float[np.ndarray, " n"]
    """Each frame's absolute time in the episode."""
    duration_s: float
    """How long the whole episode lasts."""

    def __post_init__(self) -> None:
        """Assert what the views promise: frames, a time for each, and time that does not run backwards."""
        assert self.frames.ndim == 4 and self.frames.shape[0] >= 1 and self.frames.shape[3] == 3, self.frames.shape
        assert self.timestamps_s.shape == (self.frames.shape[0],), (self.frames.shape, self.timestamps_s.shape)
        assert bool(np.all(np.diff(self.timestamps_s) >= 0)), self.timestamps_s


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question to a judge."""

    id: str
    """Names the question in errors and logs."""
    system: str | None
    """The system message."""
    prompt: str
    """The user's message; the videos come before it, in order."""
    videos: tuple[VideoInput, ...]
    """What the judge looks at."""
    prefill: str | None = None
    """The assistant's reply starts with it."""
    constraint: str | None = None
    """A regular expression that the whole of what follows the prefill (and the thinking) matches."""
    score_tokens: tuple[str, ...] | None = None
    """Wanted: the probability of each at the first generated position. Each is one token of the model's."""
    max_tokens: int = 64
    """The most tokens of a reply, thinking included."""
    temperature: float = 0.0
    """0 is greedy."""
    n: int = 1
    """How many replies are drawn."""
    seed: int | None = None
    """Makes the draws repeatable where the engine can."""
    thinking: bool = False
    """Whether the model thinks before it answers."""
    ready: object = field(default=None, repr=False)
    """What the engine made of the videos beforehand, where it is ``Preparing``."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a judge answered, as it came."""

    texts: tuple[str, ...]
    """``n`` replies, without the prefill and the thinking."""
    thinking: tuple[str, ...] = ()
    """``n`` traces of thought where the model thought, or none."""
    probabilities: dict[str, float] | None = None
    """Over the score tokens, summing to 1; NaN where the model's own were not finite."""
    mass: float | None = None
    """The score tokens' probability before they were made to sum to 1, where the engine can tell to within 0.05."""
    finish: tuple[str, ...] = ()
    """Why each reply ended: "stop", "length" or the server's own word."""
    prompt_tokens: int = 0
    """Tokens of the prompt, counted once however many replies were drawn."""
    completion_tokens: int = 0
    """Tokens of all replies together."""
    flags: tuple[str, ...] = ()
    """What is odd about this reply, in words, such as "non-finite log-probabilities"."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine was seen to do, not what it accepts without complaint."""

    constraint: bool
    """A reply that the model would not give is forced by a regular expression."""
    logprobs: bool
    """Probabilities of score tokens come back."""
    several_videos: bool
    """One request holds more than one video."""
    timestamps: bool
    """The model is told every frame's absolute time in the episode."""
    prefill: bool
    """The reply goes on from words put into the assistant's mouth."""
    n: bool
    """One request gives several replies."""
    thinking: bool
    """Thinking comes back apart from the answer, and a constraint leaves it alone."""


@dataclass(kw_only=True)
class Usage:
    """What a server was asked for so far, probes and answers that came to nothing included."""

    requests: int = 0
    """Answered with a reply."""
    retries: int = 0
    """Attempts that had to be repeated."""
    prompt_tokens: int = 0
    """As the server counts them."""
    completion_tokens: int = 0
    """As the server counts them."""

    def spend(self, price_in: float, price_out: float) -> float:
        """Return what this cost, at prices per million tokens read and written."""
        return (self.prompt_tokens * price_in + self.completion_tokens * price_out) / 1e6


@runtime_checkable
class Metered(Protocol):
    """Counts what is asked of a server: an engine, or whoever has one."""

    @property
    def usage(self) -> Usage | None:
        """All of it so far; None where nobody counts."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """An engine that can make a request ready while others are being answered."""

    async def prepare(self, request: Request) -> Request:
        """Return the request with ``ready`` filled in."""
        ...


@runtime_checkable
class JudgeEngine(Protocol):
    """A vision-language model behind one interface."""

    @property
    def name(self) -> str:
        """The engine's name in the registry."""
        ...

    @property
    def model(self) -> str:
        """The model's name or path, as rows record it."""
        ...

    @property
    def version(self) -> str:
        """The engine's version, and the model's where it is known, as rows record it."""
        ...

    async def probe(self) -> Capabilities:
        """Find out by trying what the engine can do; an ``EngineUnavailable`` where it cannot do anything."""
        ...

    async def judge(self, request: Request) -> Reply:
        """Answer one request; an ``EngineError`` after the last attempt."""
        ...

    async def close(self) -> None:
        """Let go of connections and memory."""
        ...
