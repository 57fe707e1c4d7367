"""Work on episodes, one at a time in each process."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from regrasp.core.processors import usable_cores

AHEAD = 4
"""Jobs that wait at each process, so that memory holds few of them."""

_function: Callable[[Any], Any] | None = None


def in_processes[Job, Result](function: Callable[[Job], Result], jobs: Iterable[Job], workers: int) -> Iterator[Result]:
    """Yield the results of some jobs, in their order.

    Processes are spawned and not forked, since a video decoder opened before a fork gives wrong frames. With one
    worker, the work is done in this process.

    Args:
        function: What is done; it is sent to each process once, so it may hold the datasets.
        jobs: What it is done to; taken as they are needed.
        workers: How many processes.
    """
    if workers <= 1:
        yield from map(function, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(function,)) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                waiting.append(pool.submit(_work, job))
                if len(waiting) >= AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def cores(wanted: int | None, most: int = 8) -> int:
    """Return how many processes to use: those wanted, or one a core that this process may use, at most ``most``."""
    return wanted or min(usable_cores(), most)


def _begin(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function


def _work(job: Any) -> Any:  # noqa: ANN401 - any job
    assert _function is not None, "a process of the pool starts with its function"
    return _function(job)
