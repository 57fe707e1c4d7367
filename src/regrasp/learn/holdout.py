"""Which episodes are kept from training, so that a model can be judged on episodes it has not seen."""

from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Bool

from regrasp.core.errors import ConfigError


def stratified_holdout(strata: Sequence[Hashable], fraction: float, seed: int) -> Bool[np.ndarray, " E"]:
    """Choose episodes to hold out, by stratum.

    A stratum (say, one task and outcome) of n episodes gives round(fraction * n) of them, but at least one and at most
    n - 1; a stratum of one episode keeps it for training. Frames of one episode are never divided.

    Args:
        strata: What each episode belongs to.
        fraction: The share to hold out, above 0 and below 1.
        seed: Which episodes are drawn; the same seed and strata give the same choice.

    Returns:
        True for each episode that is held out.

    Raises:
        ConfigError: The fraction is out of range, or there are too few episodes to hold out any.
    """
    if not 0 < fraction < 1:
        raise ConfigError(
            f"--holdout is the share of episodes kept from training, above 0 and below 1; found {fraction}."
        )
    held = np.zeros(len(strata), dtype=bool)
    members: dict[Hashable, list[int]] = {}
    for episode, stratum in enumerate(strata):
        members.setdefault(stratum, []).append(episode)
    for number, episodes in enumerate(members.values()):
        if len(episodes) < 2:
            continue
        count = min(max(round(fraction * len(episodes)), 1), len(episodes) - 1)
        held[np.random.default_rng([seed, number]).choice(episodes, size=count, replace=False)] = True
    if not held.any():
        raise ConfigError(
            "A value model is judged on episodes it has not seen, which needs two episodes of one task and outcome; "
            f"found {len(strata)} episode(s), each alone in its task and outcome. Mend: add episodes."
        )
    return held
