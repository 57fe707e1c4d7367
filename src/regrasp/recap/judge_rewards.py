"""What a judge's scores add to the rewards, by a rule that the user states and the returns record.

Dense scores say what each frame costs. A rubric's points are added where they were first earned for good, as far as the
attempt was also marked cut off there; otherwise at its end, since marks of a whole attempt tell no earlier time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from jaxtyping import Float, Int

from regrasp.core.errors import ConfigError, SidecarError, listing
from regrasp.core.provenance import digest
from regrasp.data.dataset import Dataset

SCORES = (1, 2, 3)
_MOST_WORTH = 1 << 24
"""Up to here, float32 tells one frame from the next."""


@dataclass(frozen=True, kw_only=True)
class DenseRewards:
    """Where dense scores are, and the reward of a frame for each."""

    tag: str
    rewards: dict[int, float]

    def horizon_penalty(self, frames: int) -> float:
        """Return the C that puts every failure below every success of at most ``frames`` frames."""
        return frames * max(1.0, *(-reward for reward in self.rewards.values()))

    def settings(self) -> dict[str, object]:
        """What provenance says besides the flags."""
        return {}


@dataclass(frozen=True, kw_only=True)
class RubricRewards:
    """Where a rubric's points are, and what all of them together are worth, in frames."""

    tag: str
    worth: float

    def horizon_penalty(self, frames: int) -> float:
        """Return the C that puts a failure, whatever it earned, below every success of at most ``frames`` frames."""
        return frames + self.worth

    def settings(self) -> dict[str, object]:
        """What provenance says besides the flags."""
        return {"points_added_at": "the first moment from which on they are held, else the last frame"}


JudgedRewards = DenseRewards | RubricRewards


def parse_rewards(source: str | None, mapping: str | None) -> JudgedRewards | None:
    """Read ``--rewards dense:TAG --map '{1: -2, 2: -1.5, 3: -1}'`` or ``--rewards rubric:TAG --map 100``.

    Returns:
        None where neither is given.

    Raises:
        ConfigError: One is missing or cannot be understood; a frame never earns anything by a dense score.
    """
    if source is None and mapping is None:
        return None
    signal, _, tag = (source or "").partition(":")
    if signal not in ("dense", "rubric") or not tag or mapping is None:
        message = (
            "--rewards dense:TAG goes with --map '{1: -2, 2: -1.5, 3: -1}', the reward of a frame for each score, and "
            "--rewards rubric:TAG with --map 100, what full marks are worth in frames; "
            f"found --rewards {source} and --map {mapping}."
        )
        raise ConfigError(message)
    if signal == "dense":
        return DenseRewards(tag=tag, rewards=score_map(mapping, -math.inf, 0.0, "a reward of at most 0"))
    given = _yaml(mapping)
    if not _is_number(given) or not 0 < given <= _MOST_WORTH:
        message = f"--map of a rubric is what full marks are worth in frames, such as 100; found {mapping!r}."
        raise ConfigError(message)
    return RubricRewards(tag=tag, worth=float(given))


def score_map(text: str, least: float, most: float, what: str) -> dict[int, float]:
    """Read a --map of the dense scores, such as '{1: -2, 2: -1.5, 3: -1}'.

    Args:
        text: What the user gave.
        least: The least value that a score may have.
        most: The largest.
        what: What each score is given, in words, with its bounds.

    Raises:
        ConfigError: It is no such map.
    """
    given = _yaml(text)
    known = given if isinstance(given, dict) else {}
    if set(known) != set(SCORES) or not all(_is_number(v) and least <= v <= most for v in known.values()):
        message = f"--map gives each of the scores 1, 2 and 3 {what}; found {text!r}."
        raise ConfigError(message)
    return {score: float(known[score]) for score in SCORES}


def _yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def frame_rewards(
    dataset: Dataset, positions: Int[np.ndarray, " e"], judged: JudgedRewards
) -> tuple[list[np.ndarray], str]:
    """Return the reward of every frame of some episodes, and the digest of the scores behind them.

    Args:
        dataset: The dataset.
        positions: Positions of the episodes in its index, ascending.
        judged: Where the scores are, and what they mean.

    Returns:
        For each episode its frames' rewards; that of the last frame comes on top of what the outcome gives it.

    Raises:
        MissingSidecar: The dataset has no scores of this tag.
        SidecarError: An episode was not judged, or its reply (or that of a part of it) is invalid.
    """
    numbers = [int(dataset.index().episode_index[position]) for position in positions]
    lengths = dataset.index().length[positions].tolist()
    if isinstance(judged, RubricRewards):
        return _rubric_rewards(dataset, numbers, lengths, judged)
    return _dense_rewards(dataset, numbers, lengths, judged)


def _rubric_rewards(
    dataset: Dataset, numbers: list[int], lengths: list[int], judged: RubricRewards
) -> tuple[list[np.ndarray], str]:
    """-1 a frame, and the worth of the points at the frames where they were earned."""
    from regrasp.recap.outcomes_stage import judged_episodes  # and with it the judges' whole stage

    rows = judged_episodes(dataset, "rubric", judged.tag)
    _refuse_gaps(dataset, judged.tag, "rubric", [n for n in numbers if n not in rows or rows[n]["invalid"]])
    found = []
    for number, length in zip(numbers, lengths, strict=True):
        found.append(judged.worth * earned_points(rows[number], length) - 1.0)
        found[-1][-1] += 1.0  # the last frame costs nothing, as ever
    return found, digest([[n, rows[n]["points"], rows[n].get("moments")] for n in numbers])


def earned_points(row: Mapping[str, Any], length: int) -> Float[np.ndarray, " T"]:
    """Return the points that an attempt earned at each of its frames.

        e_m = sum_s min_{m' >= m} p_{m', s}

    p are the points of the steps s by the moments m, the attempt's end being the last. A point that was lost again does
    not count as earned before: e rises from moment to moment up to the total, and a moment's last frame gets its rise.

    Args:
        row: The judge's row: ``points``, and where the attempt was also marked cut off ``moments``; those without
            points are left out, as the reply is invalid.
        length: T, the frames of the attempt.
    """
    moments = [one for one in row.get("moments", ()) if one["points"] is not None]
    marks = np.array([*(one["points"] for one in moments), row["points"]], dtype=np.float64)
    held = np.minimum.accumulate(marks[::-1], axis=0)[::-1].sum(axis=1).round(9)
    earned = np.zeros(length)
    places = [*(one["frames"] - 1 for one in moments), length - 1]
    np.add.at(earned, places, np.diff(held, prepend=0.0))
    return earned


def _dense_rewards(
    dataset: Dataset, numbers: list[int], lengths: list[int], judged: DenseRewards
) -> tuple[list[np.ndarray], str]:
    from regrasp.recap.outcomes_stage import judged_episodes
    from regrasp.rewards.dense import frame_scores

    rows = judged_episodes(dataset, "dense", judged.tag)
    lacking = [n for n in numbers if n not in rows or rows[n]["invalid"] or None in rows[n]["half_seconds"]]
    _refuse_gaps(dataset, judged.tag, "dense", lacking)
    stream, found = dataset.stream(["timestamp"], numbers), []
    for number, length in zip(numbers, lengths, strict=True):
        at = stream.take(length)["timestamp"].astype(np.float64)
        scores = frame_scores(at - at[0], rows[number]["half_seconds"])
        rewards = np.array([judged.rewards[score or 0] for score in scores])
        rewards[-1] = 0.0
        found.append(rewards)
    return found, digest([[n, rows[n]["half_seconds"]] for n in numbers])


def _refuse_gaps(dataset: Dataset, tag: str, signal: str, lacking: list[int]) -> None:
    if lacking:
        part = "an invalid window" if signal == "dense" else "an invalid reply"
        message = (
            f"The {signal} scores tagged {tag!r} of '{dataset.path}' do not cover the episodes {listing(lacking)}: "
            f"not judged, or with {part}. Mend: judge them again, or leave them out of the run."
        )
        raise SidecarError(message)


def judged_tables(
    episodes: list[np.ndarray], last: Float[np.ndarray, " e"], *, longest: int, discount: float
) -> tuple[Float[np.ndarray, "e l"], Float[np.ndarray, "e l"]]:
    """Return rewards and returns by frames to the end, a row for each episode, without meaning beyond its first frame.

        G_0 = r_0 + R,   G_k = r_k + gamma G_{k-1}

    Args:
        episodes: The reward of each frame of each episode, in order of time.
        last: R, what the outcome adds to that of each episode's last frame: 0 for a success, -C for a failure.
        longest: Frames of the longest episode.
        discount: gamma per frame.
    """
    rewards = np.zeros((len(episodes), longest))
    for row, episode in zip(rewards, episodes, strict=True):
        row[: len(episode)] = episode[::-1]
    rewards[:, 0] += last
    returns = rewards.copy()
    for k in range(1, longest):
        returns[:, k] += discount * returns[:, k - 1]
    return rewards, returns
