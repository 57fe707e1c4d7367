"""Judging on the machines of a Ray cluster: each worker prepares frames and asks its own engine.

One process hands out the jobs and keeps the rows, so that a run's file, and how it resumes, are those of a run on one
machine. The workers are benches like the one of a single machine, behind Ray's actors.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrasp.core.errors import RegraspError, VideoError
from regrasp.rewards.bench import PREPARED_AHEAD, LocalBench, Row, config_digest
from regrasp.rewards.engine import EngineError, EngineUnavailable, JudgeEngine, Usage
from regrasp.rewards.engines.openai_transport import API_KEY_VARIABLES
from regrasp.rewards.jobs import Job
from regrasp.rewards.judging import Signal
from regrasp.rewards.profiles import Profile
from regrasp.rewards.ray_cluster import Cluster, why

log = logging.getLogger(__name__)

START_S = 120.0
"""How long a cluster is waited for to start a worker."""
TRIES = 3
"""A job that loses so many workers is given up."""
CLOSE_S = 30.0
"""How long workers may take to close their engines."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every worker is given."""

    make: Callable[[], JudgeEngine]
    signal: Signal
    profile: Profile
    concurrency: int
    judge: tuple[object, ...]
    """What decides the engine's answers besides its name and its model's: rows record it."""
    jobs: tuple[Job, ...]
    digests: tuple[str, ...]
    """Of the jobs, where the run was started: another one on a worker means that it sees other files."""
    folder: Path
    """Where the run was started: what relative paths start from."""
    keys: dict[str, str] = field(repr=False)
    """Of servers, by the variables that hold them: the machines of the cluster need not have them."""


class Worker:
    """One engine on some machine of the cluster; errors are returned, since Ray would wrap what is raised."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._bench: LocalBench | None = None
        os.environ.update(task.keys)
        if task.folder.is_dir():
            os.chdir(task.folder)

    async def ready(self) -> None:
        """Show that the worker has been started."""

    async def open(self) -> RegraspError | None:
        """Load the engine."""
        task = self._task
        try:
            bench = LocalBench(task.signal, task.make(), task.profile, task.concurrency, judge=task.judge)
            await bench.open(task.jobs)
        except RegraspError as error:
            return error
        self._bench = bench
        return None

    async def judge(self, number: int) -> Row | RegraspError:
        """Judge a job."""
        assert self._bench is not None
        job, here = self._task.jobs[number], socket.gethostname()
        try:
            gone = job.episode is not None and not job.episode.dataset.path.is_dir()
            if gone or job.digest != self._task.digests[number]:
                message = (
                    f"Job {job.id!r}: the machine {here!r} does not see the files that the machine sees where the run "
                    "was started. Mend: keep videos and datasets in a folder that all machines share under one path."
                )
                return VideoError(message)
            return await self._bench.judge(number)
        except RegraspError as error:
            return error

    async def account(self, wall_s: float) -> tuple[float, Usage | None]:
        """Return how long of ``wall_s`` the engine had no call, and what it asked of a server."""
        assert self._bench is not None
        return await self._bench.idle_s(wall_s), self._bench.usage

    async def close(self) -> None:
        """Let the engine go."""
        if self._bench is not None:
            await self._bench.close()


@dataclass
class _Hand:
    """A worker as the run knows it."""

    actor: Any
    """Ray's handle of it."""
    calls: int = 0


class RayBench:
    """Judges with one engine on each of several workers.

    Args:
        signal: What is asked.
        profile: The profile of ``signal``.
        make: Builds an engine, on the worker.
        engine: The engine's name, as rows record it.
        model: The model's, likewise.
        address: Of the cluster: HOST:PORT, "auto" for the one that runs here, "local" to start one here.
        workers: How many; None for one on each group of ``gpus`` GPUs, or on each machine.
        concurrency: How many calls each engine has at once.
        gpus: How many GPUs an engine takes where there are any.
        judge: What decides its answers besides its name and the model's.
    """

    def __init__(
        self,
        signal: Signal,
        profile: Profile,
        make: Callable[[], JudgeEngine],
        engine: str,
        model: str,
        *,
        address: str,
        workers: int | None = None,
        concurrency: int = 8,
        gpus: int = 0,
        judge: Sequence[object] = (),
    ) -> None:
        self.signal = signal
        self.config = config_digest(signal, profile, engine, model, judge)
        self._profile = profile
        self._judge = tuple(judge)
        self._make = make
        self._wanted = workers
        self._concurrency = concurrency
        self._gpus = gpus
        self._cluster = Cluster(address)
        self._task: Any = None
        self._each_gpus = 0
        self._hands: list[_Hand] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self.usage: Usage | None = None
        """What workers that are left asked of servers, known once ``idle_s`` has been asked."""
        self._suspects = asyncio.Lock()

    async def open(self, jobs: Sequence[Job]) -> int:
        """Connect to the cluster, start workers and load their engines.

        Raises:
            EngineUnavailable: The cluster does not answer, or starts no worker in ``START_S``.
            RegraspError: No worker's engine can be used; it is one of theirs.
        """
        found = self._cluster.connect(self._wanted)
        self._each_gpus = min(self._gpus, found.gpus)
        count = self._wanted or (found.gpus // self._each_gpus if self._each_gpus else found.machines)
        task = Task(
            make=self._make,
            signal=self.signal,
            profile=self._profile,
            concurrency=self._concurrency,
            judge=self._judge,
            jobs=tuple(jobs),
            digests=tuple(job.digest for job in jobs),
            folder=Path.cwd(),
            keys={name: os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)},
        )
        self._task = self._cluster.put(task)
        await asyncio.wait([self._start_one() for _ in range(count)])
        await self._free_hand()
        return len(self._hands) * (self._concurrency + PREPARED_AHEAD)

    def _start_one(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self._start())
        self._starting.add(task)
        task.add_done_callback(self._note_start)
        return task

    def _note_start(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            if self._hands:
                log.warning("Going on with %d workers: %s", len(self._hands), self._failure)

    async def _start(self) -> None:
        """Have a worker started and its engine loaded; an error where it cannot be."""
        actor = self._cluster.start(Worker, self._task, gpus=self._each_gpus)
        try:
            async with asyncio.timeout(START_S):
                await actor.ready.remote()
            error = await actor.open.remote()
        except TimeoutError:
            needs = f"one free core and {self._each_gpus} free GPUs" if self._each_gpus else "one free core"
            error = EngineUnavailable(
                f"The Ray cluster started no worker in {START_S:.0f} s. Each needs {needs}; free are "
                f"{self._cluster.free()}. Mend: fewer --workers, or wait until other work on the cluster is done."
            )
        except self._cluster.lost as lost:
            error = EngineUnavailable(
                f"A worker of the Ray cluster ended before it could judge ({why(lost)}). Mend: see that Regrasp is "
                "installed on every machine in the same version, and that the model fits a machine's memory."
            )
        if error is not None:
            self._cluster.kill(actor)
            raise error
        self._hands.append(_Hand(actor=actor))

    async def judge(self, number: int) -> Row:
        """Return a job's row; it is judged again where its worker was lost.

        Jobs that have lost one are judged one at a time, so that one that no worker survives takes few others along.
        """
        answer = await self._try(number)
        for _ in range(TRIES - 1):
            if isinstance(answer, self._cluster.lost):
                async with self._suspects:
                    answer = await self._try(number)
        if isinstance(answer, self._cluster.lost):
            raise EngineError(
                f"{TRIES} workers of the Ray cluster were lost, one after another, over this job ({why(answer)}). "
                "Mend: see what memory they have, lower --concurrency, and run the command again."
            )
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _try(self, number: int) -> Row | BaseException:
        """Have a job judged; the error that it gets, or that of Ray's by which its worker was found to be lost."""
        hand = await self._free_hand()
        hand.calls += 1
        try:
            return await hand.actor.judge.remote(number)
        except self._cluster.lost as error:
            if hand in self._hands:
                log.info("A worker was lost (%s); another one is started.", why(error))
                self._hands.remove(hand)
                self._start_one()
            return error
        finally:
            hand.calls -= 1

    async def _free_hand(self) -> _Hand:
        """The worker with the fewest calls; where there is none, the first of those that are being started."""
        while not self._hands:
            if not self._starting:
                raise self._failure or asyncio.CancelledError
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
        return min(self._hands, key=lambda hand: hand.calls)

    def stop(self) -> None:
        """Make no further call: the workers are ended."""
        for hand in self._hands:
            self._cluster.kill(hand.actor)
        self._hands.clear()

    async def idle_s(self, wall_s: float) -> float:
        """Return how long of ``wall_s`` an engine had no call, on average over the workers that are left."""
        idle = []
        for hand in self._hands:
            with contextlib.suppress(*self._cluster.lost):
                waited, usage = await hand.actor.account.remote(wall_s)
                idle.append(waited)
                self.usage = _sum(self.usage, usage)
        return sum(idle) / len(idle) if idle else 0.0

    async def close(self) -> None:
        """End the workers, and the cluster if it was started here."""
        for task in self._starting.copy():
            task.cancel()
        try:
            with contextlib.suppress(TimeoutError, *self._cluster.lost):
                async with asyncio.timeout(CLOSE_S):
                    await asyncio.gather(*(hand.actor.close.remote() for hand in self._hands))
            self.stop()
        finally:
            self._cluster.disconnect()


def _sum(one: Usage | None, other: Usage | None) -> Usage | None:
    if one is None or other is None:
        return one or other
    return Usage(
        requests=one.requests + other.requests,
        retries=one.retries + other.retries,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
    )
