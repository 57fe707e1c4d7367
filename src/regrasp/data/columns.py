"""Columns of parquet files as numpy arrays, block by block, whatever their arrow type."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from regrasp.core.errors import DatasetError

BLOCK_ROWS = 1 << 17
"""Rows read at a time, at most (but at least one row group)."""

Block = dict[str, np.ndarray]


def open_parquet(path: Path, *, dictionary: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a parquet file for reading; a DatasetError says what is wrong with one that cannot be read.

    ``pre_buffer=False`` reads recorded files, which have one row group an episode, in half the CPU time.
    """
    try:
        if path.stat().st_size == 0:
            message = f"'{path}' is empty (0 bytes), so it is not a parquet file. Mend: restore it from its source."
            raise DatasetError(message)
        return pq.ParquetFile(path, pre_buffer=False, read_dictionary=list(dictionary))
    except FileNotFoundError:
        message = f"'{path}' does not exist. Mend: restore it from its source."
        raise DatasetError(message) from None
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error, "cannot be read as parquet") from error


def read_blocks(
    path: Path,
    columns: Sequence[str],
    *,
    rows: int = BLOCK_ROWS,
    dictionary: Sequence[str] = (),
    groups: Sequence[int] | None = None,
) -> Iterator[pa.Table]:
    """Yield a file's columns as tables of whole row groups (all, or ``groups``), about ``rows`` rows each."""
    file = open_parquet(path, dictionary=dictionary)
    chosen = range(file.metadata.num_row_groups) if groups is None else groups
    groups, pending = [], 0
    for place, group in enumerate(chosen):
        groups.append(group)
        pending += file.metadata.row_group(group).num_rows
        if pending >= rows or place == len(chosen) - 1:
            try:
                yield file.read_row_groups(groups, columns=list(columns), use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise _damaged(path, error, "cannot be read") from error
            groups, pending = [], 0


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a whole file, or these columns of it; a DatasetError says why it cannot be read."""
    file = open_parquet(path)
    try:
        return file.read(columns=None if columns is None else list(columns), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error, "cannot be read") from error


def _damaged(path: Path, error: Exception, what: str) -> DatasetError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    cause = "" if isinstance(error, PermissionError) else ": it is truncated or damaged"
    return DatasetError(f"'{path}' {what} ({reason}){cause}. Mend: restore it from its source.")


def to_numpy(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """A column as an array: ``[R]`` for scalars, ``[R, D]`` for lists of one length, bytes for images.

    Raises:
        DatasetError: Lists of different lengths, nulls in a list or integer column, or no numbers at all.
    """
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists_to_numpy(column, name)
    if pa.types.is_struct(kind):
        return np.array([row and row.get("bytes") for row in column.to_pylist()], dtype=object)
    if column.null_count and not pa.types.is_floating(kind):
        message = f"The column {name!r} has {column.null_count} nulls where numbers are needed."
        raise DatasetError(message)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
        return np.array(column.to_pylist(), dtype=object)
    if not _is_number(kind):
        message = f"The column {name!r} holds {kind} where numbers are needed."
        raise DatasetError(message)
    return primitives(column)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def primitives(column: pa.ChunkedArray) -> np.ndarray:
    """A column of plain numbers or booleans; nulls of a float column become NaN.

    Arrow's own ``to_numpy`` imports pandas, which costs more CPU than a small dataset does.
    """
    if column.null_count:
        column = column.fill_null(float("nan"))
    unpack = _booleans if pa.types.is_boolean(column.type) else np.from_dlpack
    parts = [unpack(chunk) for chunk in column.chunks if len(chunk)]
    if not parts:
        return np.empty(0, dtype=column.type.to_pandas_dtype())
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _booleans(chunk: pa.Array) -> np.ndarray:
    """Arrow keeps eight booleans in a byte."""
    bits = np.unpackbits(np.frombuffer(chunk.buffers()[1], dtype=np.uint8), bitorder="little")
    return bits[chunk.offset : chunk.offset + len(chunk)].view(bool)


def to_arrow(values: np.ndarray | pa.Array, kind: pa.DataType) -> pa.Array:
    """An arrow array of numbers or booleans, around the same memory where it can be (see ``primitives``)."""
    if isinstance(values, pa.Array):
        return values
    if pa.types.is_boolean(kind):
        content = np.packbits(values, bitorder="little")
    else:
        content = np.ascontiguousarray(values, dtype=kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(content)])


def texts_to_arrow(texts: Sequence[str]) -> pa.Array:
    """An arrow array of texts, made without pandas (see ``primitives``)."""
    parts = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(parts), pa.py_buffer(offsets), pa.py_buffer(b"".join(parts)))


def _lists_to_numpy(column: pa.ChunkedArray, name: str) -> np.ndarray:
    rows = len(column)
    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) and array.num_chunks == 1 else array
    if column.null_count:
        message = f"The column {name!r} has {column.null_count} nulls where vectors are needed."
        raise DatasetError(message)
    flat = array.flatten()
    if rows == 0:
        return np.empty((0, 0))
    if len(flat) % rows or not _same_lengths(array, len(flat) // rows):
        message = f"The column {name!r} holds vectors of different lengths."
        raise DatasetError(message)
    return to_numpy(pa.chunked_array([flat]), name).reshape(rows, -1)


def _same_lengths(array: Any, length: int) -> bool:  # noqa: ANN401 - any of arrow's list arrays
    if pa.types.is_fixed_size_list(array.type):
        return True
    return bool(np.all(np.diff(np.from_dlpack(array.offsets)) == length))


def scalars(column: pa.ChunkedArray, name: str, dtype: type) -> np.ndarray:
    """A column of one number a row as ``dtype``; lists of one and whole floats are accepted.

    Raises:
        DatasetError: More than one number a row, nulls, or fractions where whole numbers are needed.
    """
    values = to_numpy(column, name)
    if values.ndim > 1:
        if values.shape[1] != 1 and len(values):
            message = f"The column {name!r} holds {values.shape[1]} numbers a row where one is needed."
            raise DatasetError(message)
        values = values.reshape(len(values))
    if values.dtype == object:
        message = f"The column {name!r} holds {column.type} where numbers are needed."
        raise DatasetError(message)
    whole = np.issubdtype(dtype, np.integer) and np.issubdtype(values.dtype, np.floating)
    if whole and not (np.isfinite(values).all() and (values == np.floor(values)).all()):
        message = f"The column {name!r} holds values that are not whole numbers."
        raise DatasetError(message)
    return values.astype(dtype, copy=False)


class ColumnStream:
    """Rows in canonical order, taken a few at a time; memory holds one block."""

    def __init__(self, blocks: Iterator[Block], what: str) -> None:
        """Read from ``blocks``; ``what`` names the source in errors."""
        self._blocks, self._what = blocks, what
        self._pending: Block | None = None
        self._start = 0

    def take(self, rows: int) -> Block:
        """Return the next ``rows`` rows of every column."""
        parts: list[Block] = []
        while rows > 0:
            if self._pending is None or self._start == _block_rows(self._pending):
                self._pending, self._start = next(self._blocks, None), 0
                if self._pending is None:
                    message = f"{self._what} ends {rows} rows early."
                    raise DatasetError(message)
            stop = min(self._start + rows, _block_rows(self._pending))
            parts.append({name: column[self._start : stop] for name, column in self._pending.items()})
            rows -= stop - self._start
            self._start = stop
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def skip(self, rows: int) -> None:
        """Leave out the next ``rows`` rows."""
        while rows > 0:
            step = min(rows, BLOCK_ROWS)
            self.take(step)
            rows -= step


def _block_rows(block: Block) -> int:
    return len(next(iter(block.values())))
