"""A value as a distribution over 201 atoms on [-1, 0].

Source: RECAP, arXiv:2511.14759, section IV (201 bins, cross-entropy on Monte Carlo returns); the two-hot target is
the projection of Bellemare et al., arXiv:1707.06887, for a point mass.
"""

import numpy as np
from jaxtyping import Float, Int

ATOMS = 201
"""The number of atoms; 0.005 apart."""


def atoms() -> Float[np.ndarray, " 201"]:
    """The atoms, from -1 to 0, float64."""
    return np.linspace(-1.0, 0.0, ATOMS)


def two_hot(targets: Float[np.ndarray, " B"]) -> tuple[Int[np.ndarray, " B"], Float[np.ndarray, " B"]]:
    """The two neighbouring atoms whose weighted mean is the target.

        b = (G + 1) / 0.005;   weight 1 - (b - l) on l = floor(b), b - l on l + 1

    A target exactly on an atom has weight 1 on it.

    Args:
        targets: Unit returns in [-1, 0]; a ValueError names the first outside.

    Returns:
        ``(lower, upper_weight)``: the lower atom, 0 to 199, and the weight of the atom above it.
    """
    targets = np.asarray(targets, dtype=np.float64)
    outside = ~((targets >= -1.0) & (targets <= 0.0))
    if outside.any():
        first = float(targets[outside][0])
        message = f"Targets lie in [-1, 0]; found {first}. Convert returns with their ReturnScale first."
        raise ValueError(message)
    position = (targets + 1.0) * (ATOMS - 1)
    nearest_atom = np.rint(position)
    position = np.where(np.abs(position - nearest_atom) < 1e-9, nearest_atom, position)
    lower = np.minimum(np.floor(position).astype(np.int64), ATOMS - 2)
    return lower, position - lower


def expectation(probabilities: Float[np.ndarray, "... 201"]) -> Float[np.ndarray, "..."]:
    """V = sum p * atom, in [-1, 0]."""
    return probabilities @ atoms()
