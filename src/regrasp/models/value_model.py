"""What a value model is: frames in, a distribution over 201 returns out."""

from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import torch
from jaxtyping import Bool, Float32, UInt8
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ValueInputs:
    """A batch of frames, of any episodes.

    Attributes:
        images: RGB, uint8, at the model's size; zeros where a camera is missing. ``C`` may be 0.
        present: Which cameras each frame has.
        state: The robot's state as recorded; the model normalises it. ``S`` may be 0.
        tasks: The task text of each frame.
    """

    images: UInt8[Tensor, "B C h w 3"]
    present: Bool[Tensor, "B C"]
    state: Float32[Tensor, "B S"]
    tasks: tuple[str, ...]

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("images", "present", "state")}
        return replace(self, **moved)


@runtime_checkable
class ValueModel(Protocol):
    """A network that gives logits over the atoms of ``regrasp.rl.categorical``.

    A model is built from its config alone (``Model(config)``), and its weights from a state dict; together they are a
    checkpoint. The config says which cameras it sees, in order, their size, and the dimension of the state.
    """

    config: Any

    def __call__(self, inputs: ValueInputs) -> Float32[Tensor, "B 201"]:
        """Return float32 logits, whatever the autocast."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights."""
        ...
