"""From advantages to labels: a threshold, a strict comparison, and what is positive by rule.

Source: RECAP, arXiv:2511.14759, section V-D and appendix F: the indicator is A > epsilon, epsilon per task; corrections
are positive.
"""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

Ties = Literal["negative", "positive"]
"""What a frame exactly at the threshold is: negative (the paper's >), or positive (RLinf's >=)."""


def positive_quantile(positive_fraction: float) -> float:
    """The quantile that leaves ``positive_fraction`` of the pool above it."""
    if not 0.0 < positive_fraction < 1.0:
        message = f"The positive fraction lies between 0 and 1, both excluded; found {positive_fraction}."
        raise ValueError(message)
    return 1.0 - positive_fraction


def label(
    advantages: Float[np.ndarray, " R"],
    threshold: Float[np.ndarray, " R"] | float,
    forced: Bool[np.ndarray, " R"] | bool = False,
    *,
    ties: Ties = "negative",
) -> Bool[np.ndarray, " R"]:
    """True where a frame counts as positive.

        I_t = A_t > epsilon,   or forced

    Args:
        advantages: A_t, in the unit.
        threshold: epsilon of each frame's scope, in the unit.
        forced: True for the frames that are positive by rule: demonstrations, corrections.
        ties: With "positive", A_t >= epsilon.

    Returns:
        One label per frame.
    """
    above = advantages > threshold if ties == "negative" else advantages >= threshold
    return above | forced
