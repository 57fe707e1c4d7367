"""The condition that a policy is trained under and asked for: a number, or a line of text.

Source: RECAP, arXiv:2511.14759: the improvement indicator as text after the task, left out at random in training so
that the same network knows the policy without it.
"""

from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

Negatives = Literal["labelled", "unconditional"]
"""What a frame labelled negative is trained as: negative (the paper), or without a condition (RLinf)."""

Condition = Literal["positive", "negative", "none"]

INDICATOR_KEY = "observation.advantage"
"""Where a batch holds each sample's indicator: +1, -1, or 0 for none. LeRobot's pipelines keep ``observation.*``."""

POSITIVE = 1.0
NEGATIVE = -1.0
UNCONDITIONAL = 0.0
INDICATORS: dict[str, float] = {"positive": POSITIVE, "negative": NEGATIVE, "none": UNCONDITIONAL}
"""The indicator of each named condition."""


def indicator(positive: Bool[Any, " R"], negatives: Negatives = "labelled") -> Float[np.ndarray, " R"]:
    """The training condition of each frame: +1 where it is positive, else -1, or 0 for unconditional negatives."""
    other = NEGATIVE if negatives == "labelled" else UNCONDITIONAL
    return np.where(np.asarray(positive), POSITIVE, other).astype(np.float32)


def conditioned_text(task: str, condition: float) -> str:
    r"""The task with its advantage on a line of its own: ``task\nAdvantage: positive``, or the task alone for 0."""
    if condition == UNCONDITIONAL:
        return task
    return f"{task}\nAdvantage: {'positive' if condition > 0 else 'negative'}"


def hashed_dropout(index: Int[np.ndarray, " R"], probability: float, seed: int) -> Bool[np.ndarray, " R"]:
    """True for the frames whose condition is left out, the same frames on every visit and on every machine.

    Args:
        index: A whole number for each frame, unique within the dataset.
        probability: The share of frames that is True.
        seed: Another seed leaves out other frames.
    """
    with np.errstate(over="ignore"):
        mixed = np.uint64(seed % 2**32 + 1) * np.uint64(0xD1342543DE82EF95)
        mixed = mixed + np.asarray(index).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < probability
