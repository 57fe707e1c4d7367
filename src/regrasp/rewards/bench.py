"""Where jobs are judged: a bench with one engine, in this process. ``ray_bench`` has such benches on other machines."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from regrasp.core.provenance import digest
from regrasp.rewards.engine import JudgeEngine, Metered, Preparing, Reply, Request, Usage
from regrasp.rewards.jobs import Job
from regrasp.rewards.judging import Exchange, Judged, Signal
from regrasp.rewards.profiles import Profile
from regrasp.rewards.views import Views

PREPARED_AHEAD = 2
"""Requests that are prepared, beyond those that the engine answers."""
_PREPARERS = 4
"""Threads that decode; decoding holds no lock of Python's."""

Row = dict[str, Any]
"""A job's row, as it is kept."""


def config_digest(signal: Signal, profile: Profile, engine: str, model: str, judge: Sequence[object] = ()) -> str:
    """Return the digest of all that decides an answer besides the job.

    Args:
        signal: What is asked.
        profile: Its profile.
        engine: The engine's name.
        model: The model's.
        judge: What else makes the judge the one that it is, such as a model's weights, as a JSON list.
    """
    return digest([signal.name, profile.digest, signal.settings(), engine, model, *judge])


@runtime_checkable
class Bench(Protocol):
    """Judges single jobs, many at once; what becomes of the rows is the caller's."""

    @property
    def signal(self) -> Signal:
        """What is asked."""
        ...

    @property
    def config(self) -> str:
        """The digest of what decides an answer besides the job, as rows record it."""
        ...

    async def open(self, jobs: Sequence[Job]) -> int:
        """Make ready for these jobs, and return how many it takes at once; an error where it cannot."""
        ...

    async def judge(self, number: int) -> Row:
        """Return the row of the job at that place of those it was opened for; an error where it gets none."""
        ...

    def stop(self) -> None:
        """Make no further call: the run has ended."""
        ...

    async def idle_s(self, wall_s: float) -> float:
        """Return how long of a run's time an engine had no call, on average over engines."""
        ...

    async def close(self) -> None:
        """Let go of engines, connections and memory."""
        ...


class LocalBench:
    """Judges with one engine, in this process: frames are prepared in threads while the engine answers.

    Args:
        signal: What is asked.
        engine: Who answers.
        profile: The profile of ``signal``.
        concurrency: How many calls the engine has at once.
        judge: What decides the engine's answers besides its name and its model's.
    """

    def __init__(
        self,
        signal: Signal,
        engine: JudgeEngine,
        profile: Profile,
        concurrency: int,
        *,
        judge: Sequence[object] = (),
    ) -> None:
        self.signal = signal
        self.config = config_digest(signal, profile, engine.name, engine.model, judge)
        self._engine = engine
        self._profile = profile
        self._concurrency = concurrency
        self._desk: _Desk | None = None
        self._jobs: Sequence[Job] = ()

    async def open(self, jobs: Sequence[Job]) -> int:
        """Find out what the engine can do.

        Raises:
            MissingCapability: It cannot give this signal.
            EngineUnavailable: It cannot be used.
        """
        self._jobs = jobs
        self._capabilities = await self._engine.probe()
        self.signal.check(self._capabilities, list(jobs))
        pool = ThreadPoolExecutor(_PREPARERS, thread_name_prefix="frames")
        self._desk = _Desk(self._engine, self._concurrency, pool)
        return self._concurrency + PREPARED_AHEAD

    async def judge(self, number: int) -> Row:
        """Return a job's row; a ``RegraspError`` where its video, its request or the engine cannot be used."""
        desk, job = self._desk, self._jobs[number]
        assert desk is not None
        try:
            views = await desk.prepare(lambda: Views(job))
            return self._row(job, await self.signal.judge(job, views, desk, self._capabilities))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    def stop(self) -> None:
        """Make no further call."""
        if self._desk is not None:
            self._desk.closed = True

    @property
    def usage(self) -> Usage | None:
        """What the engine asked of a server so far, its probes and lost answers included."""
        return self._engine.usage if isinstance(self._engine, Metered) else None

    async def idle_s(self, wall_s: float) -> float:
        """Return how long of ``wall_s`` the engine had no call."""
        return wall_s if self._desk is None else max(0.0, wall_s - self._desk.busy_s)

    async def close(self) -> None:
        """Let the threads and the engine go."""
        if self._desk is not None:
            self._desk.pool.shutdown()
        await self._engine.close()

    def _row(self, job: Job, judged: Judged) -> Row:
        engine, exchanges = self._engine, judged.exchanges
        fields = dict(judged.fields)
        own = fields.pop("flags", [])
        flags = [*judged.flags, *(own if isinstance(own, list) else []), *(f for e in exchanges for f in e.reply.flags)]
        place = job.episode
        return {
            "id": job.id,
            "signal": self.signal.name,
            "config": self.config,
            "job": job.digest,
            "task": job.task,
            "control": job.control,
            "dataset": place
            and {
                "name": place.dataset.name,
                "fingerprint": place.dataset.index().fingerprint,
                "episode_index": place.number,
                "cameras": list(place.cameras),
            },
            "invalid": bool(fields.pop("invalid", False)),
            **fields,
            "flags": list(dict.fromkeys(flags)),
            "engine": engine.name,
            "engine_version": engine.version,
            "model": engine.model,
            "profile": f"{self._profile.name}@{self._profile.version}",
            "profile_digest": self._profile.digest,
            "prompt_digest": digest([exchange.prompt for exchange in exchanges]),
            "seeds": [exchange.seed for exchange in exchanges],
            "frames": [list(exchange.frames) for exchange in exchanges],
            "calls": len(exchanges),
            "prompt_tokens": sum(exchange.reply.prompt_tokens for exchange in exchanges),
            "completion_tokens": sum(exchange.reply.completion_tokens for exchange in exchanges),
        }


def first_error(errors: BaseExceptionGroup) -> BaseException:
    """Return the first single error of a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Desk:
    """Prepares requests in threads and has them answered, with bounds on both."""

    def __init__(self, engine: JudgeEngine, concurrency: int, pool: ThreadPoolExecutor) -> None:
        self.engine = engine
        self.pool = pool
        self._held = asyncio.Semaphore(concurrency + PREPARED_AHEAD)
        self._calls = asyncio.Semaphore(concurrency)
        self.closed = False
        """Set when the run ends early: whoever still waits for a call is not to make it."""
        self._open = 0
        self.busy_s = 0.0
        self._since = 0.0

    async def ask(self, build: Callable[[], Request], *after: Callable[[Request, Reply], Request]) -> list[Exchange]:
        async with self._held:
            request = await self.prepare(build)
            if isinstance(self.engine, Preparing):
                request = await self.engine.prepare(request)
            exchanges = [await self._answer(request)]
            for follow in after:
                request = follow(request, exchanges[-1].reply)
                exchanges.append(await self._answer(request))
        return exchanges

    async def prepare[T](self, make: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.pool, make)

    async def _answer(self, request: Request) -> Exchange:
        async with self._calls:
            if self.closed:
                raise asyncio.CancelledError
            if not self._open:
                self._since = time.monotonic()
            self._open += 1
            try:
                reply = await self.engine.judge(request)
            finally:
                self._open -= 1
                if not self._open:
                    self.busy_s += time.monotonic() - self._since
        frames = tuple(len(video.frames) for video in request.videos)
        return Exchange(prompt=request.prompt, seed=request.seed, frames=frames, reply=reply)
