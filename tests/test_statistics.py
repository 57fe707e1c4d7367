"""Worked and lawful: intervals and paired tests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrasp.rl.statistics import (
    mcnemar,
    success_difference,
    throughput,
    throughput_interval,
    throughput_ratio,
    wilson_interval,
)


def flags(*values: int) -> np.ndarray:
    return np.array(values, bool)


def test_wilson_of_eight_in_ten():
    # z = 1.959964, z² = 3.841459: centre (0.8 + 0.192073) / 1.384146 = 0.716740,
    # half width 1.959964 · sqrt(0.016 + 0.00960365) / 1.384146 = 0.226578.
    found = wilson_interval(8, 10)
    assert found.value == 0.8
    assert found.low == pytest.approx(0.490162, abs=1e-5)
    assert found.high == pytest.approx(0.943318, abs=1e-5)


def test_wilson_of_none_and_of_all_stays_inside_zero_and_one():
    # k = 0: high = z²/n / (1 + z²/n) = 0.3841459 / 1.3841459 = 0.277533.
    none, every = wilson_interval(0, 10), wilson_interval(10, 10)
    assert (none.low, none.high) == (0.0, pytest.approx(0.277533, abs=1e-5))
    assert (every.low, every.high) == (pytest.approx(1 - 0.277533, abs=1e-5), 1.0)


def test_throughput_counts_the_steps_of_failures():
    # 2 successes in 50 + 150 + 100 steps.
    assert throughput(flags(1, 0, 1), np.array([50, 150, 100])) == pytest.approx(1000 * 2 / 300)


def test_throughput_interval_of_equal_episodes_has_no_width():
    found = throughput_interval(flags(1, 1, 1, 1), np.array([40, 40, 40, 40]))
    assert (found.value, found.low, found.high) == (25.0, 25.0, 25.0)


def test_throughput_interval_is_the_share_of_successes_when_steps_are_equal():
    # 10 steps each: throughput is 100 k/n, and k of a bootstrap sample is Binomial(n, 0.5).
    success = np.arange(100) % 2 == 0
    found = throughput_interval(success, np.full(100, 10))
    # Binomial(100, 0.5): 2.5% and 97.5% quantiles are 40 and 60.
    assert (found.value, found.low, found.high) == (50.0, pytest.approx(40.0), pytest.approx(60.0))


def test_intervals_follow_from_the_seed():
    success, steps = np.random.default_rng(0).random(50) < 0.6, np.arange(50) + 20
    assert throughput_interval(success, steps, seed=3) == throughput_interval(success, steps, seed=3)


def test_mcnemar_of_nine_to_one():
    # Ten episodes differ, 9 for the first: p = 2 · (C(10,0) + C(10,1)) / 2^10 = 22/1024.
    first = np.array([True] * 9 + [False] + [True] * 20)
    second = np.array([False] * 9 + [True] + [True] * 20)
    assert mcnemar(first, second) == pytest.approx(22 / 1024)


def test_mcnemar_of_policies_that_never_differ_is_one():
    assert mcnemar(flags(1, 0, 1), flags(1, 0, 1)) == 1.0


def test_success_difference_is_paired():
    # Always the same outcome: the difference is 0 in every bootstrap sample, however variable the outcome is.
    success = np.arange(60) % 3 == 0
    found = success_difference(success, success)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_success_difference_of_complete_opposites():
    found = success_difference(flags(1, 1, 1, 1), flags(0, 0, 0, 0))
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)


def test_throughput_ratio_of_half_the_steps_is_two():
    success, steps = flags(1, 1, 0, 1), np.array([20, 40, 100, 60])
    found = throughput_ratio((success, steps), (success, 2 * steps))
    assert found.value == pytest.approx(2.0)
    # Resampling without any success draws 0 / 0 here, which counts as infinite: with 4 episodes 1 in 256.
    assert (found.low, found.high) == (pytest.approx(2.0), pytest.approx(2.0))


def test_throughput_ratio_to_a_policy_that_never_succeeds_is_not_a_number():
    found = throughput_ratio((flags(1, 1), np.array([3, 3])), (flags(0, 0), np.array([3, 3])))
    assert np.isnan([found.value, found.low, found.high]).all()


@given(st.integers(1, 300), st.data())
def test_wilson_contains_the_rate_and_narrows_with_episodes(episodes: int, data: st.DataObject):
    successes = data.draw(st.integers(0, episodes))
    found, more = wilson_interval(successes, episodes), wilson_interval(10 * successes, 10 * episodes)
    assert 0.0 <= found.low <= found.value + 1e-12
    assert found.value <= found.high + 1e-12
    assert more.high - more.low < found.high - found.low


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_mcnemar_does_not_mind_the_order(pairs: list[tuple[bool, bool]]):
    first, second = np.array(pairs, bool).T
    assert mcnemar(first, second) == pytest.approx(mcnemar(second, first))
