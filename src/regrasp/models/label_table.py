"""The labels of one dataset, found by a frame's ``index``.

LeRobot numbers a dataset's frames in the order of episode and frame, and that number is what a batch carries. An
advantages sidecar holds its rows in the same order, so that a row's place is its index where the sidecar covers the
whole dataset.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from regrasp.core.errors import MissingSidecar, SidecarError, listing
from regrasp.rl.condition import indicator


@dataclass(frozen=True, kw_only=True)
class LabelTable:
    """The label of every frame of a dataset, as an indicator."""

    path: Path
    """Where it was read."""

    indicators: Float[np.ndarray, " R"]
    """+1 or -1, by ``index``; NaN where the table has no such frame."""

    episodes: Int[np.ndarray, " R"]
    """The episode of each ``index``; -1 where the table has no such frame."""

    def look_up(
        self, index: Int[np.ndarray, " B"], episodes: Int[np.ndarray, " B"] | None = None
    ) -> Float[np.ndarray, " B"]:
        """The indicator of each frame, +1 or -1.

        Args:
            index: The frames' numbers within the dataset.
            episodes: The episodes that the batch says they are from; checked against the table's.

        Raises:
            SidecarError: Where a frame has no label, or belongs to another episode: the table is of another dataset.
        """
        inside = (index >= 0) & (index < len(self.indicators))
        found = np.where(inside, self.indicators[np.where(inside, index, 0)], np.nan)
        if np.isnan(found).any():
            absent = listing(index[np.isnan(found)].tolist())
            message = (
                f"The labels in {self.path} have none for the frames with index {absent}; they hold "
                f"{int((self.episodes >= 0).sum())} frames. Label the dataset that you train on: "
                "regrasp advantages DATASET"
            )
            raise SidecarError(message)
        if episodes is not None and not np.array_equal(self.episodes[index], episodes):
            at = int(np.flatnonzero(self.episodes[index] != episodes)[0])
            message = (
                f"The labels in {self.path} are of another dataset, or of this one before it was edited: "
                f"index {int(index[at])} is of episode {int(self.episodes[index[at]])} there and of "
                f"{int(episodes[at])} in the data. Label it anew: regrasp advantages DATASET"
            )
            raise SidecarError(message)
        return found


def read_label_table(path: Path) -> LabelTable:
    """Read the labels of an advantages sidecar.

    Args:
        path: A parquet file with ``episode_index``, ``advantage`` and ``frame_index`` or ``index``. Without ``index``
            it must cover the dataset from its first frame to its last.

    Raises:
        MissingSidecar: Where there is no such file.
        SidecarError: Where it lacks a column, a label, or the frames in between.
    """
    import pyarrow.parquet as pq

    if not path.is_file():
        message = (
            f"There are no labels at {path}, which the policy's preprocessor was saved with and training needs. Label "
            "the dataset with regrasp advantages, and give the step the file as its 'labels'."
        )
        raise MissingSidecar(message)
    names = pq.read_schema(path).names
    place = "index" if "index" in names else "frame_index"
    missing = [name for name in ("episode_index", place, "advantage") if name not in names]
    if missing:
        message = f"The labels in {path} lack the columns {listing(missing)}; found {listing(names, 12)}."
        raise SidecarError(message)
    table = pq.read_table(path, columns=["episode_index", place, "advantage"])
    if table.num_rows == 0:
        message = f"The labels in {path} are empty. Label the dataset that you train on: regrasp advantages DATASET"
        raise SidecarError(message)
    empty = [name for name in table.column_names if table[name].null_count]
    if empty:
        message = (
            f"The labels in {path} have rows without {listing(empty)}. Every frame that is trained on needs a label."
        )
        raise SidecarError(message)
    episodes = table["episode_index"].to_numpy().astype(np.int64)
    index = table[place].to_numpy().astype(np.int64)
    if place == "frame_index":
        index = _index_of_rows(episodes, index, path)
    labels = indicator(table["advantage"].to_numpy().astype(bool))
    return _by_index(path, index, episodes, labels)


def _index_of_rows(episodes: Int[np.ndarray, " R"], frames: Int[np.ndarray, " R"], path: Path) -> Int[np.ndarray, " R"]:
    """The place of each row, once it is sure that it is the frame's ``index``."""
    first = np.flatnonzero(np.diff(episodes, prepend=-1))
    starts = np.repeat(first, np.diff(first, append=len(episodes)))
    whole = np.array_equal(episodes[first], np.arange(len(first)))
    if not whole or not np.array_equal(frames, np.arange(len(frames)) - starts):
        message = (
            f"The labels in {path} skip episodes or frames, so a frame's number within the dataset cannot be told from "
            "its place. Label every episode, or add a column 'index' with LeRobot's number of each frame."
        )
        raise SidecarError(message)
    return np.arange(len(frames))


def _by_index(
    path: Path, index: Int[np.ndarray, " R"], episodes: Int[np.ndarray, " R"], labels: Float[np.ndarray, " R"]
) -> LabelTable:
    size = int(index.max(initial=-1)) + 1
    indicators = np.full(size, np.nan, dtype=np.float32)
    owner = np.full(size, -1, dtype=np.int64)
    indicators[index], owner[index] = labels, episodes
    return LabelTable(path=path, indicators=indicators, episodes=owner)
