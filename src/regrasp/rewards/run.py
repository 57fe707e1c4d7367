"""Judging many jobs: frames are prepared while the model answers, and every row is kept as it comes."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from regrasp.core.errors import RegraspError, StorageError
from regrasp.core.provenance import digest
from regrasp.rewards.engine import (
    Capabilities,
    EngineError,
    EngineUnavailable,
    JudgeEngine,
    Reply,
    Request,
    RequestTooLong,
)
from regrasp.rewards.jobs import Job
from regrasp.rewards.judging import Exchange, Judged, Signal
from regrasp.rewards.profiles import Profile
from regrasp.rewards.rows import RowFile
from regrasp.rewards.views import Views

PREPARED_AHEAD = 2
"""Requests that are prepared, beyond those that the engine answers."""
_PREPARERS = 4
"""Threads that decode; decoding holds no lock of Python's."""
_LEAST_FAILURES = 5
"""So many engine failures in a row, or as many as calls run at once, end the run."""


@dataclass
class RunReport:
    """What a run did.

    Attributes:
        judged: Jobs that got a row.
        repeated: Jobs that had one already.
        invalid: Rows whose reply did not parse.
        flagged: Rows with something odd.
        failed: Jobs without a row, and why.
        prompt_tokens: Tokens read by the model.
        completion_tokens: Tokens written by it.
        wall_s: How long it took.
        idle_s: How long of it no call was with the engine.
    """

    judged: int = 0
    repeated: int = 0
    invalid: int = 0
    flagged: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    wall_s: float = 0.0
    idle_s: float = 0.0


def config_digest(signal: Signal, profile: Profile, engine: str, model: str) -> str:
    """Return the digest of all that decides an answer besides the job."""
    return digest([signal.name, profile.digest, signal.settings(), engine, model])


async def judge_all(
    signal: Signal,
    jobs: list[Job],
    engine: JudgeEngine,
    rows: RowFile,
    profile: Profile,
    *,
    concurrency: int = 8,
    on_done: Callable[[], object] = lambda: None,
) -> RunReport:
    """Have every job judged that has no row yet.

    Args:
        signal: What is asked.
        jobs: What is judged.
        engine: Who answers.
        rows: Where rows are kept, opened.
        profile: The profile of ``signal``.
        concurrency: How many calls the engine has at once.
        on_done: Called after each job.

    Raises:
        MissingCapability: The engine cannot give this signal.
        EngineError: The engine cannot be used, or has failed several times in a row; the rows so far are kept.
    """
    config = config_digest(signal, profile, engine.name, engine.model)
    waiting = [job for job in jobs if (job.id, signal.name, config, job.digest) not in rows.done]
    report = RunReport(repeated=len(jobs) - len(waiting))
    if not waiting:
        return report
    capabilities = await engine.probe()
    signal.check(capabilities, waiting)
    started = time.monotonic()
    with ThreadPoolExecutor(_PREPARERS, thread_name_prefix="frames") as pool:
        desk = _Desk(engine, concurrency, pool)
        run = _Run(
            signal, desk, rows, profile, capabilities, config, report, on_done, max(_LEAST_FAILURES, concurrency)
        )
        queue = iter(waiting)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(waiting), concurrency + PREPARED_AHEAD)):
                    group.create_task(run.work(queue))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
    report.wall_s = time.monotonic() - started
    report.idle_s = desk.idle_s(report.wall_s)
    return report


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The first single error of a group."""
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
        self._busy_s = 0.0
        self._since = 0.0

    async def ask(self, build: Callable[[], Request], *after: Callable[[Request, Reply], Request]) -> list[Exchange]:
        async with self._held:
            request = await self.prepare(build)
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
                    self._busy_s += time.monotonic() - self._since
        frames = tuple(len(video.frames) for video in request.videos)
        return Exchange(prompt=request.prompt, seed=request.seed, frames=frames, reply=reply)

    def idle_s(self, wall_s: float) -> float:
        return max(0.0, wall_s - self._busy_s)


@dataclass
class _Run:
    signal: Signal
    desk: _Desk
    rows: RowFile
    profile: Profile
    capabilities: Capabilities
    config: str
    report: RunReport
    on_done: Callable[[], object]
    most_failures: int
    failures: int = 0

    async def work(self, queue: Iterator[Job]) -> None:
        """Judge one job after another from a queue that several workers share."""
        for job in queue:
            try:
                await self._judge(job)
            except (BaseExceptionGroup, RegraspError) as error:
                failure = _first(error) if isinstance(error, BaseExceptionGroup) else error
                if self._ends_the_run(failure):
                    self.desk.closed = True
                    raise failure from None
                self.report.failed[job.id] = str(failure)
            self.on_done()

    async def _judge(self, job: Job) -> None:
        views = await self.desk.prepare(lambda: Views(job))
        judged = await self.signal.judge(job, views, self.desk, self.capabilities)
        row = self._row(job, judged)
        self.rows.append(row)
        self.failures = 0
        self.report.judged += 1
        self.report.invalid += bool(row["invalid"])
        self.report.flagged += bool(row["flags"])
        self.report.prompt_tokens += row["prompt_tokens"]
        self.report.completion_tokens += row["completion_tokens"]

    def _ends_the_run(self, error: BaseException) -> bool:
        """Whether no further job could be judged; one whose video or request cannot be used is left out instead."""
        if not isinstance(error, RegraspError) or isinstance(error, EngineUnavailable | StorageError):
            return True
        if isinstance(error, EngineError) and not isinstance(error, RequestTooLong):
            self.failures += 1
            return self.failures >= self.most_failures
        return False

    def _row(self, job: Job, judged: Judged) -> dict[str, Any]:
        engine, exchanges = self.desk.engine, judged.exchanges
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
            "profile": f"{self.profile.name}@{self.profile.version}",
            "profile_digest": self.profile.digest,
            "prompt_digest": digest([exchange.prompt for exchange in exchanges]),
            "seeds": [exchange.seed for exchange in exchanges],
            "frames": [list(exchange.frames) for exchange in exchanges],
            "calls": len(exchanges),
            "prompt_tokens": sum(exchange.reply.prompt_tokens for exchange in exchanges),
            "completion_tokens": sum(exchange.reply.completion_tokens for exchange in exchanges),
        }
