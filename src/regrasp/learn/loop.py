"""The one training loop: whatever is trained, an objective says what is minimised and how it is judged.

accelerate places the model, the processes and the precision; torchdata keeps the data's position. At every
checkpoint the model is judged on held-out data and its whole state is kept, so that a run killed at any step and
resumed gives the losses and the weights of a run that was not.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader

from regrasp.core.errors import ConfigError
from regrasp.learn.trackers import NONE, check_tracker, start_trackers
from regrasp.learn.training_state import Position, StateStore

_APART = 1_000_003  # between the seeds of processes, which must not draw the same noise for their parts of a batch


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; nothing about what."""

    steps: int
    """Optimizer steps."""
    learning_rate: float
    """The peak; it rises linearly over the warm-up and falls to 0 along a cosine."""
    warmup_steps: int = 0
    """Steps of the warm-up."""
    weight_decay: float = 0.0
    """AdamW's, on matrices and kernels; not on biases, norms and embeddings."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    clip_norm: float = 1.0
    """The greatest norm of a step's gradient."""
    ema_decay: float | None = None
    """Judge and keep an exponential moving average of the weights with this decay per step; None for the weights."""
    gradient_accumulation: int = 1
    """Batches in a step."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """The autocast; losses are computed in float32 in any case."""
    checkpoint_every: int = 500
    """Steps between checkpoints, each with an evaluation; also after the last step."""
    log_every: int = 20
    """Steps that one line of metrics.jsonl averages; divides ``checkpoint_every``."""
    seed: int = 0
    """For everything random."""
    tracker: str = NONE
    """Where metrics go beside metrics.jsonl: a tracker of accelerate's, such as tensorboard, wandb or mlflow."""

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        for name in ("steps", "checkpoint_every", "log_every", "gradient_accumulation"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 1; found {getattr(self, name)}.")
        if self.checkpoint_every % self.log_every:
            raise ConfigError(f"log_every ({self.log_every}) must divide checkpoint_every ({self.checkpoint_every}).")
        if not self.learning_rate > 0 or self.warmup_steps < 0 or not self.clip_norm > 0:
            raise ConfigError("learning_rate and clip_norm are above 0, and warmup_steps at least 0.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"ema_decay lies between 0 and 1; found {self.ema_decay}.")


@runtime_checkable
class Objective(Protocol):
    """What is trained for."""

    judged_by: str
    """The evaluation's entry by which checkpoints are compared; lower is better."""

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ANN401 - any model and batch
        """Return the batch's mean loss, float32, and further numbers for the log."""
        ...

    def evaluate(self, model: Any) -> dict[str, float]:  # noqa: ANN401 - any model
        """Return held-out metrics of a model in evaluation mode; called without gradients."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What training gave.

    Attributes:
        best_step: The checkpoint that did best on held-out data.
        best_metrics: Its evaluation.
        weights: Its weights, as judged, in safetensors.
        resumed_from: The step that was gone on from, or None.
    """

    best_step: int
    best_metrics: dict[str, float]
    weights: Path
    resumed_from: int | None


def train(
    model: nn.Module,
    objective: Objective,
    batches: StatefulDataLoader,
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    cpu: bool = False,
    on_step: Callable[[int], None] = lambda _: None,
) -> TrainResult:
    """Train a model, and keep the checkpoint that does best on held-out data.

    Args:
        model: What is trained, in place.
        objective: The loss and the evaluation.
        batches: Endless batches; its position is saved and restored. Give it a ``generator`` of its own.
        config: How to train.
        folder: Where states and ``metrics.jsonl`` go.
        resume: Go on from the last state in ``folder``, if there is one.
        cpu: Stay on the CPU where there is a GPU.
        on_step: Called after each step with its number, from 1; first with the step resumed from, if any.

    Raises:
        ConfigError: The loss is no longer finite.
        CheckpointError: The state in ``folder`` cannot be restored exactly.
    """
    run = _Run(model, objective, batches, config, folder, cpu)
    return run.go(resume, on_step)


def cosine_with_warmup(step: int, warmup: int, total: int) -> float:
    """Return the factor of the learning rate in a step, counted from 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(total - warmup, 1)
    return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters in two groups: those that decay, and biases, norms and embeddings, which do not."""
    embeddings = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for p in module.parameters()
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    decaying = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    chosen = {id(p) for p in decaying}
    fixed = [p for p in trained if id(p) not in chosen]
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": fixed, "weight_decay": 0.0}]


class _Run:
    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        batches: StatefulDataLoader,
        config: TrainConfig,
        folder: Path,
        cpu: bool,
    ) -> None:
        self.accelerator = Accelerator(
            mixed_precision=config.mixed_precision,
            gradient_accumulation_steps=config.gradient_accumulation,
            cpu=cpu,
            log_with=check_tracker(config.tracker) or None,
            project_config=ProjectConfiguration(str(folder), logging_dir=str(folder / "trackers")),
        )
        start_trackers(self.accelerator, config, folder)
        torch.manual_seed(config.seed + _APART * self.accelerator.process_index)
        optimizer = torch.optim.AdamW(
            parameter_groups(model, config.weight_decay), lr=config.learning_rate, betas=config.betas
        )
        self.schedule = LambdaLR(optimizer, lambda step: cosine_with_warmup(step, config.warmup_steps, config.steps))
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.average = None
        if config.ema_decay is not None:
            self.average = AveragedModel(
                self.accelerator.unwrap_model(self.model), multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay)
            )
        self.objective, self.batches, self.config, self.folder = objective, batches, config, folder
        self.store = StateStore(folder)
        self.position = Position()
        self.window: list[dict[str, Tensor]] = []

    def go(self, resume: bool, on_step: Callable[[int], None]) -> TrainResult:
        resumed_from = self._restore() if resume else None
        if self.accelerator.is_main_process:
            self.store.start(self.position.step)
        self.accelerator.wait_for_everyone()
        if resumed_from is not None:
            on_step(resumed_from)
        batches = iter(self.batches)
        while self.position.step < self.config.steps:
            self.position.step += 1
            self._step(batches)
            last = self.position.step == self.config.steps
            if self.position.step % self.config.log_every == 0 or last:
                self._log()
            if self.position.step % self.config.checkpoint_every == 0 or last:
                self._checkpoint()
            on_step(self.position.step)
        self.accelerator.end_training()
        return TrainResult(
            best_step=self.position.best_step,
            best_metrics=self.position.best_metrics,
            weights=self.store.weights(self.position.best_step),
            resumed_from=resumed_from,
        )

    def _step(self, batches: Any) -> None:  # noqa: ANN401 - an iterator over any batches
        self.model.train()
        parts: list[dict[str, Tensor]] = []
        for _ in range(self.config.gradient_accumulation):
            batch = next(batches).to(self.accelerator.device)
            with self.accelerator.accumulate(self.model):
                with self.accelerator.autocast():
                    loss, extra = self.objective.loss(self.model, batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
                    extra = extra | {"gradient_norm": torch.as_tensor(norm)}
                self.optimizer.step()
                self.optimizer.zero_grad()
            parts.append({"loss": loss.detach()} | {name: value.detach() for name, value in extra.items()})
        self.schedule.step()
        if self.average is not None:
            self.average.update_parameters(self.accelerator.unwrap_model(self.model))
        self.window += parts

    def _log(self) -> None:
        names = sorted({name for part in self.window for name in part})
        means = {name: torch.stack([p[name].float() for p in self.window if name in p]).mean() for name in names}
        means = self.accelerator.reduce(means, reduction="mean")
        line: dict[str, float] = {name: value.item() for name, value in means.items()}
        self.window = []
        if not math.isfinite(line["loss"]):
            raise ConfigError(
                f"The loss is {line['loss']} at step {self.position.step}, so nothing more can be learnt. Mend: lower "
                f"--learning-rate (now {self.config.learning_rate:g}), and go on from the last state with --resume."
            )
        line["learning_rate"] = float(self.schedule.get_last_lr()[0])
        self._write(line)

    def _checkpoint(self) -> None:
        judged = self.average.module if self.average is not None else self.accelerator.unwrap_model(self.model)
        if self.accelerator.is_main_process:
            judged.eval()
            with torch.no_grad(), torch.random.fork_rng():
                metrics = self.objective.evaluate(judged)
            self.position.judge(metrics, self.objective.judged_by)
            self._write({f"held_out/{name}": value for name, value in metrics.items()})
        extra: dict[str, Any] = {"batches": self.batches.state_dict(), "schedule": self.schedule.state_dict()}
        if self.average is not None:
            extra["average"] = self.average.state_dict()
        self.store.save(self.accelerator, self.position, extra, judged if self.average is not None else None)

    def _restore(self) -> int | None:
        found = self.store.restore(self.accelerator)
        if found is None:
            return None
        self.position, extra = found
        self.batches.load_state_dict(extra["batches"])
        self.schedule.load_state_dict(extra["schedule"])
        if self.average is not None:
            self.average.load_state_dict(extra["average"])
        return self.position.step

    def _write(self, values: dict[str, float]) -> None:
        if not self.accelerator.is_main_process:
            return
        line = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.position.step, **line}) + "\n")
        self.accelerator.log(dict(values), step=self.position.step)
