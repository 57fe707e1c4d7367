"""The actions still to be carried out, for environments that may be at different places of their chunks."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regrasp.core.errors import ConfigError


class ChunkQueue:
    """One chunk and one place in it for each environment.

    A new chunk never changes tensors in place, so that a queue may be filled under ``torch.inference_mode`` and used
    outside.
    """

    def __init__(self, steps: int) -> None:
        """Start empty; ``steps`` actions of each chunk are carried out."""
        self.steps = steps
        self._chunks: Float[Tensor, "B N D"] | None = None
        self._place: Int[Tensor, " B"] = torch.zeros(0, dtype=torch.long)

    def reset(self, rows: Bool[Tensor, " B"] | None = None) -> None:
        """Forget the chunks of ``rows``, or of every environment."""
        if rows is None or self._chunks is None:
            self._chunks = None
        else:
            self._place = torch.where(rows.to(self._place.device), self.steps, self._place)

    def empty(self, batch_size: int) -> Bool[Tensor, " B"]:
        """True for the environments that need a chunk.

        Raises:
            ConfigError: Where the number of environments changed without a reset.
        """
        if self._chunks is None:
            return torch.ones(batch_size, dtype=torch.bool)
        if len(self._place) != batch_size:
            message = (
                f"The policy holds chunks of {len(self._place)} environments and got observations of {batch_size}. "
                "Call reset() between rollouts."
            )
            raise ConfigError(message)
        return self._place >= self.steps

    def fill(self, rows: Bool[Tensor, " B"], chunks: Float[Tensor, "R H D"]) -> None:
        """Give ``rows``, R of them, new chunks."""
        chunks = chunks[:, : self.steps]
        if self._chunks is None:
            self._chunks, self._place = chunks, torch.zeros(len(chunks), dtype=torch.long)
            return
        at = rows.nonzero().squeeze(-1)
        self._chunks = self._chunks.index_copy(0, at.to(chunks.device), chunks)
        self._place = torch.where(rows, 0, self._place)

    def take(self) -> Float[Tensor, "B D"]:
        """The next action of every environment."""
        assert self._chunks is not None, "filled before"
        action = self._chunks[torch.arange(len(self._place)), self._place]
        self._place = self._place + 1
        return action
