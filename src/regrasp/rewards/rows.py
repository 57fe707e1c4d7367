"""A file of results that only grows: one JSON line for each job, on disk before the next is begun."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from regrasp.core.errors import ConfigError, StorageError

Key = tuple[str, str, str, str]
"""The job's id, the signal, the config's digest and the job's own digest."""
_ROW_START = b'{"id": "'


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
        self._handle: FileIO | None = None

    def __enter__(self) -> Self:
        """Open the file and learn which questions it answers.

        Raises:
            StorageError: It cannot be written, or another process writes it.
            ConfigError: It holds something else than such rows; it is left as it was.
        """
        handle = self._open()
        try:
            rows = {key_of(row) for row in read_rows(self.path)}
            rows |= _mend_last_line(handle, self.path, known=bool(rows))
            self.done = set() if self._replace else rows
        except BaseException:
            handle.close()
            raise
        self._handle = handle
        return self

    def _open(self) -> FileIO:
        """Open the file for this process alone; without a buffer, so that what failed to be written is not kept."""
        try:
            if self.path.exists() and not self.path.is_file():
                message = f"'{self.path}' is no regular file, so no rows are kept in it. Mend: choose another --output."
                raise StorageError(message)
            self._made = [folder for folder in self.path.parents if not folder.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = FileIO(self.path, "a+")
        except StorageError:
            raise
        except OSError as error:
            message = (
                f"'{self.path}' cannot be written ({error.strerror}). Mend: choose another --output, or for the rows "
                "of a dataset's --tag give --sidecars DIR."
            )
            raise StorageError(message) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            message = f"Another process writes '{self.path}'. Mend: wait for it, or choose another --output or --tag."
            raise StorageError(message) from None
        except OSError:
            pass  # a file system without locks
        return handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None
        with contextlib.suppress(OSError):
            if not self.path.stat().st_size:
                self.path.resolve().unlink()
                for folder in self._made:
                    folder.rmdir()

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; it is on disk when this returns.

        Raises:
            StorageError: It is not, and the file is as it was.
        """
        assert self._handle is not None
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            if not os.fstat(self._handle.fileno()).st_nlink:
                message = f"'{self.path}' was removed while rows were written to it. Mend: run the command again."
                raise StorageError(message)
            if self._replace:
                self._handle.truncate(0)
                self._replace = False
            _write_whole(self._handle, line.encode())
            os.fsync(self._handle.fileno())
        except StorageError:
            raise
        except OSError as error:
            message = (
                f"Writing '{self.path}' failed: {error.strerror}; the rows before are kept. Mend: free some space, and "
                "run the command again."
            )
            raise StorageError(message) from error
        self.done.add(key_of(row))


def _write_whole(handle: FileIO, content: bytes) -> None:
    """Append all of it or nothing."""
    before = handle.seek(0, os.SEEK_END)
    left = memoryview(content)
    try:
        while left:
            left = left[handle.write(left) or 0 :]
    except OSError:
        with contextlib.suppress(OSError):
            handle.truncate(before)
        raise


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; a last line without an end is left out.

    Raises:
        ConfigError: A line is not a row.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            row = _row(line)
            if row is None:
                raise _no_row(path, number)
            yield row


def _row(line: bytes) -> dict[str, Any] | None:
    """The row on a line; None where it is none."""
    try:
        row = json.loads(line)
        hash(key_of(row))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return row


def _no_row(path: Path, number: int) -> ConfigError:
    message = f"'{path}', line {number}, is no row of `regrasp annotate`. Mend: choose another --output or --tag."
    return ConfigError(message)


def _mend_last_line(handle: FileIO, path: Path, *, known: bool) -> set[Key]:
    """Cut a last line that a kill left half written; one that lacks only its end gets it, and is a row.

    Args:
        handle: The file.
        path: Its path, for the error.
        known: Whether there are rows before it, so that the file is known to be one of rows.

    Returns:
        The key of the row that the line is, if it is one.

    Raises:
        ConfigError: The line is of something else than rows, and is left as it is.
    """
    start = _last_line_start(handle)
    handle.seek(start)
    line = handle.readall()
    if not line:
        return set()
    row = _row(line)
    if row is not None:
        _write_whole(handle, b"\n")
        return {key_of(row)}
    if not known and (_is_json(line) or not line.startswith(_ROW_START[: len(line)])):
        raise _no_row(path, 1)
    handle.truncate(start)
    return set()


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _last_line_start(handle: FileIO, block: int = 1 << 16) -> int:
    """Return where the line begins that the file ends with; its length where the last line is whole."""
    keep = handle.seek(0, os.SEEK_END)
    while keep:
        start = max(0, keep - block)
        handle.seek(start)
        newline = handle.read(keep - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        keep = start
    return keep
