"""Dense judge scores as what each frame costs, by a map that the user states and the returns record."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from regrasp.core.errors import ConfigError, SidecarError, listing
from regrasp.core.provenance import digest
from regrasp.data.dataset import Dataset

SCORES = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class JudgedRewards:
    """Where dense scores are, and the reward of a frame for each."""

    tag: str
    rewards: dict[int, float]

    @property
    def steepest(self) -> float:
        """How many frames' worth of -1 the dearest frame costs, at least 1."""
        return max(1.0, *(-reward for reward in self.rewards.values()))


def parse_rewards(source: str | None, mapping: str | None) -> JudgedRewards | None:
    """Read ``--rewards dense:TAG --map '{1: -2, 2: -1.5, 3: -1}'``; None where neither is given.

    Raises:
        ConfigError: One is missing or cannot be understood; a frame never earns anything.
    """
    if source is None and mapping is None:
        return None
    import yaml

    signal, _, tag = (source or "").partition(":")
    if signal != "dense" or not tag or mapping is None:
        message = (
            "--rewards dense:TAG goes with --map '{1: -2, 2: -1.5, 3: -1}', the reward of a frame for each score; "
            f"found --rewards {source} and --map {mapping}."
        )
        raise ConfigError(message)
    try:
        given = yaml.safe_load(mapping)
    except yaml.YAMLError:
        given = None
    known = given if isinstance(given, dict) else {}
    if set(known) != set(SCORES) or not all(_is_cost(value) for value in known.values()):
        message = f"--map gives each of the scores 1, 2 and 3 a reward of at most 0; found {mapping!r}."
        raise ConfigError(message)
    return JudgedRewards(tag=tag, rewards={score: float(known[score]) for score in SCORES})


def _is_cost(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value <= 0


def frame_rewards(
    dataset: Dataset, positions: Int[np.ndarray, " e"], judged: JudgedRewards
) -> tuple[list[np.ndarray], str]:
    """Return the reward of every frame of some episodes, and the digest of the scores behind them.

    Args:
        dataset: The dataset.
        positions: Positions of the episodes in its index, ascending.
        judged: Where the scores are, and what they mean.

    Raises:
        MissingSidecar: The dataset has no dense scores of this tag.
        SidecarError: An episode was not judged, or a part of it has no score.
    """
    from regrasp.recap.outcomes_stage import judged_episodes  # and with it the judges' whole stage
    from regrasp.rewards.dense import frame_scores

    index = dataset.index()
    rows = judged_episodes(dataset, "dense", judged.tag)
    numbers = [int(index.episode_index[position]) for position in positions]
    lacking = [n for n in numbers if n not in rows or rows[n]["invalid"] or None in rows[n]["half_seconds"]]
    if lacking:
        message = (
            f"The dense scores tagged {judged.tag!r} of '{dataset.path}' do not cover the episodes {listing(lacking)}: "
            "not judged, or with an invalid window. Mend: judge them again, or leave them out of the run."
        )
        raise SidecarError(message)
    stream, found = dataset.stream(["timestamp"], numbers), []
    for position, number in zip(positions, numbers, strict=True):
        at = stream.take(int(index.length[position]))["timestamp"].astype(np.float64)
        scores = frame_scores(at - at[0], rows[number]["half_seconds"])
        found.append(np.array([judged.rewards[score or 0] for score in scores]))
    return found, digest([[n, rows[n]["half_seconds"]] for n in numbers])


def judged_tables(
    episodes: list[np.ndarray], last: Float[np.ndarray, " e"], *, longest: int, discount: float
) -> tuple[Float[np.ndarray, "e l"], Float[np.ndarray, "e l"]]:
    """Return rewards and returns by frames to the end, a row for each episode, without meaning beyond its first frame.

        G_0 = R,   G_k = r_k + gamma G_{k-1}

    Args:
        episodes: The reward of each frame of each episode, in order of time.
        last: R, the reward of each episode's last frame: 0 for a success, -C for a failure.
        longest: Frames of the longest episode.
        discount: gamma per frame.
    """
    rewards = np.zeros((len(episodes), longest))
    for row, episode in zip(rewards, episodes, strict=True):
        row[: len(episode)] = episode[::-1]
    rewards[:, 0] = last
    returns = rewards.copy()
    for k in range(1, longest):
        returns[:, k] += discount * returns[:, k - 1]
    return rewards, returns
