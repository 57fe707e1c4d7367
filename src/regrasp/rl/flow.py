"""Flow matching on action chunks: the path from noise to action, what to learn on it, and how to walk it.

Time t runs from 0, noise, to 1, action. Every function takes NumPy arrays or torch tensors and returns what it was
given; neither library is asked for by name. Axes: ``*B`` batch, ``H`` steps of a chunk, ``D`` dimensions of an
action.

Source: Lipman et al., arXiv:2210.02747, and Liu et al., arXiv:2209.03003, with straight paths.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float


def interpolate(
    noise: Float[Any, "*B H D"], action: Float[Any, "*B H D"], time: Float[Any, "*B"]
) -> Float[Any, "*B H D"]:
    """The point at ``time`` on the straight path from ``noise`` to ``action``.

        x_t = (1 - t) eps + t a

    Args:
        noise: eps, drawn from a standard normal.
        action: a, in the policy's normalised unit.
        time: t of each chunk, in [0, 1].

    Returns:
        x_t: ``noise`` at t = 0, ``action`` at t = 1.
    """
    t = time.reshape(*time.shape, 1, 1)
    return (1 - t) * noise + t * action


def velocity_target(noise: Float[Any, "*B H D"], action: Float[Any, "*B H D"]) -> Float[Any, "*B H D"]:
    """What the network learns to say anywhere on the path.

    u = dx_t/dt = a - eps
    """
    return action - noise


def flow_matching_loss(
    velocity: Float[Any, "B H D"],
    target: Float[Any, "B H D"],
    is_pad: Bool[Any, "B #H #D"] | None = None,
    *,
    per_chunk: bool = False,
) -> Any:  # noqa: ANN401 - an array of either library
    """The mean squared error of the velocity over what is not padding.

        L = sum_{b,h,d not padded} (v - u)^2 / |{b,h,d not padded}|

    Args:
        velocity: v, predicted at x_t.
        target: u = a - eps.
        is_pad: True for steps past the end of an episode and for dimensions that an action does not have. Whatever
            stands there, NaN included, moves neither the loss nor its gradient.
        per_chunk: Take the mean within each chunk, for weighted training; 0 for a chunk that is all padding.

    Returns:
        A scalar, or B losses.
    """
    error = velocity - target
    if is_pad is None:
        means = (error**2).reshape(len(error), -1).mean(-1)
        return means if per_chunk else means.mean()
    error = _blank(error, is_pad)
    cells = math.prod(error.shape[1:]) // math.prod(is_pad.shape[1:])
    count = (~is_pad).reshape(len(is_pad), -1).sum(-1) * cells
    squares = (error**2).reshape(len(error), -1).sum(-1)
    return squares / (count + (count == 0)) if per_chunk else squares.sum() / count.sum()


def integrate(velocity: Callable[[Any, float], Any], noise: Float[Any, "*B H D"], steps: int) -> Float[Any, "*B H D"]:
    """Walk from ``noise`` at t = 0 to an action at t = 1 in equal Euler steps.

        x_{t + 1/K} = x_t + v(x_t, t) / K

    Args:
        velocity: v, called with x_t and t = 0, 1/K, ..., 1 - 1/K.
        noise: x_0.
        steps: K. Exact for K = 1 where the velocity is constant along the path.

    Returns:
        x_1.
    """
    if steps < 1:
        message = f"The flow is walked in at least 1 step; found {steps}."
        raise ValueError(message)
    x = noise
    for k in range(steps):
        x = x + velocity(x, k / steps) / steps
    return x


def _blank(values: Float[Any, "B H D"], is_pad: Bool[Any, "B #H #D"]) -> Float[Any, "B H D"]:
    """Put 0 where padding stands; a torch gradient stops there."""
    return values.masked_fill(is_pad, 0.0) if hasattr(values, "masked_fill") else np.where(is_pad, 0.0, values)
