"""Rewards and returns of the RECAP kind.

Source: RECAP, arXiv:2511.14759, equation 5: -1 a frame; at the end 0 for a success, -C for a failure.
"""

from typing import Literal

import numpy as np
from jaxtyping import Float

FailureReturn = Literal["longer_is_worse", "flat"]
"""Whether a failure also pays -1 a frame (the paper), or only its last -C."""


def episode_rewards(
    length: int, *, success: bool, failure_penalty: float, failure_return: FailureReturn = "longer_is_worse"
) -> Float[np.ndarray, " T"]:
    """The rewards of one episode.

        r_t = -1 for t < T-1;   r_{T-1} = 0 after a success, -C after a failure

    With ``failure_return='flat'`` a failure's frames before the last have reward 0.

    Args:
        length: T, in frames. At least 1.
        success: How the episode ended.
        failure_penalty: C, in frames. At least 0.
        failure_return: See above.

    Returns:
        r_t, float64, in frames.

    Source:
        RECAP, arXiv:2511.14759, equation 5. The flat form is ours.
    """
    if length < 1:
        message = f"An episode has at least one frame; found length {length}."
        raise ValueError(message)
    every_frame = 0.0 if failure_return == "flat" and not success else -1.0
    rewards = np.full(length, every_frame)
    rewards[-1] = 0.0 if success else -float(failure_penalty)
    return rewards


def discounted_returns(rewards: Float[np.ndarray, " T"], discount: float = 1.0) -> Float[np.ndarray, " T"]:
    """The return from each frame to the end of one episode.

        G_t = r_t + gamma G_{t+1},   G_T = 0

    Args:
        rewards: r_t, one per frame.
        discount: gamma per frame, in [0, 1].

    Returns:
        G_t, float64, in the unit of ``rewards``.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if discount == 1.0:
        return np.cumsum(rewards[::-1])[::-1]
    returns = np.empty_like(rewards)
    following = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        following = rewards[t] + discount * following
        returns[t] = following
    return returns


def return_table(
    longest: int,
    *,
    success: bool,
    failure_penalty: float,
    failure_return: FailureReturn = "longer_is_worse",
    discount: float = 1.0,
) -> tuple[Float[np.ndarray, " L"], Float[np.ndarray, " L"]]:
    """Rewards and returns by frames to the end, for every episode of one outcome.

    A RECAP return depends only on how many frames are left and how the episode ended, so one table serves
    all episodes: an episode of T frames takes entries T-1, T-2, ..., 0.

    Args:
        longest: L, the number of entries: the length of the longest episode, in frames.
        success: The outcome that the table is for.
        failure_penalty: C, in frames.
        failure_return: See ``episode_rewards``.
        discount: gamma per frame, in [0, 1].

    Returns:
        ``(rewards, returns)``, float64; entry k is the frame with k frames after it.
    """
    rewards = episode_rewards(longest, success=success, failure_penalty=failure_penalty, failure_return=failure_return)
    return rewards[::-1].copy(), discounted_returns(rewards, discount)[::-1].copy()
