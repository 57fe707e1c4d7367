"""Advantages: the worked numbers, the laws, and parity with the definition as a loop."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from regrasp.core.scale import ReturnScale
from regrasp.rl.advantage import discount_factor, failure_bootstrap, lookahead_sums, n_step_advantage
from regrasp.rl.returns import discounted_returns, episode_rewards

DISCOUNTS = st.just(1.0) | st.floats(0, 1)
LOOKAHEADS = st.integers(1, 60)


@st.composite
def episodes(draw: Any, most: int = 4, whole: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lengths = np.array(draw(st.lists(st.integers(1, 12), min_size=1, max_size=most)))
    number = st.integers(-50, 50).map(float) if whole else st.floats(-50, 50)
    rows = st.lists(number, min_size=int(lengths.sum()), max_size=int(lengths.sum())).map(np.array)
    return draw(rows), draw(rows), lengths


def by_the_definition(
    rewards: np.ndarray, values: np.ndarray, *, lookahead: int, discount: float, bootstrap: float = 0.0
) -> list[float]:
    found, end = [], len(rewards)
    for t in range(end):
        n = min(lookahead, end - t)
        total = sum(discount**k * rewards[t + k] for k in range(n))
        following = values[t + n] if t + n < end else bootstrap
        found.append(total + discount**n * following - values[t])
    return found


def unit_advantage(length: int, values: list[float], *, success: bool) -> list[float]:
    scale = ReturnScale(-303.0, 0.0)
    rewards = episode_rewards(length, success=success, failure_penalty=300.0)
    raw = n_step_advantage(rewards, scale.from_unit(np.array(values)), lookahead=2)
    return scale.difference_to_unit(raw).tolist()


def test_the_success_of_the_worked_example():
    # N 2, gamma 1, scale [-303, 0], in the unit: two frames cost 2/303 = .006601.
    # t=0: -.006601 - .01 + .02 = .003399; t=1: -.006601 - .005 + .01 = -.001601; t=2: -.006601 + 0 + .01 = .003399;
    # t=3: n = 2, rewards -1 and 0: -.003300 + 0 + .005 = .0017; t=4: n = 1, reward 0, V_5 = 0: 0.
    found = unit_advantage(5, [-0.02, -0.01, -0.01, -0.005, 0.0], success=True)
    assert found == pytest.approx([0.003399, -0.001601, 0.003399, 0.0017, 0.0], abs=5e-7)


def test_the_failure_of_the_worked_example():
    # t=0: -2/303 - .97 + .9 = -.076601; t=1: -.006601 - .99 + .95 = -.046601;
    # t=2: -(1 + 300)/303 + 0 + .97 = -.993399 + .97 = -.023399; t=3: -300/303 + .99 = -.990099 + .99 = -.000099.
    found = unit_advantage(4, [-0.9, -0.95, -0.97, -0.99], success=False)
    assert found == pytest.approx([-0.076601, -0.046601, -0.023399, -0.000099], abs=5e-7)


def test_an_episode_that_was_cut_off_ends_with_its_bootstrap_value():
    # N 1, gamma 0.5, V_T = -8: the last frame is -1 + 0.5 * (-8) - (-4) = -1.
    found = n_step_advantage(np.array([-1.0, -1.0]), np.array([-6.0, -4.0]), lookahead=1, discount=0.5, bootstrap=-8.0)
    assert found.tolist() == [-1 + 0.5 * -4 + 6, -1.0]


def test_a_failure_that_waits_for_a_time_limit_is_no_better_than_expected_at_its_end():
    # Stuck: V is -C - 4 in every frame, the mean of what is left of such episodes. C = 10, N = 3, T = 4.
    rewards, values = np.array([-1.0, -1.0, -1.0, -10.0]), np.full(4, -14.0)
    # With V_T = 0: t=1 has -1 - 1 - 10 + 14 = 2, t=2 has -1 - 10 + 14 = 3, t=3 has -10 + 14 = 4.
    paid = n_step_advantage(rewards, values, lookahead=3)
    assert paid.tolist() == [-3.0, 2.0, 3.0, 4.0]
    # V_T = min(0, -14 + 10) = -4: one step costs 1, and the last none.
    after = failure_bootstrap(rewards, values, np.array([4]))
    assert after.tolist() == [-4.0]
    assert n_step_advantage(rewards, values, np.array([4]), lookahead=3, bootstrap=after).tolist() == [-3, -2, -1, 0]


def test_a_failure_that_the_model_did_not_expect_is_paid_in_full():
    # V is -2 before a drop that ends the episode with -10: the blame stays with the last frames.
    rewards, values, lengths = np.array([-1.0, -10.0]), np.array([-3.0, -2.0]), np.array([2])
    after = failure_bootstrap(rewards, values, lengths)
    assert after.tolist() == [0.0]
    assert n_step_advantage(rewards, values, lengths, lookahead=2, bootstrap=after).tolist() == [-8.0, -8.0]


def test_nothing_is_left_after_a_success_whatever_its_last_value():
    rewards, values = np.array([-1.0, 0.0, -1.0, -5.0]), np.array([-4.0, -3.0, -9.0, -9.0])
    assert failure_bootstrap(rewards, values, np.array([2, 2])).tolist() == [0.0, -4.0]


def test_the_next_value_can_be_left_undiscounted():
    # N 2, gamma 0.5: -1 - 0.5 + V_2 - V_0 = -1.5 - 4 + 6 instead of -1.5 - 0.25 * 4 + 6.
    arrays = np.array([-1.0, -1.0, 0.0]), np.array([-6.0, -5.0, -4.0])
    assert n_step_advantage(*arrays, lookahead=2, discount=0.5, discount_next_value=False)[0] == 0.5
    assert n_step_advantage(*arrays, lookahead=2, discount=0.5)[0] == 3.5


@given(st.lists(st.integers(1, 15), min_size=1, max_size=4), st.data(), LOOKAHEADS, DISCOUNTS)
def test_advantages_are_zero_when_the_values_are_exact(
    lengths: list[int], data: st.DataObject, lookahead: int, discount: float
):
    outcomes = [data.draw(st.booleans()) for _ in lengths]
    rewards = [episode_rewards(n, success=s, failure_penalty=40.0) for n, s in zip(lengths, outcomes, strict=True)]
    exact = np.concatenate([discounted_returns(part, discount) for part in rewards])
    joined, each = np.concatenate(rewards), np.array(lengths)
    for after in (0.0, failure_bootstrap(joined, exact, each)):
        found = n_step_advantage(joined, exact, each, lookahead=lookahead, discount=discount, bootstrap=after)
        np.testing.assert_allclose(found, 0.0, atol=1e-11)


@given(episodes(), LOOKAHEADS, DISCOUNTS, st.floats(-50, 50))
def test_parity_with_the_definition(
    case: tuple[np.ndarray, np.ndarray, np.ndarray], lookahead: int, discount: float, bootstrap: float
):
    rewards, values, lengths = case
    found = n_step_advantage(rewards, values, lengths, lookahead=lookahead, discount=discount, bootstrap=bootstrap)
    cuts = np.cumsum(lengths)[:-1]
    pairs = zip(np.split(rewards, cuts), np.split(values, cuts), strict=True)
    options = {"lookahead": lookahead, "discount": discount, "bootstrap": bootstrap}
    slow = np.concatenate([by_the_definition(r, v, **options) for r, v in pairs])
    np.testing.assert_allclose(found, slow, rtol=1e-12, atol=1e-10)


@given(episodes(most=3, whole=True), st.data(), LOOKAHEADS, DISCOUNTS)
def test_episodes_never_mix(
    case: tuple[np.ndarray, np.ndarray, np.ndarray], data: st.DataObject, lookahead: int, discount: float
):
    rewards, values, lengths = case
    chosen = data.draw(st.integers(0, len(lengths) - 1))
    rows = slice(int(lengths[:chosen].sum()), int(lengths[: chosen + 1].sum()))
    alone = n_step_advantage(rewards[rows], values[rows], lookahead=lookahead, discount=discount)
    others = np.ones(len(rewards), dtype=bool)
    others[rows] = False
    changed = np.where(others, 7 - 3 * rewards, rewards), np.where(others, 100 - values, values)
    together = n_step_advantage(*changed, lengths, lookahead=lookahead, discount=discount)
    assert together[rows].tolist() == alone.tolist()


@given(episodes(most=1), st.integers(0, 100), DISCOUNTS)
def test_a_lookahead_beyond_the_end_gives_the_monte_carlo_advantage(
    case: tuple[np.ndarray, np.ndarray, np.ndarray], beyond: int, discount: float
):
    rewards, values, lengths = case
    found = n_step_advantage(rewards, values, lookahead=int(lengths[0]) + beyond, discount=discount)
    np.testing.assert_allclose(found, discounted_returns(rewards, discount) - values, rtol=1e-12, atol=1e-10)


@given(episodes(most=1), DISCOUNTS)
def test_a_lookahead_of_one_gives_the_temporal_difference_error(
    case: tuple[np.ndarray, np.ndarray, np.ndarray], discount: float
):
    rewards, values, _ = case
    following = np.append(values[1:], 0.0)
    found = n_step_advantage(rewards, values, lookahead=1, discount=discount)
    np.testing.assert_allclose(found, rewards + discount * following - values, rtol=1e-12, atol=1e-10)


@given(episodes(most=1), LOOKAHEADS, DISCOUNTS, st.floats(-10, 10))
def test_a_reward_that_is_raised_everywhere_raises_advantages_by_its_discounted_sum(
    case: tuple[np.ndarray, np.ndarray, np.ndarray], lookahead: int, discount: float, more: float
):
    rewards, values, lengths = case
    length = int(lengths[0])
    options = {"lookahead": lookahead, "discount": discount}
    gain = n_step_advantage(rewards + more, values, **options) - n_step_advantage(rewards, values, **options)
    steps = [min(lookahead, length - t) for t in range(length)]
    np.testing.assert_allclose(gain, [more * sum(discount**k for k in range(n)) for n in steps], atol=1e-9)


@given(episodes(), LOOKAHEADS, DISCOUNTS)
def test_the_parts_say_how_far_each_frame_looked(
    case: tuple[np.ndarray, np.ndarray, np.ndarray], lookahead: int, discount: float
):
    rewards, values, lengths = case
    sums = lookahead_sums(rewards, values, lengths, lookahead=lookahead, discount=discount, bootstrap=-3.0)
    left = np.concatenate([np.arange(n, 0, -1) for n in lengths])
    assert sums.steps.tolist() == np.minimum(lookahead, left).tolist()
    rows = np.arange(len(rewards)) + sums.steps
    following = [values[row] if n < rest else -3.0 for row, n, rest in zip(rows, sums.steps, left, strict=True)]
    assert sums.value_next.tolist() == following  # not discounted


def test_fractional_rewards_of_a_long_run_lose_nothing_that_an_episode_alone_would_not():
    # 10,000 episodes of rewards near 0.1: a running total over all of them would be off by some 1e-12.
    rewards = np.random.default_rng(0).random(100_000)
    lengths = np.full(10_000, 10)
    found = n_step_advantage(rewards, np.zeros(100_000), lengths, lookahead=3)
    alone = n_step_advantage(rewards[-10:], np.zeros(10), lookahead=3)
    np.testing.assert_allclose(found[-10:], alone, rtol=0, atol=1e-15)


def test_a_lookahead_beyond_any_machine_integer_is_to_the_end():
    found = n_step_advantage(np.array([-1.0, 0.0]), np.zeros(2), lookahead=10**30)
    assert found.tolist() == [-1.0, 0.0]


def test_nothing_in_nothing_out():
    empty = np.zeros(0)
    assert n_step_advantage(empty, empty, np.zeros(0, dtype=np.int64), lookahead=5).tolist() == []


def test_the_discount_factor_is_gamma_to_the_steps():
    assert discount_factor(np.array([1, 2, 3]), 0.5).tolist() == [0.5, 0.25, 0.125]  # type: ignore[union-attr]
    assert discount_factor(np.array([1, 2, 3]), 1.0) == 1.0


@pytest.mark.parametrize("lookahead", [0, -3])
def test_a_lookahead_below_one_is_refused(lookahead: int):
    with pytest.raises(ValueError, match=f"at least 1 frame; found {lookahead}"):
        n_step_advantage(np.zeros(2), np.zeros(2), lookahead=lookahead)


@pytest.mark.parametrize(("lengths", "said"), [([2], "sum to 2"), ([2, 2], "sum to 4")])
def test_lengths_that_do_not_add_up_are_refused(lengths: list[int], said: str):
    with pytest.raises(ValueError, match=f"{said}, but there are 3 rewards and 3 values"):
        n_step_advantage(np.zeros(3), np.zeros(3), np.array(lengths), lookahead=1)


@given(episodes(most=1), LOOKAHEADS, DISCOUNTS, st.floats(-400, -1), st.floats(0.5, 40))
def test_advantages_in_the_unit_are_the_raw_ones_over_the_width(
    case: tuple[np.ndarray, np.ndarray, np.ndarray], lookahead: int, discount: float, low: float, width: float
):
    rewards, values, _ = case
    scale = ReturnScale(low, low + width)
    assume(np.abs(values).max() < 1e3)
    raw = n_step_advantage(rewards, values, lookahead=lookahead, discount=discount)
    # Values go to the unit and back as points, the advantage as a difference: the offset must not stay in it.
    there_and_back = scale.from_unit(scale.to_unit(values))
    again = n_step_advantage(rewards, there_and_back, lookahead=lookahead, discount=discount)
    np.testing.assert_allclose(scale.difference_to_unit(again) * width, raw, atol=1e-8)
