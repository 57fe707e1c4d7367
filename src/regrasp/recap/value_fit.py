"""Stage 2a: train a value model on returns, and judge it on episodes it has not seen."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regrasp.core.errors import ConfigError
from regrasp.learn.trackers import check_tracker
from regrasp.recap.fit_folder import claimed
from regrasp.recap.selection import Selection, StageResult, next_command, open_datasets
from regrasp.recap.value_data import (
    NO_CAMERAS,
    FitEpisodes,
    choose_cameras,
    choose_vectors,
    described,
    find_episodes,
    open_states,
    read_targets,
)
from regrasp.recap.value_output import fit_settings, report_lines
from regrasp.report.progress import count_steps, track

if TYPE_CHECKING:
    from regrasp.learn.image_cache import Images
    from regrasp.learn.loop import TrainConfig, TrainResult
    from regrasp.learn.value_metrics import Predictions
    from regrasp.learn.value_objective import ValueFrames


@dataclass(frozen=True, kw_only=True)
class ValueFitConfig(Selection):
    """Train a value model on returns, judge it on held-out episodes, and keep the best."""

    returns: str
    """The tag of the returns."""
    output: Path
    """The folder of the value checkpoint: config.json, model.safetensors, pictures, and training/ for --resume."""
    model: str = "small"
    """Which value model; `small` trains on a CPU."""
    cameras: tuple[str, ...] = ()
    """The cameras that the model sees; all that any dataset has where it is left out, none for `none`."""
    state: bool = True
    """Whether the model sees the robot's state."""
    image_size: int = 64
    """The height and width that images are resized to; a multiple of 16."""
    steps: int = 2000
    """Optimizer steps."""
    batch_size: int = 64
    """Frames in a step."""
    learning_rate: float = 3e-4
    """The peak, after a warm-up of a twentieth of the steps; it then falls to 0 along a cosine."""
    weight_decay: float = 0.05
    """AdamW's."""
    ema_decay: float | None = 0.99
    """Judge and keep an exponential moving average of the weights with this decay; None for the weights themselves."""
    image_shift: int = 4
    """Training images are moved by up to this many pixels, so that the model does not learn them by heart."""
    holdout: float = 0.15
    """The share of episodes kept from training, by task and outcome."""
    checkpoint_every: int = 100
    """Steps between checkpoints, each with an evaluation on the held-out episodes."""
    seed: int = 0
    """Decides the held-out episodes, the first weights and the order of frames."""
    tracker: str = "tensorboard"
    """Where metrics go beside metrics.jsonl: a tracker that accelerate knows (wandb, mlflow, trackio, ...), or none."""
    image_cache_gib: float = 2.0
    """The greatest size of the images kept on disk; above it frames are thinned out, or read from the videos."""
    workers: int | None = None
    """Processes that decode; as many as there are cores, at most 8, where it is left out."""
    threads: int = 1
    """Threads that compute on a CPU. The small model gains little from more, and on a busy machine loses much."""
    device: Literal["auto", "cpu"] = "auto"
    """Train on the GPU where there is one, or on the CPU."""
    resume: bool = False
    """Go on from the last state in the output folder; start where there is none."""
    overwrite: bool = False
    """Replace what is in the output folder."""


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    found: FitEpisodes
    images: "Images"
    training: "ValueFrames"
    held_out: "ValueFrames"
    model: Any
    vectors: tuple[str, ...]
    strides: tuple[int | None, int]


def run(config: ValueFitConfig) -> StageResult:
    """Train, judge and publish a value checkpoint.

    Raises:
        ConfigError: A setting is out of range, the output folder holds something else, or there are too few episodes.
        MissingSidecar, SidecarError: The returns are missing, or do not fit the datasets or one another.
        VideoError, NonFiniteData: A dataset's frames or states cannot be used.
    """
    _check(config)
    datasets = open_datasets(config)
    found = find_episodes(datasets, config.returns, config.holdout, config.seed)
    cameras = choose_cameras(config.cameras, datasets)
    vectors = choose_vectors(datasets, wanted=config.state)
    _check_inputs(cameras, vectors)
    settings = fit_settings(config, found, cameras, vectors)
    claim = claimed(config.output, settings, what="value fit", resume=config.resume, overwrite=config.overwrite)
    with claim as training:
        from regrasp.learn.threads import torch_threads

        prepared = _prepare(config, found, cameras, vectors, training)
        with torch_threads(config.threads):
            result, predictions = _train(config, prepared, training)
        lines, written = _publish(config, prepared, result, predictions)
    following = next_command(
        "value predict",
        datasets,
        config,
        f"--checkpoint {shlex.quote(str(config.output))} --tag {shlex.quote(config.returns)}",
    )
    return StageResult(lines=[*lines, f"Wrote {config.output}", f"Next: {following}"], written=written)


def _check(config: ValueFitConfig) -> None:
    for name in ("steps", "batch_size", "checkpoint_every", "image_size", "threads"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is at least 1; found {getattr(config, name)}.")
    if not 0 < config.holdout < 1:
        raise ConfigError(f"--holdout lies between 0 and 1, both excluded; found {config.holdout}.")
    if not config.learning_rate > 0 or not config.image_cache_gib >= 0 or config.image_shift < 0:
        raise ConfigError("--learning-rate is above 0, --image-cache-gib and --image-shift are at least 0.")
    if config.cameras == NO_CAMERAS and not config.state:
        raise ConfigError("--cameras none with --no-state leaves the task text alone. Mend: leave one of them out.")
    if config.resume and config.overwrite:
        raise ConfigError("--resume goes on with what --overwrite would remove. Mend: give one of them.")
    check_tracker(config.tracker)


def _check_inputs(cameras: tuple[str, ...], vectors: tuple[str, ...]) -> None:
    """Refuse a model that would see the task text alone."""
    if not cameras and not vectors:
        raise ConfigError(
            "No dataset has a camera or a state for the value model to see, and the task text alone says nothing of a "
            "frame. Mend: name --cameras, or map a column to observation.state with `keys:` in the recipe."
        )


def _prepare(
    config: ValueFitConfig, found: FitEpisodes, cameras: tuple[str, ...], vectors: tuple[str, ...], folder: Path
) -> _Prepared:
    """Copy rows, decode images, read targets, and build the model with fresh weights."""
    import torch

    from regrasp.learn.episode_rows import FrameTable, state_statistics
    from regrasp.learn.image_cache import Images, plan_strides
    from regrasp.learn.value_objective import ValueFrames
    from regrasp.models.registry import build_value_model, config_to_json, value_model_config

    places = [folder / "rows" / str(place) for place in range(len(found.datasets))]
    rows = open_states(found.datasets, places, vectors)
    training, held_out = found.part(held_out=False), found.part(held_out=True)
    mean, deviation = state_statistics(rows, training)
    size = (config.image_size, config.image_size)
    model_config = value_model_config(
        config.model,
        cameras=cameras,
        image_size=size,
        state_mean=tuple(mean.tolist()),
        state_std=tuple(deviation.tolist()),
    )
    frame_bytes = len(cameras) * size[0] * size[1] * 3
    strides = plan_strides(
        [episode.length for episode in training],
        [episode.length for episode in held_out],
        frame_bytes,
        config.image_cache_gib * 2**30,
    )
    images = Images(found.datasets, rows, cameras, size, folder / "images")
    if cameras:
        _decode(images, held_out, strides.held_out, config, "Decoding held-out episodes")
        if strides.training is not None:
            _decode(images, training, strides.training, config, "Decoding training episodes")
        images.forget_others()
    tables = FrameTable(training, strides.training or 1), FrameTable(held_out, strides.held_out)
    targets = read_targets(found, strides.training or 1, strides.held_out)
    torch.manual_seed(config.seed)
    return _Prepared(
        found=found,
        images=images,
        training=ValueFrames(tables[0], targets[0], rows, images),
        held_out=ValueFrames(tables[1], targets[1], rows, images),
        model=build_value_model(config_to_json(model_config)),
        vectors=vectors,
        strides=(strides.training, strides.held_out),
    )


def _decode(images: "Images", episodes: list, stride: int, config: ValueFitConfig, description: str) -> None:
    from regrasp.learn.episode_pool import cores

    def shown(work: Iterable[object], total: int) -> Iterable[object]:
        return track(work, total=total, description=description, unit="episodes")

    images.fill(episodes, stride, cores(config.workers), shown)


def _train(config: ValueFitConfig, prepared: _Prepared, folder: Path) -> "tuple[TrainResult, Predictions]":
    import torch
    from safetensors.torch import load_file
    from torchdata.stateful_dataloader import StatefulDataLoader

    from regrasp.learn.episode_pool import cores
    from regrasp.learn.loop import train
    from regrasp.learn.sampler import MixtureSampler
    from regrasp.learn.value_objective import ValueObjective

    datasets = prepared.found.datasets
    sampler = MixtureSampler(
        prepared.training.table.dataset_sizes(len(datasets)),
        [dataset.weight for dataset in datasets],
        batch_size=config.batch_size,
        seed=config.seed,
    )
    readers = cores(config.workers) if prepared.strides[0] is None else 1
    batches = StatefulDataLoader(
        prepared.training,
        batch_sampler=sampler,
        collate_fn=_as_it_is,
        generator=torch.Generator().manual_seed(config.seed),
        num_workers=readers if readers > 1 else 0,
        multiprocessing_context="spawn" if readers > 1 else None,
    )
    held_out = described(prepared.held_out.table, prepared.held_out.targets)
    objective = ValueObjective(
        prepared.held_out, held_out, batch_size=max(config.batch_size, 256), shift=config.image_shift
    )
    result = train(
        prepared.model,
        objective,
        batches,
        _train_config(config),
        folder,
        resume=config.resume,
        cpu=config.device == "cpu",
        on_step=count_steps(config.steps),
    )
    prepared.model.load_state_dict(load_file(result.weights))
    return result, objective.predictions(prepared.model)


def _as_it_is(batch: Any) -> Any:  # noqa: ANN401 - a batch passes through as it was made
    return batch


def _train_config(config: ValueFitConfig) -> "TrainConfig":
    from regrasp.learn.loop import TrainConfig

    return TrainConfig(
        steps=config.steps,
        learning_rate=config.learning_rate,
        warmup_steps=config.steps // 20,
        weight_decay=config.weight_decay,
        ema_decay=config.ema_decay,
        checkpoint_every=config.checkpoint_every,
        log_every=int(np.gcd(config.checkpoint_every, 20)),
        seed=config.seed,
        tracker=config.tracker,
    )


def _publish(
    config: ValueFitConfig, prepared: _Prepared, result: "TrainResult", predictions: "Predictions"
) -> tuple[list[str], list[Path]]:
    """Compare with the baselines, and write the checkpoint and its pictures."""
    from regrasp.learn.value_baselines import constant_baseline, elapsed_time_baseline
    from regrasp.learn.value_metrics import evaluate, judge
    from regrasp.recap.value_output import draw_pictures, save

    held_out = described(prepared.held_out.table, prepared.held_out.targets)
    training = described(prepared.training.table, prepared.training.targets)
    metrics = evaluate(predictions, held_out)
    baselines = {
        "constant": evaluate(constant_baseline(training).predict(held_out), held_out),
        "elapsed-time": evaluate(elapsed_time_baseline(training).predict(held_out), held_out),
    }
    verdict = judge(metrics, baselines)
    written = save(
        config,
        prepared.found,
        prepared.model,
        result,
        vectors=prepared.vectors,
        strides=prepared.strides,
        metrics=metrics,
        baselines=baselines,
        verdict=verdict,
    )
    written += draw_pictures(config.output, prepared.found, held_out, predictions)
    lines = report_lines(
        prepared.found, prepared.images, prepared.vectors, prepared.strides, result, metrics, baselines, verdict
    )
    return lines, written
