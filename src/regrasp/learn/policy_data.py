"""What a policy learns from: observations and chunks of actions, found by item number, with labels and weights.

States and actions are copied once to memory-mapped files, so that memory does not grow with the datasets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from numpy.lib.format import open_memmap
from torch import Tensor
from torch.utils.data import Dataset

from regrasp.core.errors import DatasetError, listing
from regrasp.core.provenance import digest
from regrasp.data import dataset as data
from regrasp.data.dataset import ENVIRONMENT_STATE, STATE
from regrasp.learn.episode_rows import DatasetRows, EpisodeRef, FrameTable, episode_vectors, vector_size
from regrasp.learn.image_cache import Images
from regrasp.rl.condition import INDICATOR_KEY

ACTION = "action"


@dataclass(frozen=True)
class VectorRows:
    """A column of vectors of a dataset, such as its actions, in canonical order, mapped from a file."""

    path: Path

    @cached_property
    def values(self) -> Float32[np.ndarray, "R D"]:
        """The vector of each row."""
        return np.load(self.path, mmap_mode="r")

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        """Go to another process as a path, and be mapped there."""
        return VectorRows, (self.path,)


def environment_rows(dataset: data.Dataset, folder: Path) -> VectorRows:
    """Copy what a dataset's simulator knew of the objects to ``folder``, or map the copy that is there.

    Raises:
        NonFiniteData: A number is NaN or infinite, with dataset, episode, frame and column.
    """
    return _vector_rows(dataset, dataset.own_column(ENVIRONMENT_STATE), folder, "environment")


def action_key(dataset: data.Dataset) -> str:
    """The dataset's own column of actions.

    Raises:
        DatasetError: It has none.
    """
    key = dataset.own_column(ACTION)
    if key not in dataset.columns:
        raise DatasetError(
            f"'{dataset.path}' has no column {key!r}, so no policy can be trained on it; it has: "
            f"{listing(dataset.columns, 20)}. Mend: map its column of actions to 'action' with `keys:` in the recipe."
        )
    return key


def action_rows(dataset: data.Dataset, folder: Path) -> VectorRows:
    """Copy a dataset's actions to ``folder``, or map the copy that is there.

    Raises:
        DatasetError: It has no actions.
        NonFiniteData: One is NaN or infinite, with dataset, episode, frame and column.
    """
    return _vector_rows(dataset, action_key(dataset), folder, "actions")


def _vector_rows(dataset: data.Dataset, column: str, folder: Path, name: str) -> VectorRows:
    index = dataset.index()
    path = folder / f"{name}_{digest([index.fingerprint, column])[:12]}.npy"
    if path.is_file():
        return VectorRows(path)
    folder.mkdir(parents=True, exist_ok=True)
    stream = dataset.stream([column])
    temporary = path.with_name(f".{path.name}.tmp")
    shape = (index.total, vector_size(dataset, [column]))
    rows = open_memmap(temporary, mode="w+", dtype=np.float32, shape=shape)
    row = 0
    for position, length in enumerate(index.length.tolist()):
        rows[row : row + length] = episode_vectors(dataset, [column], position, stream.take(length))
        row += length
    rows.flush()
    temporary.rename(path)
    return VectorRows(path)


@dataclass(frozen=True, kw_only=True)
class FrameLabels:
    """What is said of each row of one dataset, in canonical order."""

    indicator: Float32[np.ndarray, " R"]
    """+1 positive, -1 negative, 0 where the policy is not conditioned."""
    weight: Float32[np.ndarray, " R"]
    """The row's factor in the loss."""


@dataclass(frozen=True, kw_only=True)
class PolicyBatch:
    """Samples as a LeRobot preprocessor takes them, and each one's factor in the loss."""

    inputs: dict[str, Tensor]
    weight: Float32[Tensor, " B"]

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device."""
        return type(self)(
            inputs={key: value.to(device) for key, value in self.inputs.items()}, weight=self.weight.to(device)
        )


class PolicyFrames(Dataset):
    """The frames of a ``FrameTable`` as policy batches: an observation and the H actions from it on."""

    def __init__(
        self,
        table: FrameTable,
        rows: Sequence[DatasetRows],
        actions: Sequence[VectorRows],
        labels: Sequence[FrameLabels],
        images: Images,
        chunk_size: int,
        environment: Sequence[VectorRows] = (),
    ) -> None:
        """Join frames with what is known of their datasets' rows; the sequences have one entry per dataset.

        ``environment`` may be empty: then the policy is not shown what the simulators knew.
        """
        self.table, self.rows, self.actions, self.labels = table, rows, actions, labels
        self.environment = environment
        self.images, self.chunk_size = images, chunk_size
        self._dataset = np.array([episode.dataset for episode in table.episodes], dtype=np.int64)
        self._first = np.array([episode.first_row for episode in table.episodes], dtype=np.int64)
        self._length = np.array([episode.length for episode in table.episodes], dtype=np.int64)

    def __len__(self) -> int:
        """The number of frames."""
        return len(self.table)

    def __getitems__(self, items: list[int]) -> PolicyBatch:
        """Return a batch; steps of a chunk after the episode's end repeat its last action and are marked as padding."""
        episode, row = self.table.locate(np.asarray(items, dtype=np.int64))
        step = row[:, None] + np.arange(self.chunk_size)
        last = self._length[episode][:, None] - 1
        at, ahead = self._first[episode] + row, self._first[episode][:, None] + np.minimum(step, last)
        count = len(items)
        states = np.empty((count, self.rows[0].states.shape[1]), dtype=np.float32)
        chunks = np.empty((count, self.chunk_size, self.actions[0].values.shape[1]), dtype=np.float32)
        objects = np.empty((count, self.environment[0].values.shape[1] if self.environment else 0), dtype=np.float32)
        indicator, weight = np.empty(count, dtype=np.float32), np.empty(count, dtype=np.float32)
        for place in np.unique(self._dataset[episode]).tolist():
            chosen = np.flatnonzero(self._dataset[episode] == place)
            states[chosen] = self.rows[place].states[at[chosen]]
            if self.environment:
                objects[chosen] = self.environment[place].values[at[chosen]]
            chunks[chosen] = self.actions[place].values[ahead[chosen]]
            indicator[chosen] = self.labels[place].indicator[at[chosen]]
            weight[chosen] = self.labels[place].weight[at[chosen]]
        inputs = {
            ACTION: torch.from_numpy(chunks),
            "action_is_pad": torch.from_numpy(step > last),
            INDICATOR_KEY: torch.from_numpy(indicator),
        }
        seen = {STATE: states, ENVIRONMENT_STATE: objects}
        inputs |= {key: torch.from_numpy(values) for key, values in seen.items() if values.shape[1]}
        return PolicyBatch(inputs=inputs | self._images(episode, row), weight=torch.from_numpy(weight))

    def _images(self, episode: Int[np.ndarray, " B"], row: Int[np.ndarray, " B"]) -> dict[str, Tensor]:
        """Each camera's images, float32 [B, 3, h, w] in [0, 1] as LeRobot has them."""
        cameras = self.images.cameras
        if not cameras:
            return {}
        pixels = np.empty((len(row), len(cameras), *self.images.size, 3), dtype=np.uint8)
        for place in np.unique(episode).tolist():
            chosen = np.flatnonzero(episode == place)
            pixels[chosen] = self.images.read(self.table.episodes[place], row[chosen])
        tensor = torch.from_numpy(pixels).permute(1, 0, 4, 2, 3).float() / 255.0
        return dict(zip(cameras, tensor, strict=True))


def mixture_moments(
    parts: Sequence[Float32[np.ndarray, "_ D"]], episodes: Sequence[EpisodeRef], weights: Sequence[float]
) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, " D"]]:
    """Return mean and standard deviation of each dimension over a mixture.

    Args:
        parts: The rows of each dataset.
        episodes: Which of them count.
        weights: Of each dataset's rows.

    Returns:
        Both in float64. A dimension that does not vary has standard deviation 1.
    """
    total = 0.0
    mean, square = np.zeros(parts[0].shape[1]), np.zeros(parts[0].shape[1])
    for number in (1, 2):
        for episode in episodes:
            rows = parts[episode.dataset][episode.first_row : episode.first_row + episode.length].astype(np.float64)
            weight = weights[episode.dataset]
            if number == 1:
                total += weight * len(rows)
                mean += weight * rows.sum(axis=0)
            else:
                square += weight * ((rows - mean) ** 2).sum(axis=0)
        if number == 1:
            mean = mean / total
    deviation = np.sqrt(square / total)
    return mean, np.where(deviation > 1e-6 * np.maximum(np.abs(mean), 1.0), deviation, 1.0)


def advantage_weights(
    advantages: Sequence[Float[np.ndarray, " _"]],
    counted: Sequence[Bool[np.ndarray, " _"]],
    *,
    temperature: float,
    limit: float,
) -> list[Float32[np.ndarray, " _"]]:
    """Weigh each row of some datasets by its advantage, for advantage-weighted regression.

        w = min(exp(A / (temperature * s)), limit) / mean,   s = the standard deviation of A

    Args:
        advantages: A of each dataset's rows, in any one unit.
        counted: The rows that are trained on; s and the mean are over them.
        temperature: In standard deviations of A; lower weighs harder.
        limit: The greatest weight before normalisation.

    Returns:
        Weights of mean 1 over the counted rows; 1 everywhere where A does not vary.

    Source:
        Peng et al., arXiv:1910.00177; the clipped exponential is theirs.
    """
    pooled = np.concatenate([a[chosen] for a, chosen in zip(advantages, counted, strict=True)])
    deviation = float(pooled.std())
    if deviation == 0.0:
        return [np.ones(len(a), dtype=np.float32) for a in advantages]
    log_limit = float(np.log(limit))
    raw = [np.exp(np.minimum(a / (temperature * deviation), log_limit)) for a in advantages]
    mean = np.concatenate([w[chosen] for w, chosen in zip(raw, counted, strict=True)]).mean()
    return [(w / mean).astype(np.float32) for w in raw]
