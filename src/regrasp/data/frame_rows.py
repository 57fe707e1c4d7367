"""The rows of a dataset's data files: which frame each one is, its time, its task and its success flag."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from regrasp.core.errors import DatasetError, listing
from regrasp.core.outcome import Outcome
from regrasp.data.columns import open_parquet, primitives, read_blocks, scalars
from regrasp.data.layout import Layout
from regrasp.data.problem import Problem, error, warning

FLAG_COLUMNS = ("next.success", "is_success")
"""Success flags in the data, in the order in which they are believed."""
_TRUE, _FALSE, _NULL, _UNREADABLE, _ABSENT = 1, 0, -1, -2, -3
_NEEDED = ("episode_index", "frame_index", "timestamp")


@dataclass(frozen=True, kw_only=True)
class RowColumns:
    """The columns to read besides episode, frame and time.

    Attributes:
        task: The column of ``task_index``, or of texts; None where there is none.
        texts: Whether ``task`` holds texts.
        flag: The success flag, or None.
    """

    task: str | None
    texts: bool
    flag: str | None


@dataclass(frozen=True, kw_only=True)
class FrameRows:
    """Some rows, one entry each."""

    episode: np.ndarray
    frame: np.ndarray
    time: np.ndarray
    task: np.ndarray
    """``task_index``, or texts; 0 where the data has no such column."""
    flag: np.ndarray | None
    """1, 0, or less where the flag says nothing."""

    @classmethod
    def of(cls, table: pa.Table, columns: RowColumns) -> Self:
        """Read the rows of a table; a DatasetError names a column that cannot be read."""
        return cls(
            episode=scalars(table["episode_index"], "episode_index", np.int64),
            frame=scalars(table["frame_index"], "frame_index", np.int64),
            time=_times(table["timestamp"]),
            task=_task_codes(table, columns),
            flag=None if columns.flag is None else _flag_codes(table, columns.flag),
        )

    @classmethod
    def sorted(cls, parts: Sequence[Self]) -> Self:
        """Put rows in order of episode and frame."""
        episode = np.concatenate([part.episode for part in parts])
        frame = np.concatenate([part.frame for part in parts])
        flags = [part.flag for part in parts if part.flag is not None]
        order = np.lexsort([frame, episode])
        return cls(
            episode=episode[order],
            frame=frame[order],
            time=np.concatenate([part.time for part in parts])[order],
            task=np.concatenate([part.task for part in parts])[order],
            flag=np.concatenate(flags)[order] if flags else None,
        )


def usable_files(layout: Layout, problems: list[Problem]) -> list[Path]:
    """Return the data files that the metadata names and that are there; the others, and strays, are problems."""
    named = layout.data_files()
    missing = [path for path in named if not path.is_file()]
    mend = "restore it from its source"
    problems += [error(f"the metadata names '{path}', which does not exist", mend) for path in missing]
    known = set(named)
    strays = [
        str(path.relative_to(layout.root))
        for path in sorted((layout.root / "data").glob("**/*.parquet"))
        if path not in known and not path.name.startswith(".")
    ]
    if strays:
        text = f"{len(strays)} parquet files that the metadata does not name are left out: {listing(strays, 3)}"
        problems.append(warning(text, "remove them from data/, or add their episodes to the metadata"))
    return [path for path in named if path not in set(missing)]


def choose_columns(
    files: list[Path], task_column: str | None, *, flags: bool, problems: list[Problem]
) -> RowColumns | None:
    """Return the columns to read, by the first readable file; None, with a problem, where a needed one is missing."""
    names: set[str] = set()
    for path in files:
        try:
            names = set(open_parquet(path).schema_arrow.names)
            break
        except DatasetError:
            continue
    lacking = [name for name in _NEEDED if name not in names] if names else []
    mend = "record or convert the dataset again"
    problems += [error(f"the data has no column {name!r}", mend) for name in lacking]
    if task_column is not None and names and task_column not in names:
        text = f"the data has no column {task_column!r}, which `keys` names as task"
        problems.append(error(text, "correct the recipe"))
        return None
    task = task_column or ("task_index" if "task_index" in names else None)
    flag = next((name for name in FLAG_COLUMNS if name in names), None) if flags else None
    return None if lacking else RowColumns(task=task, texts=task_column is not None, flag=flag)


_SCAN_ROWS = 1 << 19
"""Rows scanned at a time: few and narrow columns, so more than elsewhere."""


def read_rows(files: list[Path], columns: RowColumns, problems: list[Problem]) -> Iterator[FrameRows]:
    """Yield the rows of every file, block by block; a file that cannot be read is a problem."""
    needed = [*_NEEDED, *([columns.task] if columns.task else [])]
    wanted = [*needed, *([columns.flag] if columns.flag else [])]
    for path in files:
        try:
            texts = [columns.task] if columns.texts and columns.task else []
            for table in read_blocks(path, wanted, rows=_SCAN_ROWS, dictionary=texts):
                missing = [name for name in needed if name not in table.column_names]
                if missing:
                    message = f"'{path}' lacks the columns {listing(missing)}, which other files of the dataset have."
                    raise DatasetError(message)
                if table.num_rows:
                    yield FrameRows.of(table, columns)
        except DatasetError as trouble:
            text = str(trouble).split(" Mend:")[0].rstrip(".")
            text = text if str(path) in text else f"'{path}': {text}"
            problems.append(error(text, "restore the file from its source, or record the dataset again"))


def _times(column: pa.ChunkedArray) -> np.ndarray:
    """Timestamps, float32 where they are stored so: twice as fast to compare, and to hash."""
    exact = np.float32 if column.type == pa.float32() else np.float64
    return scalars(column, "timestamp", exact)


def _task_codes(table: pa.Table, columns: RowColumns) -> np.ndarray:
    if columns.task is None:
        return np.zeros(table.num_rows, dtype=np.int64)
    if columns.texts:
        return np.array(table[columns.task].to_pylist(), dtype=object)
    return scalars(table[columns.task], columns.task, np.int64)


def _flag_codes(table: pa.Table, name: str) -> np.ndarray:
    if name not in table.column_names:
        return np.full(table.num_rows, _ABSENT, dtype=np.int8)
    column = table[name]
    kind = column.type
    if pa.types.is_null(kind):
        return np.full(len(column), _NULL, dtype=np.int8)
    if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return np.full(len(column), _UNREADABLE, dtype=np.int8)
    if not column.null_count and pa.types.is_boolean(kind):
        return primitives(column).astype(np.int8)
    numbers = primitives(column.cast(pa.float64()))
    codes = np.where(np.isnan(numbers), _NULL, np.where(np.isin(numbers, (0, 1)), numbers, _UNREADABLE))
    return codes.astype(np.int8)


def flag_outcome(name: str, codes: list[int]) -> tuple[Outcome, str]:
    """Return what an episode's flags say, and where that was read or why they say nothing.

    Args:
        name: The flag's column.
        codes: The greatest, least and last of ``FrameRows.flag`` in each run of the episode's rows.
    """
    greatest, least, last = max(codes[0::3]), min(codes[1::3]), codes[-1]
    if least == _UNREADABLE:
        return Outcome.UNKNOWN, f"{name} is not a true/false column"
    if name == "next.success" and greatest == _TRUE:
        return Outcome.SUCCESS, name
    if least == _ABSENT:
        return Outcome.UNKNOWN, f"{name} is missing from its file"
    if name == "next.success":
        return (Outcome.UNKNOWN, f"{name} is null") if least == _NULL else (Outcome.FAILURE, name)
    if last == _NULL:
        return Outcome.UNKNOWN, f"{name} is null in the last frame"
    return (Outcome.SUCCESS if last == _TRUE else Outcome.FAILURE), name
