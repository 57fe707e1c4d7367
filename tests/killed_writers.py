"""Writers that are killed, for test_storage.py; run as a script, so that nothing but the writer is forked.

    python -m tests.killed_writers lines FOLDER     killed at every line of storage.py in turn
    python -m tests.killed_writers moments FOLDER   killed from outside, at many moments
    python -m tests.killed_writers both FOLDER      two writers of the same files, watched

Each prints one JSON value.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from regrasp.data import storage

NAMES = ("returns_a.parquet", "sub/returns_a.parquet", "stats.json")


def content(version: int, name: str) -> bytes:
    """What a version of a file holds: its own letter throughout, in a length of its own."""
    return bytes([65 + version]) * (1 + 20_000 * version + len(name))


def write(folder: Path, version: int) -> None:
    """Write every file in one transaction, in pieces."""
    with storage.Transaction() as transaction:
        for name in NAMES:
            handle, whole = transaction.create(folder / name), content(version, name)
            for start in range(0, len(whole), 15_000):
                handle.write(whole[start : start + 15_000])
        transaction.commit()


def state(folder: Path) -> dict[str, Any]:
    """Every file: the version that it holds whole, or None."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name, held = str(path.relative_to(folder)), path.read_bytes()
            found[name] = next((v for v in range(8) if name in NAMES and held == content(v, name)), None)
    return found


def forked(work: Callable[[], None]) -> int:
    """Do ``work`` in a child; its process id."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return child


def killed_at_line(folder: Path, count: int) -> bool:
    """Write version 1 and be killed at the ``count``-th line of storage.py; False if it was over before."""

    def work() -> None:
        left = count

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename != storage.__file__:
                return None
            left -= event == "line"
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        write(folder, 1)

    _, status = os.waitpid(forked(work), 0)
    return os.WIFSIGNALED(status)


def lines(folder: Path) -> list[dict[str, Any]]:
    """The states after a kill at every line, over no files and over old files."""
    os.fsync = lambda descriptor: None  # a kill leaves the page cache alone; test_storage.py looks after fsync
    seen = []
    for old in (False, True):
        count, killed = 0, True
        while killed:
            place = folder / f"{old}-{count}"
            (place / "sub").mkdir(parents=True)
            if old:
                write(place, 0)
            killed = killed_at_line(place, count)
            left = state(place)
            write(place, 2)  # the next run
            seen.append({"old": old, "killed": killed, "state": left, "next": state(place)})
            count += 1
    return seen


def moments(folder: Path) -> list[dict[str, Any]]:
    """The states after kills from outside."""
    (folder / "sub").mkdir()
    write(folder, 0)
    seen, chance = [], random.Random(0)
    for _ in range(30):

        def work() -> None:
            version = 0
            while True:
                version = (version + 1) % 4
                write(folder, version)

        child = forked(work)
        time.sleep(chance.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.append(state(folder))
    return seen


def both(folder: Path) -> dict[str, Any]:
    """What is seen while two writers write versions of their own, and what is left."""
    (folder / "sub").mkdir()
    write(folder, 0)

    def worker(versions: tuple[int, int]) -> Callable[[], None]:
        def work() -> None:
            for _ in range(12):
                for version in versions:
                    write(folder, version)

        return work

    children = [forked(worker((1, 2))), forked(worker((3, 4)))]
    seen: set[int | None] = set()
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        for name in NAMES:
            held = (folder / name).read_bytes()
            seen.add(next((v for v in range(8) if held == content(v, name)), None))
        for child in set(children) - set(statuses):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[done] = status
    return {"seen": sorted(seen, key=str), "left": state(folder), "statuses": list(statuses.values())}


if __name__ == "__main__":
    print(json.dumps({"lines": lines, "moments": moments, "both": both}[sys.argv[1]](Path(sys.argv[2]))))
