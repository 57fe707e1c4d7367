"""Judging many jobs: whoever judges them, one process keeps every row as it comes."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from regrasp.core.errors import RegraspError, StorageError
from regrasp.rewards.bench import Bench, Row, first_error
from regrasp.rewards.engine import EngineError, EngineUnavailable, Metered, RequestTooLong, Usage
from regrasp.rewards.jobs import Job
from regrasp.rewards.rows import RowFile

_LEAST_FAILURES = 5
"""So many engine failures in a row, or as many as are judged at once, end the run."""


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
        usage: All that was asked of a server, its probes and lost answers included, where that is counted.
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
    usage: Usage | None = None


async def judge_on(
    bench: Bench, jobs: list[Job], rows: RowFile, *, on_done: Callable[[], object] = lambda: None
) -> RunReport:
    """Have every job judged that has no row yet.

    Args:
        bench: Who judges; closed at the end.
        jobs: What is judged.
        rows: Where rows are kept, opened.
        on_done: Called after each job.

    Raises:
        MissingCapability: The engine cannot give this signal.
        EngineError: The engine cannot be used, or has failed several times in a row; the rows so far are kept.
    """
    try:
        waiting = [job for job in jobs if (job.id, bench.signal.name, bench.config, job.digest) not in rows.done]
        report = RunReport(repeated=len(jobs) - len(waiting))
        if waiting:
            await _judge_waiting(bench, waiting, rows, report, on_done)
        return report
    finally:
        await bench.close()


async def _judge_waiting(
    bench: Bench, waiting: list[Job], rows: RowFile, report: RunReport, on_done: Callable[[], object]
) -> None:
    at_once = await bench.open(waiting)
    started = time.monotonic()
    run = _Run(bench, rows, report, on_done, max(_LEAST_FAILURES, at_once))
    queue = iter(enumerate(waiting))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(waiting), at_once)):
                group.create_task(run.work(queue))
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    report.wall_s = time.monotonic() - started
    report.idle_s = await bench.idle_s(report.wall_s)
    report.usage = bench.usage if isinstance(bench, Metered) else None


@dataclass
class _Run:
    bench: Bench
    rows: RowFile
    report: RunReport
    on_done: Callable[[], object]
    most_failures: int
    failures: int = 0

    async def work(self, queue: Iterator[tuple[int, Job]]) -> None:
        """Have one job after another judged from a queue that several workers share."""
        for number, job in queue:
            try:
                self._keep(await self.bench.judge(number))
            except RegraspError as error:
                if self._ends_the_run(error):
                    self.bench.stop()
                    raise
                self.report.failed[job.id] = str(error)
            except BaseException:
                self.bench.stop()
                raise
            self.on_done()

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        self.failures = 0
        self.report.judged += 1
        self.report.invalid += bool(row["invalid"])
        self.report.flagged += bool(row["flags"])
        self.report.prompt_tokens += row["prompt_tokens"]
        self.report.completion_tokens += row["completion_tokens"]

    def _ends_the_run(self, error: RegraspError) -> bool:
        """Whether no further job could be judged; one whose video or request cannot be used is left out instead."""
        if isinstance(error, EngineUnavailable | StorageError):
            return True
        if isinstance(error, EngineError) and not isinstance(error, RequestTooLong):
            self.failures += 1
            return self.failures >= self.most_failures
        return False
