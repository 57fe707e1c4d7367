"""Streamed quantiles: numpy's to the bit, with ties, many groups, signs, and a bound on what is held."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrasp.rl import quantile
from regrasp.rl.quantile import stream_quantiles

Blocks = list[tuple[np.ndarray, np.ndarray]]


def stream_of(blocks: Blocks) -> Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]:
    return lambda: iter(blocks)


def in_blocks(groups: np.ndarray, values: np.ndarray, size: int) -> Blocks:
    starts = range(0, len(groups), size)
    return [(groups[start : start + size].astype(np.int32), values[start : start + size]) for start in starts]


def expected(groups: np.ndarray, values: np.ndarray, count: int, q: float) -> list[float]:
    parts = [values[groups == group] for group in range(count)]
    return [float(np.quantile(part, q)) if len(part) else np.nan for part in parts]


def check(groups: np.ndarray, values: np.ndarray, count: int, q: float, size: int = 1000) -> None:
    counts = np.bincount(groups[groups >= 0], minlength=count)
    found = stream_quantiles(stream_of(in_blocks(groups, values, size)), counts, q)
    np.testing.assert_array_equal(found, expected(groups, values, count, q))


FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=64).filter(lambda x: abs(x) < 1e300)
TIED = st.sampled_from([-1.0, -0.5, -0.0, 0.0, 1e-320, 0.5, 1.0])
QUANTILES = st.floats(0, 1) | st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0])


@st.composite
def grouped(draw: Any, values: st.SearchStrategy[float]) -> tuple[np.ndarray, np.ndarray]:
    rows = draw(st.lists(st.tuples(st.integers(-1, 4), values), max_size=60))
    return np.array([row[0] for row in rows], dtype=np.int64), np.array([row[1] for row in rows], dtype=np.float64)


@given(grouped(FLOATS | TIED), QUANTILES, st.integers(1, 20))
def test_the_quantile_of_every_group_is_numpys(rows: tuple[np.ndarray, np.ndarray], q: float, size: int):
    check(*rows, 5, q, size)


@given(
    grouped(FLOATS | TIED), QUANTILES, st.integers(1, 20), st.sampled_from([1, 2, 5]), st.sampled_from([1, 6, 1 << 17])
)
def test_narrowing_bin_by_bin_changes_nothing(
    rows: tuple[np.ndarray, np.ndarray], q: float, size: int, enough: int, held: int
):
    # Bins that hold more than `enough` values are narrowed: with so few allowed, down to single float64 numbers.
    # Groups wait for one another's readings when only `held` numbers may be kept.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantile, "_ENOUGH", enough)
        patch.setattr(quantile, "_HELD", held)
        check(*rows, 5, q, size)


@pytest.mark.parametrize("q", [0.0, 0.1, 0.7, 0.7000001, 1.0])
def test_a_long_stream_of_close_values_is_narrowed_to_numpys_quantile(q: float):
    # 150,000 values that share their leading 32 bits, more than fit in one bin at first and at second look.
    rng = np.random.default_rng(1)
    values = 1.0 + rng.integers(0, 1 << 19, 150_000) * 2.0**-52
    check(np.zeros(150_000, dtype=np.int64), values, 1, q, 40_000)


@pytest.mark.parametrize("q", [0.3, 0.5, 0.7])
def test_a_long_stream_of_ties_ends_on_the_tied_value_and_its_neighbour(q: float):
    values = np.repeat([-2.0, 0.25, 3.0], [70_001, 70_000, 70_001])
    check(np.zeros(len(values), dtype=np.int64), np.random.default_rng(0).permutation(values), 1, q, 50_000)


@pytest.mark.parametrize("below", [70_000, 70_001])
def test_a_quantile_between_two_runs_of_ties_is_between_them(below: int):
    # 140,001 values, q 0.5: rank 70,000 exactly; it is the last of the lower run or the first of the upper.
    values = np.repeat([-1.5, 2.5], [below, 140_001 - below])
    check(np.zeros(len(values), dtype=np.int64), values, 1, 0.5)
    check(np.zeros(len(values), dtype=np.int64), values, 1, 0.50000357142857)  # between ranks 70,000 and 70,001


def test_rows_of_no_group_are_left_out():
    groups, values = np.array([0, -1, 0, -1]), np.array([1.0, 100.0, 3.0, -100.0])
    found = stream_quantiles(stream_of([(groups, values)]), np.array([2]), 0.5)
    assert found.tolist() == [2.0]


def test_a_group_without_rows_has_no_quantile():
    found = stream_quantiles(stream_of([(np.array([1]), np.array([7.0]))]), np.array([0, 1, 0]), 0.7)
    np.testing.assert_array_equal(found, [np.nan, 7.0, np.nan])


def test_no_rows_at_all():
    assert stream_quantiles(stream_of([]), np.array([], dtype=np.int64), 0.5).tolist() == []


def test_ten_thousand_groups_take_the_room_of_their_rows():
    # A histogram for each would be 5 GiB.
    groups = np.repeat(np.arange(10_000), 20)
    values = np.random.default_rng(2).standard_normal(200_000)
    found = stream_quantiles(stream_of(in_blocks(groups, values, 1 << 16)), np.full(10_000, 20), 0.7)
    by_numpy = np.quantile(values.reshape(10_000, 20), 0.7, axis=1)
    np.testing.assert_array_equal(found, by_numpy)


def test_a_stream_is_read_more_often_rather_than_held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantile, "_HELD", 1000)
    groups, values = np.repeat(np.arange(10), 400), np.random.default_rng(3).standard_normal(4000)
    readings = []

    def stream() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        readings.append(len(readings))
        return iter([(groups, values)])

    found = stream_quantiles(stream, np.full(10, 400), 0.25)
    np.testing.assert_array_equal(found, expected(groups, values, 10, 0.25))
    assert len(readings) == 5  # two groups of 400 fit in 1000 at a time
