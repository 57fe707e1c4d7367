"""Files that appear whole or not at all.

A transaction prepares every file of a stage without a name (``O_TMPFILE``, where the file system has it), so that a
process killed while writing leaves nothing behind, and publishes them one right after the other at the end, under a
lock. Linux cannot give a nameless file a name that is taken: it gets a passing name first, in the same instant. Should
a process be killed within that instant, the next commit in the folder removes the passing name.
"""

import contextlib
import errno
import fcntl
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from regrasp.core.errors import StorageError

_PASSING = ".publish"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass
class _Prepared:
    target: Path
    handle: BinaryIO
    temporary: Path | None


class Transaction:
    """New files that are all complete on disk before the first of them becomes visible.

    Used as a context manager; what was not committed when the block ends is discarded.
    """

    def __init__(self) -> None:
        """Start with no file."""
        self._prepared: list[_Prepared] = []
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        """Return the transaction."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Discard what was not committed, and say in words when the disk was full or read-only."""
        where = self._prepared[-1].target.parent if self._prepared else None
        self._discard()
        if isinstance(error, OSError) and not isinstance(error, StorageError) and error.errno in _NO_ROOM:
            raise storage_error(error, where) from error

    def create(self, target: Path) -> BinaryIO:
        """Return an open file whose content becomes ``target`` on commit. The directory is made if it is missing."""
        try:
            self._make_directory(target.parent)
            prepared = _prepare(target)
        except OSError as error:
            raise storage_error(error, target.parent) from error
        self._prepared.append(prepared)
        return prepared.handle

    def _make_directory(self, directory: Path) -> None:
        missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        self._made += reversed(missing)

    def commit(self, guard: Callable[[], object] | None = None) -> list[Path]:
        """Publish every file, in the order of creation: contents are on disk before any name changes.

        Args:
            guard: Called under the lock of all directories, before the first file is published. It refuses by
                raising, for instance when another process has written the same tag meanwhile, and may still write
                what depends on the files as they are now.

        Returns:
            The published paths.
        """
        try:
            for prepared in self._prepared:  # a run that failed may have taken its new folder away again
                prepared.target.parent.mkdir(parents=True, exist_ok=True)
            with _locked({prepared.target.parent.resolve() for prepared in self._prepared}):
                if guard is not None:
                    guard()
                for prepared in self._prepared:
                    prepared.handle.flush()
                    os.fsync(prepared.handle.fileno())
                for prepared in self._prepared:
                    _publish(prepared)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise storage_error(error, self._prepared[-1].target.parent) from error
        published = [prepared.target for prepared in self._prepared]
        self._made = []
        self._discard()
        return published

    def _discard(self) -> None:
        for prepared in self._prepared:
            with contextlib.suppress(OSError):
                prepared.handle.close()
            if prepared.temporary is not None:
                prepared.temporary.unlink(missing_ok=True)
        for directory in reversed(self._made):
            with contextlib.suppress(OSError):  # of another process, which has put something there
                directory.rmdir()
        self._prepared, self._made = [], []


def write_bytes_atomic(target: Path, content: bytes) -> None:
    """Write one file whole or not at all."""
    with Transaction() as transaction:
        transaction.create(target).write(content)
        transaction.commit()


def write_json_atomic(target: Path, value: object) -> None:
    """Write one JSON file whole or not at all."""
    write_bytes_atomic(target, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _prepare(target: Path) -> _Prepared:
    flag = getattr(os, "O_TMPFILE", None)
    if flag is not None:
        try:
            descriptor = os.open(target.parent, flag | os.O_RDWR, 0o644)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}:
                raise
        else:
            return _Prepared(target, os.fdopen(descriptor, "w+b"), None)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    return _Prepared(target, temporary.open("x+b"), temporary)


def _publish(prepared: _Prepared) -> None:
    directory = os.open(prepared.target.parent, os.O_RDONLY)
    try:
        if prepared.temporary is not None:
            prepared.temporary.replace(prepared.target)
            prepared.temporary = None
        else:
            _name(prepared.handle.fileno(), prepared.target.name, directory)
        os.fsync(directory)
    finally:
        os.close(directory)


def _name(descriptor: int, name: str, directory: int) -> None:
    """Give a file without a name its name, replacing what has it now. ``dst_dir_fd`` makes Python follow the link."""
    unnamed = f"/proc/self/fd/{descriptor}"
    try:
        os.link(unnamed, name, dst_dir_fd=directory)
    except FileExistsError:
        stage = f".{name}{_PASSING}"
        try:
            os.link(unnamed, stage, dst_dir_fd=directory)
            os.replace(stage, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(stage, dir_fd=directory)
            raise


@contextlib.contextmanager
def _locked(directories: Sequence[Path] | set[Path]) -> Iterator[None]:
    """Hold an advisory lock on each directory itself, so that no lock file is left behind."""
    descriptors: list[int] = []
    try:
        for directory in sorted(directories):
            descriptor = os.open(directory, os.O_RDONLY)
            descriptors.append(descriptor)
            with contextlib.suppress(OSError):  # a file system without locks: renames stay atomic
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            for leftover in directory.glob(f".*{_PASSING}"):  # of a process killed while it held the lock
                leftover.unlink(missing_ok=True)
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def storage_error(error: OSError, directory: Path | None) -> StorageError:
    """The error that says in words why nothing could be written in a directory."""
    where = f"'{directory}'" if directory is not None else "the output directory"
    if error.errno in _NO_ROOM:
        return StorageError(f"No space is left for writing in {where}; nothing was changed. Mend: free some space.")
    if error.errno in _NO_PERMISSION:
        return StorageError(
            f"{where} cannot be written ({error.strerror}); nothing was changed. Mend: for a read-only dataset "
            "give --sidecars DIR, and its sidecars are kept in DIR/<dataset name>/."
        )
    return StorageError(f"Writing in {where} failed: {error.strerror or error}; nothing was changed.")


class Spool:
    """Rows of (group, value) on disk, to be read several times; the file has no name and vanishes with the process."""

    _ROWS = 1 << 18

    def __init__(self) -> None:
        """Start empty, in the system's folder for temporary files."""
        self._groups = tempfile.TemporaryFile()  # noqa: SIM115 - closed by ``close``
        self._values = tempfile.TemporaryFile()  # noqa: SIM115
        self.counts = np.zeros(0, dtype=np.int64)
        """Rows of each group."""

    def add(self, groups: np.ndarray, values: np.ndarray) -> None:
        """Append rows; groups are whole numbers from 0."""
        try:
            self._groups.write(groups.astype(np.int32).tobytes())
            self._values.write(values.astype(np.float64).tobytes())
            self._groups.flush()
            self._values.flush()
        except OSError as error:
            raise storage_error(error, Path(tempfile.gettempdir())) from error
        counts = np.bincount(groups, minlength=len(self.counts))
        counts[: len(self.counts)] += self.counts
        self.counts = counts

    def read(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (groups, values) from the start, in blocks."""
        self._groups.seek(0)
        self._values.seek(0)
        while groups := self._groups.read(4 * self._ROWS):
            yield (
                np.frombuffer(groups, dtype=np.int32),
                np.frombuffer(self._values.read(8 * self._ROWS), dtype=np.float64),
            )

    def close(self) -> None:
        """Give the space back."""
        self._groups.close()
        self._values.close()
