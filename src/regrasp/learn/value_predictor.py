"""Values of whole episodes: one pass over each video, one decoder, frames resized as in training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, UInt8

from regrasp.core.errors import CheckpointError
from regrasp.data.dataset import Dataset
from regrasp.data.frames import iter_episode_frames
from regrasp.data.storage import write_bytes_atomic
from regrasp.learn.threads import torch_threads
from regrasp.learn.value_checkpoint import ValueCheckpoint, load_value_model
from regrasp.models.value_model import ValueInputs
from regrasp.rl.categorical import expectation


@dataclass(frozen=True, kw_only=True)
class EpisodeJob:
    """One episode, with what its dataset's tables say of it.

    Attributes:
        dataset: Its dataset's place in the run.
        episode_index: Its number.
        task: Its task text.
        timestamps: Seconds since its start.
        states: The state of each frame; ``S`` is 0 for a model without state.
        path: Where its values are kept until all are there.
    """

    dataset: int
    episode_index: int
    task: str
    timestamps: Float[np.ndarray, " T"]
    states: Float32[np.ndarray, "T S"]
    path: Path


@dataclass(frozen=True, kw_only=True)
class ValuePredictor:
    """Predicts episodes; sent to a process, it loads its model there, once.

    Attributes:
        checkpoint: The value model.
        datasets: The run's datasets.
        batch_size: Frames that go through the model at once.
        device: Where the model runs.
    """

    checkpoint: ValueCheckpoint
    datasets: Sequence[Dataset]
    batch_size: int
    device: str

    @cached_property
    def model(self) -> Any:  # noqa: ANN401 - a ValueModel, which is also a torch module
        """The model, loaded on first use."""
        return load_value_model(self.checkpoint, self.device)

    def __getstate__(self) -> dict[str, Any]:
        """Leave a loaded model behind when sent to another process."""
        return {name: value for name, value in self.__dict__.items() if name != "model"}

    def __call__(self, job: EpisodeJob) -> int:
        """Predict an episode and keep its values in ``job.path``; returns its frames."""
        with torch_threads(1):  # episodes are what is done in parallel
            values = self.predict(job)
        write_bytes_atomic(job.path, values.astype("<f4").tobytes())
        return len(values)

    def predict(self, job: EpisodeJob) -> Float[np.ndarray, " T"]:
        """Return V of each frame of an episode, in the unit.

        Raises:
            VideoError: A frame cannot be had.
            CheckpointError: The model gives NaN.
        """
        parts = []
        frames = self._frames(job)
        present = self._present(job)
        for start in range(0, len(job.timestamps), self.batch_size):
            states = job.states[start : start + self.batch_size]
            images = self._images(frames, len(states))
            inputs = ValueInputs(
                images=torch.from_numpy(images),
                present=torch.from_numpy(np.repeat(present[None], len(states), axis=0)),
                state=torch.from_numpy(np.ascontiguousarray(states)),
                tasks=(job.task,) * len(states),
            ).to(torch.device(self.device))
            parts.append(expected_values(self.model, inputs))
        values = np.concatenate(parts)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"The model in '{self.checkpoint.folder}' gives {values[~np.isfinite(values)][0]} for frame "
                f"{int(np.flatnonzero(~np.isfinite(values))[0])} of episode {job.episode_index} in "
                f"{self.datasets[job.dataset].name!r}. Mend: fit it again with a lower --learning-rate."
            )
        return values

    def _present(self, job: EpisodeJob) -> Bool[np.ndarray, " C"]:
        return np.array(
            [camera in self.datasets[job.dataset].cameras for camera in self.checkpoint.cameras], dtype=bool
        )

    def _frames(self, job: EpisodeJob) -> list[Iterator[UInt8[np.ndarray, "h w 3"]] | None]:
        dataset = self.datasets[job.dataset]
        size = self.checkpoint.image_size
        return [
            iter_episode_frames(dataset, camera, job.episode_index, size, timestamps=job.timestamps) if there else None
            for camera, there in zip(self.checkpoint.cameras, self._present(job), strict=True)
        ]

    def _images(self, frames: list[Any], count: int) -> UInt8[np.ndarray, "B C h w 3"]:
        images = np.zeros((count, len(frames), *self.checkpoint.image_size, 3), dtype=np.uint8)
        for camera, source in enumerate(frames):
            if source is not None:
                for row in range(count):
                    images[row, camera] = next(source)
        return images


@torch.inference_mode()
def expected_values(model: Any, inputs: ValueInputs) -> Float[np.ndarray, " B"]:  # noqa: ANN401 - a ValueModel
    """Return V = sum p * atom of each frame, float64."""
    log_probabilities = torch.log_softmax(model(inputs).float(), dim=1).cpu().numpy()
    return expectation(np.exp(log_probabilities.astype(np.float64)))


def read_values(path: Path, frames: int) -> Float32[np.ndarray, " T"] | None:
    """Return an episode's values that were kept, or None where there are none of that length."""
    if not path.is_file() or path.stat().st_size != 4 * frames:
        return None
    return np.fromfile(path, dtype="<f4")
