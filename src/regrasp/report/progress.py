"""How far long work has come: a bar with a rate and the time left, or plain lines when not on a terminal."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator

_PLAIN_EVERY_S = 10.0


def track[T](items: Iterable[T], *, total: int | None = None, description: str, unit: str = "it") -> Iterator[T]:
    """Yield ``items`` while showing progress on standard error.

    Args:
        items: What is worked through.
        total: How many there are; ``len(items)`` where it is left out and known.
        description: What is being done.
        unit: What one item is called in the rate.
    """
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type] - checked above
    if sys.stderr.isatty():
        yield from _bar(items, total, description, unit)
    else:
        yield from _lines(items, total, description, unit)


def count_steps(steps: int) -> Callable[[int], None]:
    """Return a callback that shows the steps done; the first call may be the step that was resumed from."""
    shown = iter(track(range(steps + 1), total=steps + 1, description="Training", unit="steps"))
    next(shown)
    done = 0

    def advance(step: int) -> None:
        nonlocal done
        for _ in range(step - done):
            next(shown, None)
        done = step
        if step == steps:
            next(shown, None)

    return advance


def _bar[T](items: Iterable[T], total: int | None, description: str, unit: str) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    started = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total, rate="")
        for done, item in enumerate(items, 1):
            yield item
            speed = done / max(time.monotonic() - started, 1e-9)
            progress.update(task, completed=done, rate=f"{speed:,.1f} {unit}/s")


def _lines[T](items: Iterable[T], total: int | None, description: str, unit: str) -> Iterator[T]:
    started = shown = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - shown >= _PLAIN_EVERY_S:
            shown = now
            speed = done / (now - started)
            left = f" of {total}, {(total - done) / speed:.0f} s left" if total else ""
            print(f"{description}: {done}{left} ({speed:,.1f} {unit}/s)", file=sys.stderr, flush=True)
