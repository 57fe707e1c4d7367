"""The networks of the reference policy: what it sees, and the velocity it answers with.

Axes: ``B`` batch, ``H`` steps of a chunk, ``D`` dimensions of an action, ``O`` features of an observation.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regrasp.core.errors import ConfigError, listing
from regrasp.models.flow_policy.configuration_flow import FlowConfig


class ObservationEncoder(nn.Module):
    """One feature vector for each observation: the states as they are, the images through a small network each."""

    def __init__(self, config: FlowConfig) -> None:
        """Build an image network for each camera among the input features."""
        super().__init__()
        self.state_limit = config.state_limit
        self.state_sizes = {key: math.prod(feature.shape) for key, feature in config.state_features.items()}
        self.cameras = {key: key.replace(".", "_") for key in config.image_features}
        self.images = nn.ModuleDict(
            {
                self.cameras[key]: ImageEncoder(feature.shape[0], config.vision_channels, config.vision_dim)
                for key, feature in config.image_features.items()
            }
        )
        self.output_dim = sum(self.state_sizes.values()) + config.vision_dim * len(self.cameras)

    def forward(self, batch: dict[str, Any]) -> Float[Tensor, "B O"]:
        """Encode the normalised observations in ``batch``.

        Raises:
            ConfigError: Where an input is missing, or a state has another size than in training.
        """
        batch = self.inputs(batch)
        states = [self._state(batch[key], key, size) for key, size in self.state_sizes.items()]
        return torch.cat(states + [self.images[name](batch[key]) for key, name in self.cameras.items()], dim=-1)

    def inputs(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """What the policy sees of ``batch``.

        Raises:
            ConfigError: Where an input is missing.
        """
        keys = (*self.state_sizes, *self.cameras)
        missing = [key for key in keys if key not in batch]
        if missing:
            found = listing(sorted(key for key in batch if key.startswith("observation.")))
            message = (
                f"The policy was made for {listing(missing)}, which the observation lacks; it has {found or 'none'}."
            )
            raise ConfigError(message)
        return {key: batch[key] for key in keys}

    def _state(self, state: Tensor, key: str, size: int) -> Float[Tensor, "B S"]:
        if state.ndim != 2 or state.shape[-1] != size:
            message = (
                f"The policy was made for '{key}' of {size} numbers, batched; found an array of shape "
                f"{tuple(state.shape)}. Use the environment or dataset that it was trained on, or train it anew."
            )
            raise ConfigError(message)
        return state.clamp(-self.state_limit, self.state_limit)


class ImageEncoder(nn.Module):
    """Key points of an image: convolutions, then where each channel looks.

    Source: spatial softmax, Levine et al., arXiv:1504.00702.
    """

    def __init__(self, channels_in: int, channels: tuple[int, ...], output_dim: int) -> None:
        """Build one stride-2 convolution for each of ``channels``."""
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((channels_in, *channels[:-1]), channels, strict=True):
            layers += [
                nn.Conv2d(before, after, 3, stride=2, padding=1),
                nn.GroupNorm(math.gcd(8, after), after),
                nn.SiLU(),
            ]
        self.convolutions = nn.Sequential(*layers, nn.Conv2d(channels[-1], channels[-1], 1))
        self.project = nn.Linear(2 * channels[-1], output_dim)

    def forward(self, image: Float[Tensor, "B C Y X"]) -> Float[Tensor, "B F"]:
        """Encode normalised images."""
        maps = self.convolutions(image)
        rows = torch.linspace(-1, 1, maps.shape[-2], device=maps.device, dtype=maps.dtype)
        columns = torch.linspace(-1, 1, maps.shape[-1], device=maps.device, dtype=maps.dtype)
        attention = maps.flatten(2).softmax(-1).view_as(maps)
        y = (attention.sum(-1) * rows).sum(-1)
        x = (attention.sum(-2) * columns).sum(-1)
        return self.project(torch.cat([y, x], dim=-1))


class VelocityNetwork(nn.Module):
    """v(x_t, t, observation, indicator): a plain network over everything at once."""

    def __init__(self, config: FlowConfig, observation_dim: int) -> None:
        """Build the layers for the config's chunk and ``observation_dim`` features."""
        super().__init__()
        assert config.action_feature is not None, "validate_features comes first"
        self.chunk_shape = (config.chunk_size, config.action_feature.shape[0])
        chunk_dim = math.prod(self.chunk_shape)
        frequencies = 2 ** torch.linspace(0, 3, config.time_dim // 2) * (math.pi / 2)
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.input = nn.Linear(chunk_dim + config.time_dim + observation_dim, config.hidden_dim)
        self.condition = nn.Linear(1, config.hidden_dim, bias=False)
        # One number among a hundred inputs would be learned last; at this size it matters from the first step.
        nn.init.normal_(self.condition.weight, std=0.5)
        widths = [config.hidden_dim] * (config.hidden_layers - 1)
        self.hidden = nn.ModuleList(nn.Linear(config.hidden_dim, width) for width in widths)
        self.output = nn.Linear(config.hidden_dim, chunk_dim)
        self.carry = nn.Linear(config.time_dim, chunk_dim)

    def forward(
        self,
        x: Float[Tensor, "B H D"],
        time: Float[Tensor, " B"],
        observation: Float[Tensor, "B O"],
        indicator: Float[Tensor, " B"],
    ) -> Float[Tensor, "B H D"]:
        """The velocity at ``x``; the chunk's own part passes beside the layers, which may be narrower than it."""
        angles = time[:, None] * self.frequencies
        clock = torch.cat([angles.sin(), angles.cos()], dim=-1)
        h = self.input(torch.cat([x.flatten(1), clock, observation], dim=-1)) + self.condition(indicator[:, None])
        for layer in self.hidden:
            h = layer(nn.functional.silu(h))
        h = nn.functional.silu(h)
        return self.output(h).view_as(x) + self.carry(clock).view_as(x) * x
