"""What the policy and the environments gave for one chunk of actions."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from regrasp.collect.tree import on_cpu


@dataclass(kw_only=True, eq=False)
class ChunkStepResult:
    """One step of B environments, without observations. C is the number of actions in the chunk, D the size of one.

    Any field may be None: the first step of an epoch has no reward yet, and the row that closes an epoch has no
    action. Tensors, at any depth, are made CPU, contiguous and free of gradient history; the caller's dicts stay as
    they are.

    Attributes:
        actions: [B, C·D] or [B, C, D].
        prev_logprobs: [B, …]; log-probability of the actions under the policy that took them.
        prev_values: [B, 1]; that policy's value of the observation.
        dones: bool [B] or [B, C].
        truncations: bool [B] or [B, C].
        terminations: bool [B] or [B, C].
        rewards: [B] or [B, C].
        forward_inputs: what the policy needs to compute the same step again; tensors [B, …], nesting allowed.
            None becomes an empty dict.
        versions: [B, …]; the version of the weights that chose the actions.
    """

    actions: torch.Tensor | None = None
    prev_logprobs: torch.Tensor | None = None
    prev_values: torch.Tensor | None = None
    dones: torch.Tensor | None = None
    truncations: torch.Tensor | None = None
    terminations: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    forward_inputs: dict[str, Any] | None = None
    versions: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Bring the tensors to the CPU."""
        for field in fields(self):
            setattr(self, field.name, on_cpu(getattr(self, field.name)))
        self.forward_inputs = self.forward_inputs or {}
