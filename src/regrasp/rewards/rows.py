"""A file of results that only grows: one JSON line for each job, on disk before the next is begun."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from regrasp.core.errors import ConfigError, StorageError

Key = tuple[str, str, str, str]
"""The job's id, the signal, the config's digest and the job's own digest."""


def key_of(row: dict[str, Any]) -> Key:
    """Return what makes a row the answer to one question."""
    return row["id"], row["signal"], row["config"], row["job"]


class RowFile:
    """Rows that are appended as they come, and survive a kill at any time.

    A line that a killed process left half written is dropped. Only one process writes a file at a time. A file
    without rows is taken away again, with the folders that were made for it.

    Args:
        path: The file; it is opened as a context manager, and made if it is missing.
        replace: The rows that it holds count for nothing, and go when the first new one comes.
    """

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        self.path = path
        self.done: set[Key] = set()
        self._replace = replace
        self._made: list[Path] = []
        self._handle: BinaryIO | None = None

    def __enter__(self) -> Self:
        """Open the file and learn which questions it answers.

        Raises:
            StorageError: It cannot be written, or another process writes it.
            ConfigError: It holds something else than such rows.
        """
        try:
            self._made = [folder for folder in self.path.parents if not folder.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = self.path.open("a+b")
        except OSError as error:
            message = f"'{self.path}' cannot be written ({error.strerror}). Mend: choose another --output."
            raise StorageError(message) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            message = f"Another process writes '{self.path}'. Mend: wait for it, or choose another --output."
            raise StorageError(message) from None
        except OSError:
            pass  # a file system without locks
        try:
            _drop_torn_line(handle)
            rows = {key_of(row) for row in read_rows(self.path)}
            self.done = set() if self._replace else rows
        except BaseException:
            handle.close()
            raise
        self._handle = handle
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None
        if not self.path.stat().st_size:
            with contextlib.suppress(OSError):
                self.path.unlink()
                for folder in self._made:
                    folder.rmdir()

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; it is on disk when this returns."""
        assert self._handle is not None
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            if self._replace:
                self._handle.truncate(0)
                self._replace = False
            self._handle.write(line.encode())
            self._handle.flush()
            os.fsync(self._handle.fileno())
        except OSError as error:
            message = (
                f"Writing '{self.path}' failed: {error.strerror}; the rows before are kept. Mend: free some space."
            )
            raise StorageError(message) from error
        self.done.add(key_of(row))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; a torn last line is left out.

    Raises:
        ConfigError: A line is not a row.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
                key_of(row)
            except (ValueError, TypeError, KeyError):
                message = f"'{path}', line {number}, is no row of `regrasp annotate`. Mend: choose another --output."
                raise ConfigError(message) from None
            yield row


def _drop_torn_line(handle: BinaryIO, block: int = 1 << 16) -> None:
    """Cut the file after its last whole line."""
    end = handle.seek(0, os.SEEK_END)
    keep = end
    while keep:
        start = max(0, keep - block)
        handle.seek(start)
        newline = handle.read(keep - start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep < end:
        handle.truncate(keep)
