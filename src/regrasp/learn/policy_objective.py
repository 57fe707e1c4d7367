"""The policy objective: the policy's own loss on the mixture, and on held-out frames by label."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regrasp.learn.policy_data import PolicyBatch, PolicyFrames

Preprocessor = Callable[[dict[str, Any]], dict[str, Any]]
"""A LeRobot preprocessor."""


class PolicyObjective:
    """Trains a LeRobot policy whose ``forward`` gives a loss per sample; an ``Objective``."""

    judged_by = "loss"

    def __init__(
        self,
        preprocess: Preprocessor,
        frames: PolicyFrames,
        groups: Mapping[str, Bool[np.ndarray, " n"]],
        *,
        batch_size: int,
        seed: int,
    ) -> None:
        """Judge on held-out frames.

        Args:
            preprocess: The policy's preprocessor, the one that is saved with it.
            frames: The held-out frames; none leaves every metric undefined.
            groups: Parts of them whose loss is told apart, such as positive, negative and demo.
            batch_size: Of an evaluation.
            seed: Of the noise and times that every evaluation uses.
        """
        self.preprocess, self.frames, self.groups = preprocess, frames, groups
        self.batch_size, self.seed = batch_size, seed

    def loss(self, model: Any, batch: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ANN401 - a policy
        """Return the batch's weighted mean loss."""
        each, _ = model(self.preprocess(batch.inputs), reduction="none")
        return (each.float() * batch.weight).mean(), {}

    def evaluate(self, model: Any) -> dict[str, float]:  # noqa: ANN401 - a policy
        """Return the mean held-out loss, unweighted, over all frames and over each group; NaN where there is none."""
        losses = self.losses(model)
        named = {"loss": losses} | {f"loss_{name}": losses[chosen] for name, chosen in self.groups.items()}
        return {name: float(values.mean()) if len(values) else float("nan") for name, values in named.items()}

    @torch.no_grad()
    def losses(self, model: Any) -> Float[np.ndarray, " n"]:  # noqa: ANN401 - a policy
        """Return the loss of every held-out frame under its own label, always with the same noise and times."""
        model.eval()
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(self.seed)
        parts = [np.empty(0)]
        for start in range(0, len(self.frames), self.batch_size):
            items = list(range(start, min(start + self.batch_size, len(self.frames))))
            batch = self.frames.__getitems__(items).to(device)
            each, _ = model(self.preprocess(batch.inputs), reduction="none", generator=generator)
            parts.append(each.double().cpu().numpy())
        return np.concatenate(parts)
