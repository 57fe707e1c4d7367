"""The episodes of a value fit, and their rows: timestamps, states and targets, found by item number.

States and timestamps are copied once to memory-mapped files, so that memory does not grow with the datasets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32, Int
from numpy.lib.format import open_memmap

from regrasp.core.provenance import digest
from regrasp.data.dataset import Dataset, check_finite


@dataclass(frozen=True, kw_only=True)
class EpisodeRef:
    """One episode of a run.

    Attributes:
        dataset: Its dataset's place in the run.
        episode_index: Its number in the dataset.
        first_row: Where its rows begin among the dataset's, in canonical order.
        length: Its frames.
        task: Its task text.
        width: The width of the task's return scale, in reward units.
        success: How it ended.
    """

    dataset: int
    episode_index: int
    first_row: int
    length: int
    task: str
    width: float
    success: bool


class FrameTable:
    """Every ``stride``-th frame of some episodes as items, numbered from 0."""

    def __init__(self, episodes: Sequence[EpisodeRef], stride: int) -> None:
        """Number the frames of ``episodes``, in their order."""
        self.episodes = list(episodes)
        self.stride = stride
        counts = [-(-episode.length // stride) for episode in self.episodes]
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def __len__(self) -> int:
        """The number of items."""
        return int(self.starts[-1])

    def locate(self, items: Int[np.ndarray, " B"]) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]]:
        """Return each item's episode, as its place in ``episodes``, and its row within the episode."""
        episode = np.searchsorted(self.starts, items, side="right") - 1
        return episode, (items - self.starts[episode]) * self.stride

    def dataset_sizes(self, datasets: int) -> list[int]:
        """Return the items of each dataset; the episodes must come dataset by dataset."""
        places = [episode.dataset for episode in self.episodes]
        assert places == sorted(places), "episodes are not in the order of their datasets"
        counts = np.diff(self.starts)
        return np.bincount(places, weights=counts, minlength=datasets).astype(np.int64).tolist()


@dataclass(frozen=True)
class DatasetRows:
    """A dataset's timestamps, and its states where the run has them, in canonical order, mapped from two files."""

    timestamps_path: Path
    states_path: Path

    @cached_property
    def timestamps(self) -> Float[np.ndarray, " R"]:
        """Seconds since each row's episode began."""
        return np.load(self.timestamps_path, mmap_mode="r")

    @cached_property
    def states(self) -> Float32[np.ndarray, "R S"]:
        """The state of each row; ``S`` is 0 where the run has none."""
        return np.load(self.states_path, mmap_mode="r")

    def __reduce__(self) -> tuple[type, tuple[Path, Path]]:
        """Go to another process as two paths, and be mapped there."""
        return DatasetRows, (self.timestamps_path, self.states_path)


def dataset_rows(dataset: Dataset, folder: Path, columns: Sequence[str]) -> DatasetRows:
    """Copy a dataset's timestamps and states to ``folder``, or map the copies that are there.

    Args:
        dataset: What is copied.
        folder: Where to.
        columns: Those that make up the state, side by side; none for a state of size 0.

    Raises:
        NonFiniteData: A state is NaN or infinite, with dataset, episode, frame and column.
    """
    index = dataset.index()
    key = digest([index.fingerprint, *columns])[:12]
    paths = [folder / f"{name}_{key}.npy" for name in ("timestamps", "states")]
    if not all(path.is_file() for path in paths):
        _copy_rows(dataset, columns, paths)
    return DatasetRows(*paths)


def _copy_rows(dataset: Dataset, columns: Sequence[str], paths: list[Path]) -> None:
    index = dataset.index()
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    stream = dataset.stream(["timestamp", *columns])
    temporary = [path.with_name(f".{path.name}.tmp") for path in paths]
    dimension = vector_size(dataset, columns)
    timestamps = open_memmap(temporary[0], mode="w+", dtype=np.float64, shape=(index.total,))
    states = open_memmap(temporary[1], mode="w+", dtype=np.float32, shape=(index.total, dimension))
    row = 0
    for position, length in enumerate(index.length.tolist()):
        block = stream.take(length)
        timestamps[row : row + length] = block["timestamp"]
        states[row : row + length] = episode_vectors(dataset, columns, position, block)
        row += length
    timestamps.flush()
    states.flush()
    for unnamed, path in zip(temporary, paths, strict=True):
        unnamed.rename(path)


def vector_size(dataset: Dataset, columns: Sequence[str]) -> int:
    """Return how many numbers a dataset's columns have side by side, by its first row."""
    first = dataset.stream(columns).take(1) if columns else {}
    return sum(np.asarray(first[column]).reshape(1, -1).shape[1] for column in columns)


def episode_vectors(
    dataset: Dataset, columns: Sequence[str], position: int, block: dict[str, np.ndarray]
) -> Float32[np.ndarray, "T S"]:
    """Return an episode's columns of numbers side by side as float32 ``[T, S]``, checked; ``[T, 0]`` without any.

    Raises:
        NonFiniteData: One is NaN or infinite, with dataset, episode, frame and column.
    """
    index = dataset.index()
    parts = [np.zeros((int(index.length[position]), 0), dtype=np.float32)]
    for column in columns:
        values = np.asarray(block[column])
        values = values.reshape(len(values), -1).astype(np.float32)
        check_finite(values, column, dataset, int(index.episode_index[position]), index.frames(position))
        parts.append(values)
    return np.concatenate(parts, axis=1)


def state_statistics(
    rows: Sequence[DatasetRows], episodes: Sequence[EpisodeRef]
) -> tuple[Float[np.ndarray, " S"], Float[np.ndarray, " S"]]:
    """Return mean and standard deviation of each state dimension over all frames of the episodes.

    A dimension that does not vary has standard deviation 1.
    """
    count = 0
    dimension = rows[0].states.shape[1]
    mean, squares = np.zeros(dimension), np.zeros(dimension)
    for episode in episodes:
        states = rows[episode.dataset].states[episode.first_row : episode.first_row + episode.length]
        states = states.astype(np.float64)
        total = count + len(states)
        shift = states.mean(axis=0) - mean
        squares += ((states - states.mean(axis=0)) ** 2).sum(axis=0) + shift**2 * count * len(states) / total
        mean += shift * len(states) / total
        count = total
    deviation = np.sqrt(squares / max(count, 1))
    return mean, np.where(deviation > 1e-6 * np.maximum(np.abs(mean), 1.0), deviation, 1.0)
