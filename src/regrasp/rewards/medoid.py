"""Of several answers to one question, the one nearest to all the others."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Medoid:
    """The middle one of several samples.

    Attributes:
        index: Which sample it is.
        spread: The mean L1 distance of the other samples to it, in points; 0 for a single sample.
    """

    index: int
    spread: float


def find_medoid(samples: Sequence[Sequence[float]]) -> Medoid:
    """Return the sample with the least sum of L1 distances to the others; the first of equally good ones.

    Unlike a mean it is an answer that was given: every number of it is one of its step's allowed points.

    Args:
        samples: At least one, all of the same length.
    """
    points = np.asarray(samples, dtype=np.float64)
    distance = np.abs(points[:, None, :] - points[None, :, :]).sum(axis=2).sum(axis=1).round(9)
    index = int(distance.argmin())
    others = len(points) - 1
    return Medoid(index=index, spread=float(distance[index] / others) if others else 0.0)
