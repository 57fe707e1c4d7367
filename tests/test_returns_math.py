"""Rewards and returns: the worked numbers, the recursion, and one table for all episodes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrasp.rl.returns import discounted_returns, episode_rewards, return_table

FORMS = st.sampled_from(["longer_is_worse", "flat"])


def recap_returns(length: int, *, success: bool, penalty: float = 300.0, discount: float = 1.0) -> list[float]:
    rewards = episode_rewards(length, success=success, failure_penalty=penalty)
    return discounted_returns(rewards, discount).tolist()


def test_a_success_of_five_frames():
    # -1 for each frame after this one: 4 more, 3 more, ..., none.
    assert recap_returns(5, success=True) == [-4, -3, -2, -1, 0]


def test_a_failure_of_five_frames_pays_its_penalty_at_the_end():
    # The last reward is -300, four times -1 come before it.
    assert recap_returns(5, success=False) == [-304, -303, -302, -301, -300]


def test_a_discounted_success():
    # gamma 0.9: 0, then -1 + 0 = -1, then -1 - 0.9 = -1.9, then -1 - 1.71 = -2.71.
    assert recap_returns(4, success=True, discount=0.9) == pytest.approx([-2.71, -1.9, -1, 0])


def test_a_discounted_failure_whose_penalty_is_the_fixed_point():
    # gamma 0.9, C 10: -1 + 0.9 * (-10) = -10 again at every frame.
    assert recap_returns(4, success=False, penalty=10.0, discount=0.9) == pytest.approx([-10] * 4)


def test_episodes_of_one_frame():
    assert recap_returns(1, success=True) == [0]
    assert recap_returns(1, success=False) == [-300]


def test_a_flat_failure_has_the_same_return_at_every_frame():
    rewards = episode_rewards(4, success=False, failure_penalty=50.0, failure_return="flat")
    assert rewards.tolist() == [0, 0, 0, -50]
    assert discounted_returns(rewards).tolist() == [-50] * 4


def test_flat_changes_nothing_for_a_success():
    assert episode_rewards(3, success=True, failure_penalty=50.0, failure_return="flat").tolist() == [-1, -1, 0]


def test_a_discount_of_zero_leaves_the_reward_alone():
    assert discounted_returns(np.array([1.0, 2.0, 3.0]), 0.0).tolist() == [1, 2, 3]


@pytest.mark.parametrize("length", [0, -1])
def test_an_episode_without_frames_is_refused(length: int):
    with pytest.raises(ValueError, match=f"at least one frame; found length {length}"):
        episode_rewards(length, success=True, failure_penalty=1.0)


REWARDS = st.lists(st.floats(-100, 100), min_size=1, max_size=40).map(np.array)


@given(REWARDS, st.floats(0, 1) | st.just(1.0))
def test_returns_are_the_sums_of_the_definition(rewards: np.ndarray, discount: float):
    slow = [sum(discount**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    np.testing.assert_allclose(discounted_returns(rewards, discount), slow, rtol=1e-12, atol=1e-9)


@given(REWARDS, st.floats(0, 1) | st.just(1.0))
def test_a_return_is_the_reward_and_the_discounted_next_return(rewards: np.ndarray, discount: float):
    returns = np.append(discounted_returns(rewards, discount), 0.0)
    np.testing.assert_allclose(returns[:-1], rewards + discount * returns[1:], rtol=1e-12, atol=1e-9)


@given(st.integers(1, 60), st.integers(0, 40), st.booleans(), st.integers(0, 300), FORMS, st.floats(0, 1))
def test_one_table_gives_every_episode_of_an_outcome(
    length: int, more: int, success: bool, penalty: int, form: str, discount: float
):
    outcome = {"success": success, "failure_penalty": float(penalty), "failure_return": form}
    rewards, returns = return_table(length + more, **outcome, discount=discount)
    own = episode_rewards(length, **outcome)
    assert rewards[:length][::-1].tolist() == own.tolist()
    # Not one bit depends on how long the table is: RLinf computes episode by episode.
    assert returns[:length][::-1].tolist() == discounted_returns(own, discount).tolist()


@given(st.integers(1, 200), st.integers(1, 200))
def test_with_the_task_horizon_every_failure_lies_below_every_success(success_length: int, failure_length: int):
    horizon = float(max(success_length, failure_length))
    best_failure = max(recap_returns(failure_length, success=False, penalty=horizon))
    assert best_failure < min(recap_returns(success_length, success=True))


def test_returns_are_float64_also_of_whole_rewards():
    assert discounted_returns(np.array([-1.0, 0.0], dtype=np.float32)).dtype == np.float64
