"""Guidance: sharpen a conditioned policy by the difference that its condition makes.

Source: classifier-free guidance, Ho and Salimans, arXiv:2207.12598; on an advantage-conditioned policy,
RECAP, arXiv:2511.14759, equation 13. Applied to velocities and never to final actions, where a mean of two modes is
neither.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float


def guide(null: Float[Any, "*B H D"], positive: Float[Any, "*B H D"], scale: float) -> Float[Any, "*B H D"]:
    """The guided velocity.

        v = v_null + beta (v_positive - v_null)

    Linear, so the noise predictions or clean-action predictions of other parameterisations may stand for velocities.

    Args:
        null: v_null, without a condition.
        positive: v_positive, under the condition.
        scale: beta. 0 gives ``null``, 1 gives ``positive``, both to the bit; above 1 goes past ``positive``.
    """
    if scale == 1.0:
        return positive
    if scale == 0.0:
        return null
    return null + scale * (positive - null)


def guided_velocity(
    null: Callable[[Any, float], Any], positive: Callable[[Any, float], Any], scale: float
) -> Callable[[Any, float], Any]:
    """The guided velocity as a function of x_t and t, which asks no network whose answer it does not need.

    Args:
        null: v_null(x, t).
        positive: v_positive(x, t).
        scale: beta. 0 and 1 cost one pass, everything else two.
    """
    if scale == 1.0:
        return positive
    if scale == 0.0:
        return null
    return lambda x, t: guide(null(x, t), positive(x, t), scale)
