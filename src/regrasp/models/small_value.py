"""The ``small`` value model: about a million weights, trained in minutes on a CPU.

Each camera's image goes through one shared convolutional encoder, together with an embedding of the camera; the mean
over the cameras that are present, the normalised state and a bag of hashed task text meet in a two-layer head.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor, nn

from regrasp.models.task_text import hashed_text
from regrasp.models.value_model import ValueInputs
from regrasp.rl.categorical import ATOMS

STRIDE = 16
"""Height and width of the images are multiples of this."""


@dataclass(frozen=True, kw_only=True)
class SmallValueConfig:
    """What the network looks at, and how wide it is."""

    cameras: tuple[str, ...]
    """The cameras' names in the run, in the order of the inputs; none for a model of state and task alone."""
    image_size: tuple[int, int]
    """Height and width, in pixels; multiples of 16."""
    state_mean: tuple[float, ...]
    """The mean of each dimension of the state over the training frames; empty for a model without state."""
    state_std: tuple[float, ...]
    """Their standard deviations; a dimension that does not vary has 1."""
    width: int = 128
    """The width of every embedding."""
    channels: tuple[int, int, int] = (24, 48, 64)
    """Of the encoder's stages, at 1/4, 1/8 and 1/16 of the image."""
    text_buckets: int = 4096
    """How many hashed words and letter groups the task text has."""
    dropout: float = 0.1
    """In the head, while training."""

    def __post_init__(self) -> None:
        """Refuse sizes that the encoder cannot take."""
        if self.cameras and any(side < STRIDE or side % STRIDE for side in self.image_size):
            raise ValueError(f"The small value model takes images of multiples of {STRIDE} pixels; {self.image_size}.")
        if len(self.state_mean) != len(self.state_std):
            raise ValueError(f"{len(self.state_mean)} state means, {len(self.state_std)} standard deviations.")

    @property
    def state_dim(self) -> int:
        """The dimension of the state; 0 for a model without one."""
        return len(self.state_mean)


class ImageEncoder(nn.Module):
    """Images to vectors: four convolutions, and a linear layer that keeps where things are."""

    def __init__(self, image_size: tuple[int, int], channels: tuple[int, int, int], width: int) -> None:
        """Build for images of one size."""
        super().__init__()
        first, second, third = channels
        self.stages = nn.Sequential(
            nn.Conv2d(3, first, 6, stride=4, padding=1),
            nn.GELU(approximate="tanh"),
            nn.Conv2d(first, second, 3, stride=2, padding=1),
            nn.GELU(approximate="tanh"),
            nn.Conv2d(second, third, 3, stride=2, padding=1),
            nn.GELU(approximate="tanh"),
            nn.Conv2d(third, third, 3, padding=1),
            nn.GELU(approximate="tanh"),
        )
        cells = (image_size[0] // STRIDE) * (image_size[1] // STRIDE)
        self.norm = nn.LayerNorm(third * cells)
        self.out = nn.Linear(third * cells, width)

    def forward(self, images: UInt8[Tensor, "N h w 3"]) -> Float[Tensor, "N width"]:
        """Return one vector an image."""
        scaled = images.permute(0, 3, 1, 2).to(self.out.weight.dtype).div_(64.0).sub_(2.0)
        return self.out(self.norm(self.stages(scaled).flatten(1)))


class SmallValue(nn.Module):
    """See the module; a ``ValueModel``."""

    state_mean: Tensor
    state_std: Tensor

    def __init__(self, config: SmallValueConfig) -> None:
        """Build with fresh weights."""
        super().__init__()
        self.config = config
        width = config.width
        self.encoder = ImageEncoder(config.image_size, config.channels, width) if config.cameras else None
        self.camera = nn.Embedding(max(len(config.cameras), 1), width)
        self.text = nn.EmbeddingBag(config.text_buckets, width, mode="mean")
        self.state = nn.Sequential(nn.Linear(config.state_dim, width), nn.GELU()) if config.state_dim else None
        self.register_buffer("state_mean", torch.tensor(config.state_mean), persistent=False)
        self.register_buffer("state_std", torch.tensor(config.state_std), persistent=False)
        self.head = nn.Sequential(
            nn.LayerNorm(3 * width),
            nn.Linear(3 * width, 2 * width),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(2 * width, 2 * width),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(2 * width, ATOMS),
        )
        nn.init.normal_(self.text.weight, std=0.5)
        nn.init.normal_(self.camera.weight, std=0.1)

    def forward(self, inputs: ValueInputs) -> Float32[Tensor, "B 201"]:
        """Return float32 logits over the atoms."""
        parts = [self._seen(inputs), self._felt(inputs), self._told(inputs.tasks)]
        return self.head(torch.cat(parts, dim=1)).float()

    def _seen(self, inputs: ValueInputs) -> Float[Tensor, "B width"]:
        batch, cameras = inputs.present.shape
        if self.encoder is None:
            return self.text.weight.new_zeros(batch, self.config.width)
        flat = inputs.images.flatten(0, 1)
        views = self.encoder(flat).view(batch, cameras, -1) + self.camera.weight
        weights = inputs.present.to(views.dtype)
        shares = weights / weights.sum(dim=1, keepdim=True).clamp(min=1.0)
        return (views * shares[..., None]).sum(dim=1)

    def _felt(self, inputs: ValueInputs) -> Float[Tensor, "B width"]:
        if self.state is None:
            return self.text.weight.new_zeros(len(inputs.tasks), self.config.width)
        return self.state((inputs.state - self.state_mean) / self.state_std)

    def _told(self, tasks: tuple[str, ...]) -> Float[Tensor, "B width"]:
        different = list(dict.fromkeys(tasks))
        pieces = [hashed_text(task, self.config.text_buckets) for task in different]
        starts = [0]
        for piece in pieces[:-1]:
            starts.append(starts[-1] + len(piece))
        device = self.text.weight.device
        flat = torch.tensor([bucket for piece in pieces for bucket in piece], device=device)
        vectors = self.text(flat, torch.tensor(starts, device=device))
        place = {task: row for row, task in enumerate(different)}
        return vectors[torch.tensor([place[task] for task in tasks], device=device)]
