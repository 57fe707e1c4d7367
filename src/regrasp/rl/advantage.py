"""How much better the next frames went than the value predicted.

Source: RECAP, arXiv:2511.14759, section V. The Monte Carlo advantage for N >= T, the TD error for N = 1.
"""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

FailureEnd = Literal["bounded", "paid"]
"""What is left after a failure's last frame: ``failure_bootstrap``, or 0 as after a success (the paper, RLinf)."""


class LookaheadSums(NamedTuple):
    """What an n-step advantage is made of, one entry per frame."""

    reward_sum: Float[np.ndarray, " R"]
    """sum_{k<n} gamma^k r_{t+k}, in the unit of the rewards."""
    value_next: Float[np.ndarray, " R"]
    """V_{t+n}, not discounted, in the unit of the values."""
    steps: Int[np.ndarray, " R"]
    """n = min(N, T - t), in frames."""


def n_step_advantage(
    rewards: Float[np.ndarray, " R"],
    values: Float[np.ndarray, " R"],
    lengths: Int[np.ndarray, " E"] | None = None,
    *,
    lookahead: int,
    discount: float = 1.0,
    bootstrap: Float[np.ndarray, " E"] | float = 0.0,
    discount_next_value: bool = True,
) -> Float[np.ndarray, " R"]:
    """How much better the next ``lookahead`` frames went than the value predicted.

        A_t = sum_{k=0}^{n-1} gamma^k r_{t+k} + gamma^n V_{t+n} - V_t,   n = min(N, T - t)

    Args:
        rewards: r_t, the frames of whole episodes one after the other.
        values: V(o_t), in the unit of ``rewards``.
        lengths: T of each episode, in frames; one episode where it is left out.
        lookahead: N, in frames. At least 1.
        discount: gamma per frame, in [0, 1].
        bootstrap: V_T, of all episodes or of each. 0 if they ended; V(o_{T-1}) if they were cut off; see
            ``failure_bootstrap`` for failures.
        discount_next_value: False leaves gamma^n off V (a flag of RLinf's).

    Returns:
        A_t, in the unit of ``rewards``; 0 everywhere when the values are exact.

    Source:
        RECAP, arXiv:2511.14759, section V.
    """
    lengths = np.array([len(rewards)]) if lengths is None else lengths
    sums = lookahead_sums(rewards, values, lengths, lookahead=lookahead, discount=discount, bootstrap=bootstrap)
    factor = discount_factor(sums.steps, discount) if discount_next_value else 1.0
    return sums.reward_sum + factor * sums.value_next - values


def failure_bootstrap(
    rewards: Float[np.ndarray, " R"], values: Float[np.ndarray, " R"], lengths: Int[np.ndarray, " E"]
) -> Float[np.ndarray, " E"]:
    """V_T under which the end of a failure is no good news.

        V_T = min(0, V(o_{T-1}) - r_{T-1})   where r_{T-1} < 0, a failure;   0 elsewhere

    A value model sees no clock. Where failures are stuck for long until a time limit, it expects in each of their
    frames the mean of what is left of such episodes, so that with V_T = 0 their last frames, of which less is left,
    look better than expected, and get positive labels for doing nothing.

    Args:
        rewards: r_t, the frames of whole episodes one after the other.
        values: V(o_t), in the unit of ``rewards``.
        lengths: T of each episode, in frames.

    Returns:
        V_T of each episode, in the unit of ``rewards``; 0 where V(o_{T-1}) >= r_{T-1}, as exact values are.

    Source:
        Ours, after the treatment of time limits in Pardo et al., arXiv:1712.00378.
    """
    last = np.cumsum(lengths) - 1
    reward = np.asarray(rewards, dtype=np.float64)[last]
    return np.where(reward < 0, np.minimum(0.0, np.asarray(values, dtype=np.float64)[last] - reward), 0.0)


def discount_factor(steps: Int[np.ndarray, " R"], discount: float) -> Float[np.ndarray, " R"] | float:
    """gamma^n for each frame; the number 1 where nothing is discounted."""
    return 1.0 if discount == 1.0 else np.power(discount, steps.astype(np.float64))


def lookahead_sums(
    rewards: Float[np.ndarray, " R"],
    values: Float[np.ndarray, " R"],
    lengths: Int[np.ndarray, " E"],
    *,
    lookahead: int,
    discount: float = 1.0,
    bootstrap: Float[np.ndarray, " E"] | float = 0.0,
) -> LookaheadSums:
    """The parts of ``n_step_advantage``, whose arguments they share; the values may have a unit of their own.

    Undiscounted sums are differences of a running total: one over all episodes where rewards are whole numbers, and so
    exact; else one for each episode, so that no rounding depends on the episodes before it. Discounted sums are added
    term by term for every episode at once, which keeps them within float64 rounding of the definition.
    """
    if lookahead < 1:
        message = f"The lookahead is at least 1 frame; found {lookahead}."
        raise ValueError(message)
    rewards = np.asarray(rewards, dtype=np.float64)
    total = int(np.sum(lengths))
    if total != len(rewards) or total != len(values):
        message = f"Episode lengths sum to {total}, but there are {len(rewards)} rewards and {len(values)} values."
        raise ValueError(message)
    ends = np.repeat(np.cumsum(lengths), lengths)
    rows = np.arange(total)
    steps = np.minimum(min(lookahead, total), ends - rows)
    after = rows + steps
    at_end = bootstrap if np.ndim(bootstrap) == 0 else np.repeat(bootstrap, lengths)
    value_next = np.where(after < ends, np.asarray(values, dtype=np.float64)[np.minimum(after, total - 1)], at_end)
    if discount == 1.0:
        reward_sum = _plain_sums(rewards, lengths, rows, after)
    else:
        reward_sum = _discounted_sums(rewards, steps, discount)
    return LookaheadSums(reward_sum, value_next, steps)


def _plain_sums(
    rewards: Float[np.ndarray, " R"],
    lengths: Int[np.ndarray, " E"],
    rows: Int[np.ndarray, " R"],
    after: Int[np.ndarray, " R"],
) -> Float[np.ndarray, " R"]:
    """The sum of ``rewards[rows:after]`` for each row; ``after`` lies within the row's episode."""
    if (rewards == np.rint(rewards)).all():
        running = np.concatenate([[0.0], np.cumsum(rewards)])
        return running[after] - running[rows]
    starts = np.cumsum(lengths) - lengths
    totals = [np.cumsum(rewards[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
    running = np.concatenate([[0.0], *totals])
    first = np.repeat(starts, lengths)
    return running[after] - np.where(rows > first, running[rows], 0.0)


def _discounted_sums(
    rewards: Float[np.ndarray, " R"], steps: Int[np.ndarray, " R"], discount: float
) -> Float[np.ndarray, " R"]:
    """sum_{k<n} gamma^k r_{t+k} for each row; n = ``steps``, which ends within the row's episode."""
    sums = rewards.copy()
    for k in range(1, int(steps.max(initial=1))):
        reach = len(rewards) - k
        sums[:reach] += np.where(steps[:reach] > k, discount**k * rewards[k:], 0.0)
    return sums
