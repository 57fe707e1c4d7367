"""Stage 2b: a value for every frame, from a value checkpoint."""

import contextlib
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

import numpy as np

from regrasp.core.errors import CheckpointError, ConfigError, listing
from regrasp.core.provenance import Provenance, digest, today
from regrasp.core.scale import ScaleSet
from regrasp.data.dataset import Dataset
from regrasp.data.sidecar import SidecarWriter, all_exist_same, open_sidecar, sidecar_path
from regrasp.data.storage import Transaction
from regrasp.learn.value_checkpoint import ValueCheckpoint, check_tasks, load_value_checkpoint
from regrasp.recap.fit_folder import exclusive
from regrasp.recap.returns import episode_batches
from regrasp.recap.selection import Selection, StageResult, next_command, open_datasets, tell
from regrasp.report.progress import track

if TYPE_CHECKING:
    from regrasp.learn.value_predictor import EpisodeJob

_ROWS = 1 << 19


@dataclass(frozen=True, kw_only=True)
class ValuePredictConfig(Selection):
    """Predict a value for every frame, in [-1, 0] on the scale of the returns that the model learnt."""

    checkpoint: Path
    """The folder that `regrasp value fit` wrote."""
    tag: str
    """The name of this set of values: meta/values_TAG.parquet."""
    returns: str | None = None
    """Check that the returns of this tag have the scale that the model learnt."""
    batch_size: int = 64
    """Frames that go through the model at once."""
    workers: int | None = None
    """Processes, each with one decoder and one thread; as many as there are cores, at most 2, where it is left out."""
    device: Literal["auto", "cpu"] = "auto"
    """Predict on the GPU where there is one, or on the CPU."""
    work_dir: Path | None = None
    """Where finished episodes are kept until all are there; in the checkpoint's folder where it is left out."""
    overwrite: bool = False
    """Replace values of this tag that were made otherwise."""


def run(config: ValuePredictConfig) -> StageResult:
    """Write ``values_{tag}.parquet`` for every dataset of the run, all of them together.

    A run that was stopped goes on with the episodes that it lacks.

    Raises:
        CheckpointError: The checkpoint is not whole, or is for other tasks, states or returns.
        VideoError, NonFiniteData: A dataset's frames or states cannot be used.
        SidecarError: The tag exists with another content.
    """
    if config.batch_size < 1 or (config.workers is not None and config.workers < 1):
        raise ConfigError("--batch-size and --workers are at least 1.")
    checkpoint = load_value_checkpoint(config.checkpoint)
    datasets = open_datasets(config)
    _check(config, checkpoint, datasets)
    if checkpoint.warning:
        tell(checkpoint.warning)
    provenances = [_provenance(config, checkpoint, dataset) for dataset in datasets]
    paths = [sidecar_path(dataset, "values", config.tag) for dataset in datasets]
    if all_exist_same(zip(paths, provenances, strict=True), overwrite=config.overwrite):
        return StageResult(lines=[f"Already there, and the same: {listing(map(str, paths))}"], written=[])
    work = _work_folder(config, checkpoint, datasets)
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"'{work}' cannot be made ({error.strerror}). Mend: give --work-dir DIR.") from error
    with exclusive(work, f"Another process is predicting into '{work}'. Mend: wait for it, or give another --tag."):
        _predict(config, checkpoint, datasets, work)
        lines = _write(config, datasets, provenances, paths, work)
        shutil.rmtree(work)
    if config.work_dir is None:
        with contextlib.suppress(OSError):  # another tag's work is still in it
            work.parent.rmdir()
    returns = config.returns or checkpoint.record["datasets"][0]["returns"]["tag"]
    names = {"returns": returns, "values": config.tag, "tag": f"{config.tag}_N50_q30"}
    flags = " ".join(f"--{name} {shlex.quote(value)}" for name, value in names.items())
    following = next_command("advantages", datasets, config, flags)
    warning = ["Warning: this value model did not beat its baselines; see above."] if checkpoint.warning else []
    wrote = [f"Wrote {listing(map(str, paths))}", f"Next: {following}"]
    return StageResult(lines=[*lines, *warning, *wrote], written=paths)


def _check(config: ValuePredictConfig, checkpoint: ValueCheckpoint, datasets: list[Dataset]) -> None:
    tasks = sorted({task for dataset in datasets for task in dataset.index().task})
    check_tasks(checkpoint, tasks)
    for dataset in datasets:
        lacking = [name for name in checkpoint.vectors if not dataset.vector_columns([name])]
        if lacking:
            raise CheckpointError(
                f"The value model in '{checkpoint.folder}' sees a state of {checkpoint.state_dim} numbers, but "
                f"'{dataset.path}' has no {listing(lacking)}. Mend: map its column with `keys:` in the recipe."
            )
        missing = [camera for camera in checkpoint.cameras if camera not in dataset.cameras]
        if missing and len(missing) == len(checkpoint.cameras):
            raise CheckpointError(
                f"The value model in '{checkpoint.folder}' sees the cameras {listing(map(repr, missing))}, and "
                f"'{dataset.path}' has none of them; it has: {listing(dataset.cameras) or 'none'}. Mend: map its own "
                "cameras with `keys:` in the recipe, or fit a model with --cameras none."
            )
        if missing:
            tell(f"{dataset.name} has no camera {listing(map(repr, missing))}; the model sees it as missing there")
    if config.returns is not None:
        _check_returns(config.returns, checkpoint, datasets)


def _check_returns(tag: str, checkpoint: ValueCheckpoint, datasets: list[Dataset]) -> None:
    for dataset in datasets:
        sidecar = open_sidecar(dataset, "returns", tag, reader="value predict")
        if sidecar.provenance is None or sidecar.provenance.scale is None:
            tell(f"'{sidecar.path}' does not say its scale, so it is not compared with the model's")
            continue
        difference = checkpoint.scale.differs_from(
            ScaleSet.from_json(sidecar.provenance.scale), sorted(set(dataset.index().task))
        )
        if difference:
            raise CheckpointError(
                f"The value model in '{checkpoint.folder}' learnt returns on another scale than those tagged {tag!r} "
                f"of '{dataset.path}' ({difference}). Mend: fit the model on these returns."
            )


def _provenance(config: ValuePredictConfig, checkpoint: ValueCheckpoint, dataset: Dataset) -> Provenance:
    learnt = {entry["name"]: entry["returns"]["id"] for entry in checkpoint.record["datasets"]}
    held_out = {entry["name"]: entry["held_out_episodes"] for entry in checkpoint.record["datasets"]}
    return Provenance(
        stage="value predict",
        config={"source": dataset.source.value, "checkpoint": checkpoint.sha256, "keys": dataset.keys},
        fingerprint=dataset.index().fingerprint,
        inputs={"checkpoint": checkpoint.sha256},
        scale=checkpoint.scale.to_json(),
        notes={
            "excluded": [],
            "held_out_episodes": held_out.get(dataset.name, []),
            "warning": checkpoint.warning,
            "gamma": checkpoint.record.get("gamma"),
            "returns_id": learnt.get(dataset.name),
        },
        created=today(),
    )


def _work_folder(config: ValuePredictConfig, checkpoint: ValueCheckpoint, datasets: list[Dataset]) -> Path:
    """Where finished episodes wait; its name depends on whatever their values do."""
    parts = [[dataset.name, dataset.index().fingerprint, dataset.keys] for dataset in datasets]
    key = digest([checkpoint.sha256, config.tag, config.batch_size, parts])[:12]
    return (config.work_dir or config.checkpoint / "predict") / f"{quote(config.tag, safe='')}-{key}"


def _episode_path(work: Path, dataset: Dataset, episode_index: int) -> Path:
    return work / quote(dataset.name, safe="") / f"episode_{episode_index:06d}.f32"


def _predict(config: ValuePredictConfig, checkpoint: ValueCheckpoint, datasets: list[Dataset], work: Path) -> None:
    """Predict the episodes that are not in the work folder yet."""
    import torch

    from regrasp.learn.episode_pool import cores, in_processes
    from regrasp.learn.value_predictor import ValuePredictor

    predictor = ValuePredictor(
        checkpoint=checkpoint,
        datasets=datasets,
        batch_size=config.batch_size,
        device="cuda" if config.device == "auto" and torch.cuda.is_available() else "cpu",
    )
    total = sum(len(dataset.index().length) for dataset in datasets)
    jobs = _jobs(checkpoint, datasets, work)
    workers = min(cores(config.workers, most=2), total)
    for _ in track(in_processes(predictor, jobs, workers), total=total, description="Predicting", unit="episodes"):
        pass


def _jobs(checkpoint: ValueCheckpoint, datasets: list[Dataset], work: Path) -> "Iterator[EpisodeJob]":
    """Yield the episodes that have no values yet; each dataset's tables are read once."""
    from regrasp.learn.episode_rows import episode_vectors
    from regrasp.learn.value_predictor import EpisodeJob, read_values

    for number, dataset in enumerate(datasets):
        index = dataset.index()
        columns = dataset.vector_columns(checkpoint.vectors)
        stream = dataset.stream(["timestamp", *columns])
        for position, length in enumerate(index.length.tolist()):
            block = stream.take(length)
            states = episode_vectors(dataset, columns, position, block)
            if states.shape[1] != checkpoint.state_dim:
                raise CheckpointError(
                    f"The value model in '{checkpoint.folder}' sees a state of {checkpoint.state_dim} numbers, but "
                    f"{listing(map(repr, columns))} of '{dataset.path}' has {states.shape[1]}. Mend: map the right "
                    "column with `keys:` in the recipe, or fit a model on this dataset."
                )
            path = _episode_path(work, dataset, int(index.episode_index[position]))
            if read_values(path, length) is None:
                yield EpisodeJob(
                    dataset=number,
                    episode_index=int(index.episode_index[position]),
                    task=index.task[position],
                    timestamps=block["timestamp"].astype(np.float64),
                    states=states,
                    path=path,
                )


def _write(
    config: ValuePredictConfig, datasets: list[Dataset], provenances: list[Provenance], paths: list[Path], work: Path
) -> list[str]:
    """Write every dataset's sidecar in order, and publish them together."""
    lines = []
    with Transaction() as transaction:
        for dataset, provenance, path in zip(datasets, provenances, paths, strict=True):
            writer = SidecarWriter(transaction, path, "values")
            statistics = _write_values(writer, dataset, work)
            writer.close(replace(provenance, statistics={"value": statistics}))
            spread = f"V {statistics['min']:.3f} to {statistics['max']:.3f}, mean {statistics['mean']:.3f}"
            lines.append(f"{dataset.name}: {dataset.index().total} frames, {spread}")
        transaction.commit(lambda: all_exist_same(zip(paths, provenances, strict=True), overwrite=config.overwrite))
    return lines


def _write_values(writer: SidecarWriter, dataset: Dataset, work: Path) -> dict[str, float]:
    """Write a dataset's rows, and return mean, population standard deviation, min and max of its values."""
    from regrasp.learn.value_predictor import read_values

    index = dataset.index()
    total = squares = 0.0
    least, most = np.inf, -np.inf
    for batch in episode_batches(index.length, _ROWS):
        positions = np.arange(len(index.length))[batch]
        parts = []
        for position in positions.tolist():
            path = _episode_path(work, dataset, int(index.episode_index[position]))
            parts.append(read_values(path, int(index.length[position])))
        values = np.concatenate([part for part in parts if part is not None])
        episode, frame = index.keys(positions)
        assert len(values) == len(episode), "every episode was predicted"
        writer.write({"episode_index": episode, "frame_index": frame, "value": values})
        wide = values.astype(np.float64)
        total, squares = total + wide.sum(), squares + (wide**2).sum()
        least, most = min(least, wide.min()), max(most, wide.max())
    mean = total / index.total
    deviation = np.sqrt(max(squares / index.total - mean**2, 0.0))
    return {"mean": float(mean), "std": float(deviation), "min": float(least), "max": float(most)}
