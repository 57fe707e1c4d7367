"""Run a command in a fresh process with one thread, and say what it cost."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

WARM = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""The environment in which a second start finds the byte code of the first, as it does on most machines."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_IO_THREADS"), "1")


@dataclass(frozen=True)
class Cost:
    """What a process took: CPU and wall seconds, and its largest resident memory in MiB."""

    cpu_s: float
    wall_s: float
    peak_mib: float


def run(command: Sequence[str]) -> tuple[Cost, str]:
    """Run a command to its end; its cost and its standard output. A failure raises, with what it printed."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=WARM | ONE_THREAD
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{output}")
    return Cost(usage.ru_utime + usage.ru_stime, time.perf_counter() - started, usage.ru_maxrss / 1024), output


def python(*arguments: str) -> list[str]:
    """The command that runs this Python."""
    return [sys.executable, *arguments]


def median(costs: Sequence[Cost]) -> Cost:
    """The median of each figure."""
    figures = ([c.cpu_s for c in costs], [c.wall_s for c in costs], [c.peak_mib for c in costs])
    return Cost(*map(statistics.median, figures))


def spread(costs: Sequence[Cost]) -> str:
    """The least and the most CPU seconds."""
    return f"{min(cost.cpu_s for cost in costs):.2f}-{max(cost.cpu_s for cost in costs):.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
