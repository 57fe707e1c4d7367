"""Which frames a training step sees."""

from collections.abc import Sequence

import numpy as np
from torch.utils.data import Sampler


class MixtureSampler(Sampler[list[int]]):
    """Batches from a mixture of datasets, endless, and known by their number alone.

    A frame's dataset is drawn with probability proportional to weight * frames, then a frame of it uniformly, with
    replacement: at equal weights every frame of the run is equally likely. Batch n is drawn by a generator of its own,
    seeded by (seed, n), so a run that goes on at batch n needs nothing but n. Under several processes each takes its
    part of the same global batch.
    """

    def __init__(
        self,
        frames: Sequence[int],
        weights: Sequence[float],
        *,
        batch_size: int,
        seed: int,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        """Draw from datasets of so many frames, whose items are numbered one after the other."""
        share = np.asarray(frames, dtype=np.float64) * np.asarray(weights, dtype=np.float64)
        if not (np.isfinite(share).all() and (share >= 0).all() and share.sum() > 0):
            raise ValueError(f"A mixture needs weights of at least 0, one of them positive; {list(weights)}.")
        if batch_size % processes:
            raise ValueError(f"A batch of {batch_size} cannot be divided among {processes} processes.")
        self.frames = np.asarray(frames, dtype=np.int64)
        self.probabilities = share / share.sum()
        self.batch_size, self.seed = batch_size, seed
        self.process, self.processes = process, processes
        self.next_batch = 0

    def __iter__(self) -> "MixtureSampler":
        """Go on from the batch that is due."""
        return self

    def __next__(self) -> list[int]:
        """Return this process's items of the next batch."""
        generator = np.random.default_rng([self.seed, self.next_batch])
        self.next_batch += 1
        dataset = generator.choice(len(self.frames), size=self.batch_size, p=self.probabilities)
        row = np.floor(generator.random(self.batch_size) * self.frames[dataset]).astype(np.int64)
        items = (np.cumsum(self.frames) - self.frames)[dataset] + row
        return items[self.process :: self.processes].tolist()

    def state_dict(self) -> dict[str, int]:
        """Return the position: the number of the next batch."""
        return {"next_batch": self.next_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self.next_batch = state["next_batch"]
