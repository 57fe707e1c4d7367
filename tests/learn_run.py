"""A training run small enough to be killed often; ``python -m tests.learn_run FOLDER`` starts or resumes it."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader

from regrasp.learn.loop import TrainConfig, TrainResult, train
from regrasp.learn.sampler import MixtureSampler

STEPS = 30
CONFIG = TrainConfig(
    steps=STEPS,
    learning_rate=0.02,
    warmup_steps=3,
    weight_decay=0.1,
    ema_decay=0.8,
    gradient_accumulation=2,
    checkpoint_every=5,
    log_every=1,
    seed=3,
)


@dataclass
class Batch:
    x: Tensor
    y: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.x.to(device), self.y.to(device))


class Rows(torch.utils.data.Dataset):
    """A noisy line in 4 dimensions."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, 4, generator=generator)
        self.y = self.x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.1 * torch.randn(count, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, items: list[int]) -> Batch:
        return Batch(self.x[items], self.y[items])


class Line:
    """Squared error; ``pause_s`` makes a step slow enough to be killed in."""

    judged_by = "error"

    def __init__(self, pause_s: float = 0.0) -> None:
        self.held_out, self.pause_s = Rows(17), pause_s

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        time.sleep(self.pause_s)
        error = (model(batch.x)[:, 0] - batch.y).square().mean()
        return error, {"draw": torch.rand(())}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        torch.rand(3)  # an evaluation may draw numbers without moving the training's
        with torch.no_grad():
            return {"error": float((model(self.held_out.x)[:, 0] - self.held_out.y).square().mean())}


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def batches(workers: int = 0) -> StatefulDataLoader:
    rows = Rows(40)
    return StatefulDataLoader(
        rows,
        batch_sampler=MixtureSampler([30, 10], [1.0, 2.0], batch_size=8, seed=5),
        collate_fn=same,
        generator=torch.Generator().manual_seed(0),
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )


def same(batch: Batch) -> Batch:
    return batch


def run(folder: Path, *, config: TrainConfig = CONFIG, resume: bool = False, pause_s: float = 0.0) -> TrainResult:
    torch.set_num_threads(1)
    np.random.seed(0)
    return train(network(), Line(pause_s), batches(), config, folder, resume=resume, cpu=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), resume=True, pause_s=0.05)
