"""The value objective: cross-entropy between the model's distribution and the two-hot return of each frame."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from regrasp.core.errors import SidecarError
from regrasp.core.scale import ReturnScale
from regrasp.learn.episode_rows import DatasetRows, FrameTable
from regrasp.learn.image_cache import Images
from regrasp.learn.value_metrics import HeldOut, Predictions, evaluate
from regrasp.models.value_model import ValueInputs
from regrasp.rl.categorical import two_hot

TOLERANCE = 1e-6
"""How far outside [-1, 0] a return may lie by rounding; float32 stores returns to about 1e-7."""


def unit_targets(
    returns: Float32[np.ndarray, " T"], scale: ReturnScale, task: str, where: str
) -> Float[np.ndarray, " T"]:
    """Turn returns into targets in [-1, 0]; nothing is clamped but rounding.

    Args:
        returns: G of each frame, in reward units.
        scale: The task's.
        task: For the error.
        where: The dataset and episode, for the error.

    Raises:
        SidecarError: A return lies outside the scale.
    """
    unit = scale.to_unit(returns.astype(np.float64))
    outside = ~((unit >= -1 - TOLERANCE) & (unit <= TOLERANCE))
    if outside.any():
        raise SidecarError(
            f"The return scale of the task {task!r} is [{scale.low:g}, {scale.high:g}], but {where} "
            f"has a return of {returns[outside][0]:g} ({int(outside.sum())} frames outside). Mend: run `regrasp "
            "returns` over all datasets of the run together, so that one scale holds them all."
        )
    return np.clip(unit, -1.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class ValueBatch:
    """Frames and their two-hot targets: weight ``1 - upper_weight`` on atom ``lower``, the rest on the next."""

    inputs: ValueInputs
    lower: Int64[Tensor, " B"]
    upper_weight: Float32[Tensor, " B"]

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device."""
        return type(self)(
            inputs=self.inputs.to(device), lower=self.lower.to(device), upper_weight=self.upper_weight.to(device)
        )


class ValueFrames(Dataset):
    """The frames of a ``FrameTable`` as value batches."""

    def __init__(
        self, table: FrameTable, targets: Float[np.ndarray, " n"], rows: Sequence[DatasetRows], images: Images
    ) -> None:
        """Join frames with their targets, one for each item of ``table``."""
        self.table, self.targets, self.rows, self.images = table, targets, rows, images

    def __len__(self) -> int:
        """The number of frames."""
        return len(self.table)

    def __getitems__(self, items: list[int]) -> ValueBatch:
        """Return a batch; frames of one episode are read together."""
        wanted = np.asarray(items, dtype=np.int64)
        episodes, rows = self.table.locate(wanted)
        cameras, size = len(self.images.cameras), self.images.size
        pixels = np.zeros((len(items), cameras, *size, 3), dtype=np.uint8)
        present = np.zeros((len(items), cameras), dtype=bool)
        states = np.empty((len(items), self.rows[0].states.shape[1]), dtype=np.float32)
        for place in np.unique(episodes):
            episode, chosen = self.table.episodes[place], np.flatnonzero(episodes == place)
            states[chosen] = self.rows[episode.dataset].states[episode.first_row + rows[chosen]]
            present[chosen] = self.images.present(episode.dataset)
            if cameras:
                pixels[chosen] = self.images.read(episode, rows[chosen])
        lower, weight = two_hot(self.targets[wanted])
        inputs = ValueInputs(
            images=torch.from_numpy(pixels),
            present=torch.from_numpy(present),
            state=torch.from_numpy(states),
            tasks=tuple(self.table.episodes[place].task for place in episodes),
        )
        return ValueBatch(
            inputs=inputs, lower=torch.from_numpy(lower), upper_weight=torch.from_numpy(weight.astype(np.float32))
        )


def two_hot_cross_entropy(
    logits: Float[Tensor, "B 201"], lower: Int64[Tensor, " B"], upper_weight: Float32[Tensor, " B"]
) -> Float32[Tensor, ""]:
    """Return the mean cross-entropy, computed in float32 whatever the logits' type.

    L = -mean((1 - w) log p_l + w log p_{l+1})
    """
    log_probabilities = torch.log_softmax(logits.float(), dim=1)
    below, above = (log_probabilities.gather(1, (lower + k)[:, None])[:, 0] for k in (0, 1))
    return -((1 - upper_weight) * below + upper_weight * above).mean()


def shifted(images: UInt8[Tensor, "B C h w 3"], most: int) -> UInt8[Tensor, "B C h w 3"]:
    """Move each image by up to ``most`` pixels in each direction, its edge repeated; by torch's generator."""
    batch, cameras, height, width, _ = images.shape
    if most == 0 or images.numel() == 0:
        return images
    device = images.device
    down, right = torch.randint(-most, most + 1, (2, batch * cameras, 1), device=device)
    rows = (torch.arange(height, device=device) + down).clamp(0, height - 1)
    columns = (torch.arange(width, device=device) + right).clamp(0, width - 1)
    image = torch.arange(batch * cameras, device=device)[:, None, None]
    return images.flatten(0, 1)[image, rows[:, :, None], columns[:, None, :]].view_as(images)


class ValueObjective:
    """Trains a value model, and judges it on held-out episodes; an ``Objective``."""

    judged_by = "cross_entropy"

    def __init__(self, frames: ValueFrames, held_out: HeldOut, *, batch_size: int, shift: int) -> None:
        """Judge on ``frames``, which ``held_out`` describes; move training images by up to ``shift`` pixels."""
        self.frames, self.held_out, self.batch_size, self.shift = frames, held_out, batch_size, shift

    def loss(self, model: Any, batch: ValueBatch) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ANN401 - a ValueModel
        """Return the batch's cross-entropy, and how often the likeliest atom is a neighbour of the return."""
        inputs = batch.inputs
        images = shifted(inputs.images, self.shift)
        moved = ValueInputs(images=images, present=inputs.present, state=inputs.state, tasks=inputs.tasks)
        logits = model(moved)
        likeliest = logits.argmax(dim=1)
        below = (likeliest == batch.lower) & (batch.upper_weight < 1)
        neighbor = below | ((likeliest == batch.lower + 1) & (batch.upper_weight > 0))
        loss = two_hot_cross_entropy(logits, batch.lower, batch.upper_weight)
        return loss, {"cat_acc_neighbor": neighbor.float().mean()}

    def evaluate(self, model: Any) -> dict[str, float]:  # noqa: ANN401 - a ValueModel
        """Return every held-out metric that is a number."""
        metrics = evaluate(self.predictions(model), self.held_out).to_json()
        return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}

    @torch.no_grad()
    def predictions(self, model: Any) -> Predictions:  # noqa: ANN401 - a ValueModel
        """Return what the model says of every held-out frame."""
        model.eval()
        device = next(model.parameters()).device
        parts = []
        for start in range(0, len(self.frames), self.batch_size):
            items = list(range(start, min(start + self.batch_size, len(self.frames))))
            inputs = self.frames.__getitems__(items).inputs.to(device)
            log_probabilities = torch.log_softmax(model(inputs).float(), dim=1).cpu().numpy()
            parts.append(Predictions.of(log_probabilities, self.frames.targets[items]))
        return Predictions.joined(parts)
