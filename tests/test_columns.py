"""Columns as arrays, whatever their arrow type; and rows taken a few at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrasp.core.errors import DatasetError
from regrasp.data.columns import ColumnStream, open_parquet, read_blocks, scalars, texts_to_arrow, to_arrow, to_numpy


def chunked(values: list[Any], kind: pa.DataType | None = None, cut: int = 1) -> pa.ChunkedArray:
    """A column in two chunks, the second a slice with an offset."""
    array = pa.array(values, kind)
    return pa.chunked_array([array.slice(0, cut), array.slice(cut)])


LISTS = [pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.float32(), 2), pa.list_(pa.int64())]


@pytest.mark.parametrize("kind", LISTS)
def test_vectors_are_rows(kind: pa.DataType):
    found = to_numpy(chunked([[1, 2], [3, 4], [5, 6]], kind), "a")
    assert found.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert found.dtype == kind.value_type.to_pandas_dtype()


def test_vectors_of_vectors_are_flat_rows():
    kind = pa.list_(pa.list_(pa.float32(), 2))
    assert to_numpy(chunked([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], kind), "a").tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()])
def test_numbers_keep_their_type(kind: pa.DataType):
    values = np.array([1, 0, 1], dtype=kind.to_pandas_dtype())
    found = to_numpy(chunked(list(values), kind), "a")
    assert found.tolist() == values.tolist()
    assert found.dtype == values.dtype


def test_nulls_of_a_float_column_are_nan():
    np.testing.assert_array_equal(to_numpy(chunked([1.5, None], pa.float32()), "a"), np.float32([1.5, np.nan]))


def test_images_are_their_bytes():
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    found = to_numpy(chunked([{"bytes": b"png", "path": "a"}, {"bytes": None, "path": "b"}, None], kind), "a")
    assert found.tolist() == [b"png", None, None]


@pytest.mark.parametrize("encode", [False, True])
def test_texts_are_objects(encode: bool):
    column = chunked(["a", "b", "a"])
    assert to_numpy(column.dictionary_encode() if encode else column, "a").tolist() == ["a", "b", "a"]


@pytest.mark.parametrize("kind", [pa.float32(), pa.list_(pa.float32()), pa.bool_(), pa.string()])
def test_no_rows_are_an_empty_array(kind: pa.DataType):
    assert len(to_numpy(pa.chunked_array([], kind), "a")) == 0
    assert scalars(pa.chunked_array([], pa.list_(pa.float32())), "a", np.float64).shape == (0,)


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        ([[1.0], [1.0, 2.0], [1.0]], pa.list_(pa.float32()), "vectors of different lengths"),
        ([[1.0], [1.0, 2.0], []], pa.list_(pa.float32()), "vectors of different lengths"),  # 3 numbers in 3 rows
        ([[1.0], None], pa.list_(pa.float32()), "1 nulls where vectors are needed"),
        ([1, None, None], pa.int64(), "2 nulls where numbers are needed"),
        ([None, None], pa.null(), "2 nulls where numbers are needed"),
        ([True, None], pa.bool_(), "1 nulls where numbers are needed"),
        ([0, 1], pa.timestamp("s"), r"holds timestamp\[s\] where numbers are needed"),
        ([[0], [1]], pa.list_(pa.duration("s")), r"holds duration\[s\] where numbers are needed"),
    ],
)
def test_what_is_no_number_is_refused(values: list[Any], kind: pa.DataType, said: str):
    with pytest.raises(DatasetError, match=f"The column 'speed' .*{said}"):
        to_numpy(chunked(values, kind), "speed")


@pytest.mark.parametrize("values", [[3, 4], [3.0, 4.0], [[3], [4]], [[3.0], [4.0]]])
def test_whole_numbers_are_whole_however_they_are_stored(values: list[Any]):
    found = scalars(chunked(values), "a", np.int64)
    assert (found.tolist(), found.dtype) == ([3, 4], np.int64)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([3.5, 4.0], "not whole numbers"),
        ([float("nan"), 4.0], "not whole numbers"),
        ([float("inf"), 4.0], "not whole numbers"),
        ([None, 4.0], "not whole numbers"),
        ([[1, 2], [3, 4]], "2 numbers a row where one is needed"),
        (["3", "4"], "holds string where numbers are needed"),
    ],
)
def test_what_is_no_whole_number_is_refused(values: list[Any], said: str):
    with pytest.raises(DatasetError, match=said):
        scalars(chunked(values), "a", np.int64)


@given(st.lists(st.booleans(), max_size=40))
def test_booleans_survive_arrow(values: list[bool]):
    column = pa.chunked_array([to_arrow(np.array(values, dtype=bool), pa.bool_())])
    assert column.to_pylist() == values
    assert to_numpy(column, "a").tolist() == values


@given(st.lists(st.text(), max_size=10))
def test_texts_survive_arrow(texts: list[str]):
    encodable = [text.encode("utf-8", "ignore").decode() for text in texts]
    assert texts_to_arrow(encodable).to_pylist() == encodable


def test_numbers_become_the_type_that_is_asked_for():
    array = to_arrow(np.array([1.5, 2.5])[::-1], pa.float32())
    assert (array.type, array.to_pylist()) == (pa.float32(), [2.5, 1.5])


def stream(sizes: list[int]) -> ColumnStream:
    total = sum(sizes)
    cuts = np.cumsum(sizes)[:-1]
    parts = zip(np.split(np.arange(total), cuts), np.split(np.arange(total) * 10, cuts), strict=True)
    return ColumnStream(iter([{"a": a, "b": b} for a, b in parts]), "'somewhere'")


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_rows_come_in_order_whatever_is_taken_and_skipped(sizes: list[int], data: st.DataObject):
    rows, place = stream(sizes), 0
    while place < sum(sizes):
        count = data.draw(st.integers(0, sum(sizes) - place))
        if data.draw(st.booleans()):
            rows.skip(count)
        elif count:
            taken = rows.take(count)
            assert taken["a"].tolist() == list(range(place, place + count))
            assert taken["b"].tolist() == [10 * row for row in range(place, place + count)]
        else:
            rows.take(0)
        place += count
        if count == 0:
            break


def test_a_stream_that_ends_early_says_by_how_much():
    rows = stream([3, 2])
    rows.take(4)
    with pytest.raises(DatasetError, match="'somewhere' ends 2 rows early"):
        rows.take(3)


@pytest.mark.parametrize(("rows", "sizes"), [(1, [2, 2, 2, 1]), (3, [4, 3]), (4, [4, 3]), (100, [7])])
def test_blocks_are_whole_row_groups(tmp_path: Path, rows: int, sizes: list[int]):
    pq.write_table(pa.table({"a": range(7), "b": range(7)}), tmp_path / "a.parquet", row_group_size=2)
    tables = list(read_blocks(tmp_path / "a.parquet", ["a"], rows=rows))
    assert [table.num_rows for table in tables] == sizes
    assert pa.concat_tables(tables)["a"].to_pylist() == list(range(7))
    assert tables[0].column_names == ["a"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist. Mend: restore"),
        (b"", "is empty (0 bytes)"),
        (b"PAR1", "cannot be read as parquet ("),
        (b"no parquet at all, but a text of some length", "it is truncated or damaged. Mend: restore"),
    ],
)
def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path, content: bytes | None, said: str):
    path = tmp_path / "a.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DatasetError) as found:
        open_parquet(path)
    assert str(found.value).startswith(f"'{path}' ")
    assert said in str(found.value)
