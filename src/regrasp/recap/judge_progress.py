"""A judge's scores as progress over the frames of an episode, for weighted training.

A dense score says how much headway a half second makes, by a map that the user states; a terminal score says how far
the attempt came in all. With both, the terminal progress is shared out by headway; a terminal score alone is shared
out evenly, since it knows nothing of the time within an attempt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from regrasp.core.errors import ConfigError, listing
from regrasp.core.provenance import digest
from regrasp.data.dataset import Dataset
from regrasp.recap.judge_rewards import score_map
from regrasp.recap.selection import tell


@dataclass(frozen=True, kw_only=True)
class ScoreTags:
    """Where the scores are, and the headway of a frame for each dense score."""

    terminal: str | None
    dense: str | None
    headway: dict[int, float] | None


@dataclass(frozen=True, kw_only=True)
class JudgedProgress:
    """The progress of a dataset's judged episodes.

    Attributes:
        frames: Progress after each frame, by the episode's number.
        excluded: Episodes that were not judged, whose reply is invalid, or whose headway is 0 throughout though they
            came somewhere.
        inputs: Digests of the scores.
    """

    frames: dict[int, np.ndarray]
    excluded: list[int]
    inputs: dict[str, str]


def parse_scores(scores: Sequence[str], mapping: str | None) -> ScoreTags:
    """Read ``--scores terminal:TAG dense:TAG --map '{1: 0, 2: 0.5, 3: 1}'``.

    Raises:
        ConfigError: They cannot be understood, or dense scores have no map.
    """
    pairs = [text.partition(":") for text in scores]
    tags = {signal: tag for signal, _, tag in pairs}
    if not tags or len(tags) < len(scores) or not set(tags) <= {"terminal", "dense"} or not all(tags.values()):
        message = f"--scores is terminal:TAG, dense:TAG or both; found {listing(scores) or 'none'}."
        raise ConfigError(message)
    if ("dense" in tags) != (mapping is not None):
        message = (
            "Dense scores go with --map '{1: 0, 2: 0.5, 3: 1}', the headway of a frame for each; "
            f"found --scores {' '.join(scores)} and --map {mapping}."
        )
        raise ConfigError(message)
    headway = None if mapping is None else score_map(mapping, 0.0, 1.0, "a headway from 0 to 1")
    return ScoreTags(terminal=tags.get("terminal"), dense=tags.get("dense"), headway=headway)


def headway_progress(headway: Float[np.ndarray, " T"], end: float | None) -> Float[np.ndarray, " T"]:
    """Return an episode's progress after each of its frames.

        p_k = sum_{j<=k} h_j / T             without an end
        p_k = P sum_{j<=k} h_j / sum_j h_j   with the end P

    Args:
        headway: h, of each frame, from 0 to 1.
        end: P, the progress that the whole attempt made, where it is known.

    Returns:
        Progress from 0 to 1; NaN throughout where P is above 0 and no frame made headway, which contradict each other.
    """
    made = np.cumsum(headway, dtype=np.float64)
    if end is None:
        return made / len(made)
    if made[-1] == 0:
        return np.full(len(made), np.nan if end > 0 else 0.0)
    return end * (made / made[-1])


def judged_progress(dataset: Dataset, tags: ScoreTags) -> JudgedProgress:
    """Return the progress of every frame of a dataset's judged episodes, and say which episodes have none.

    Raises:
        MissingSidecar: The dataset has no such scores.
        SidecarError: They are of another version of the dataset.
    """
    from regrasp.recap.outcomes_stage import judged_episodes  # and with it the judges' whole stage
    from regrasp.rewards.dense import frame_scores

    index = dataset.index()
    rows = {
        signal: judged_episodes(dataset, signal, tag)
        for signal, tag in (("terminal", tags.terminal), ("dense", tags.dense))
        if tag is not None
    }
    frames: dict[int, np.ndarray] = {}
    stream = dataset.stream(["timestamp"])
    for number, length in zip(index.episode_index.tolist(), index.length.tolist(), strict=True):
        at = stream.take(length)["timestamp"].astype(np.float64)
        own = {signal: found.get(number) for signal, found in rows.items()}
        if any(row is None or row["invalid"] for row in own.values()):
            continue
        headway, end = np.ones(length), None
        if (dense := own.get("dense")) is not None and tags.headway is not None:
            if None in dense["half_seconds"]:
                continue
            headway = np.array([tags.headway[s] for s in frame_scores(at - at[0], dense["half_seconds"]) if s])
        if (terminal := own.get("terminal")) is not None:
            end = float(terminal["progress"])
        progress = headway_progress(headway, end)
        if np.isfinite(progress).all():
            frames[number] = progress.astype(np.float32)
    excluded = [number for number in index.episode_index.tolist() if number not in frames]
    if excluded:
        tell(
            f"{len(excluded)} episodes of '{dataset.path}' get no progress, and LeRobot gives their frames the full "
            f"weight: {listing(excluded)} (not judged, invalid, or no headway in an attempt that came somewhere)"
        )
    inputs = {
        signal: digest([[n, _essence(row)] for n, row in sorted(found.items())]) for signal, found in rows.items()
    }
    return JudgedProgress(frames=frames, excluded=excluded, inputs=inputs)


def _essence(row: dict[str, object]) -> list[object]:
    return [row["invalid"], row.get("progress"), row.get("half_seconds")]
