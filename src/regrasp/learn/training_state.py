"""The state of a training run on disk: whole or absent, the last one and the best one kept."""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

from regrasp.core.errors import CheckpointError
from regrasp.data.storage import write_bytes_atomic

METRICS = "metrics.jsonl"
_STATES = "states"
_EXTRA = "extra.pt"
_WEIGHTS = "model.safetensors"
_AVERAGE = "average.safetensors"


@dataclass
class Position:
    """How far a run is, and which checkpoint did best.

    Attributes:
        step: Steps done.
        best_step: The best checkpoint's step; 0 before the first.
        best_metrics: Its evaluation.
    """

    step: int = 0
    best_step: int = 0
    best_metrics: dict[str, float] = field(default_factory=dict)

    def judge(self, metrics: dict[str, float], by: str) -> None:
        """Keep this step as the best if its metric is lower than the best so far, or the first."""
        if not self.best_metrics or metrics[by] < self.best_metrics[by]:
            self.best_step, self.best_metrics = self.step, metrics


class StateStore:
    """States as folders ``states/step_00000100``, each written under another name, synced, and renamed."""

    def __init__(self, folder: Path) -> None:
        """Keep states under ``folder``."""
        self.folder = folder
        self.states = folder / _STATES

    def steps(self) -> list[int]:
        """Return the steps that have a whole state, ascending."""
        return sorted(int(path.name.removeprefix("step_")) for path in self.states.glob("step_*"))

    def weights(self, step: int) -> Path:
        """Return the weights of a step as they were judged: the moving average's where the run has one."""
        average = self._at(step) / _AVERAGE
        return average if average.is_file() else self._at(step) / _WEIGHTS

    def start(self, step: int) -> None:
        """Remove what lies after ``step``: unfinished and later states, and later lines of the metrics."""
        self.states.mkdir(parents=True, exist_ok=True)
        for path in self.states.glob(".step_*"):
            shutil.rmtree(path)
        for later in [found for found in self.steps() if found > step]:
            shutil.rmtree(self._at(later))
        metrics = self.folder / METRICS
        if metrics.is_file():
            lines = metrics.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
            write_bytes_atomic(metrics, b"".join(kept))

    def save(
        self, accelerator: Accelerator, position: Position, extra: dict[str, Any], average: nn.Module | None
    ) -> None:
        """Keep the run's state, and remove every state but this one and the best. All processes call it.

        Args:
            accelerator: Has the model, the optimizer and the generators.
            position: How far the run is.
            extra: State dicts of tensors and plain values.
            average: The moving average, where it is what is judged.
        """
        temporary = self.states / f".step_{position.step:08d}"
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary))
        if accelerator.is_main_process:
            torch.save({**extra, "position": asdict(position), "generator": torch.get_rng_state()}, temporary / _EXTRA)
            if average is not None:
                save_file({name: t.contiguous() for name, t in average.state_dict().items()}, temporary / _AVERAGE)
            _sync(temporary)
            final = self._at(position.step)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            _sync_folder(self.states)
            for step in self.steps():
                if step not in (position.step, position.best_step):
                    shutil.rmtree(self._at(step))
        accelerator.wait_for_everyone()

    def restore(self, accelerator: Accelerator) -> tuple[Position, dict[str, Any]] | None:
        """Put back the last state, into what the accelerator holds; None if there is none.

        Raises:
            CheckpointError: It cannot be read, or the generators were not restored.
        """
        if not self.steps():
            return None
        last = self._at(self.steps()[-1])
        try:
            extra = torch.load(last / _EXTRA, weights_only=True)
            accelerator.load_state(str(last))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"The training state in '{last}' cannot be read ({str(error).splitlines()[0]}). Mend: remove that "
                "folder to go on from the state before it, or train anew without --resume."
            ) from error
        if accelerator.is_main_process and not torch.equal(torch.get_rng_state(), extra["generator"]):
            raise CheckpointError(
                f"The random generators in '{last}' could not be restored, so the run would not go on exactly. Mend: "
                "resume with the versions of torch and accelerate that wrote it, or train anew without --resume."
            )
        return Position(**extra["position"]), extra

    def _at(self, step: int) -> Path:
        return self.states / f"step_{step:08d}"


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
