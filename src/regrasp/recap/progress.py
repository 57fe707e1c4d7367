"""Values or a judge's scores in the schema of LeRobot's RA-BC, so that stock weighted training takes them.

LeRobot (``rewards/sarm/rabc.py``) reads ``index, episode_index, frame_index, progress_sparse`` and weights a frame by
how much progress the next chunk makes. Of values progress is V + 1: 0 at the worst return of the scale, 1 at the best.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from regrasp.core.errors import ConfigError, listing
from regrasp.core.provenance import Provenance, today
from regrasp.data.dataset import Dataset
from regrasp.data.sidecar import SidecarWriter, all_exist_same, open_sidecar, sidecar_path
from regrasp.data.storage import Transaction
from regrasp.recap.frames import kept_positions
from regrasp.recap.judge_progress import judged_progress, parse_scores
from regrasp.recap.returns import episode_batches
from regrasp.recap.selection import Selection, StageResult, open_datasets

_ROWS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class ProgressConfig(Selection):
    """Write values or a judge's scores as progress, for LeRobot's weighted training (RA-BC)."""

    values: str | None = None
    """The tag of the values."""
    scores: tuple[str, ...] = ()
    """A judge's scores in place of values: terminal:TAG, dense:TAG or both."""
    map: str | None = None
    """The headway of a frame for each dense score, such as '{1: 0, 2: 0.5, 3: 1}'."""
    tag: str
    """The name of the progress: meta/progress_TAG.parquet."""
    overwrite: bool = False
    """Replace progress of this tag that was made otherwise."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where a dataset's progress comes from.

    Attributes:
        take: Gives the progress of the next episodes, at these positions of the index; every kept one once, in order.
        excluded: Episodes that get none.
        made: What provenance says.
    """

    take: Callable[[np.ndarray], np.ndarray]
    excluded: set[int]
    made: Provenance


def run(config: ProgressConfig) -> StageResult:
    """Write ``progress_{tag}.parquet`` for every dataset of the run.

    Raises:
        ConfigError: Values and scores are given, or neither, or they cannot be understood.
        MissingSidecar: There are no values or scores of this tag.
        SidecarError: They do not fit the dataset, or the tag exists with another content.
    """
    if (config.values is None) == (not config.scores):
        message = "Progress is made from --values TAG, or from --scores terminal:TAG dense:TAG; give one of them."
        raise ConfigError(message)
    if config.values is not None and config.map is not None:
        raise ConfigError("--map belongs to dense --scores, and does not go with --values. Mend: leave it out.")
    make = _from_values if config.values is not None else _from_scores
    datasets = open_datasets(config)
    sources = [make(dataset, config) for dataset in datasets]
    paths = [sidecar_path(dataset, "progress", config.tag) for dataset in datasets]
    pairs = [(path, source.made) for path, source in zip(paths, sources, strict=True)]
    if all_exist_same(pairs, overwrite=config.overwrite):
        return StageResult(lines=[f"Already there, and the same: {listing(map(str, paths))}"], written=[])
    named = f"value {config.values}" if config.values is not None else f"annotate {' '.join(config.scores)}"
    with Transaction() as transaction:
        for dataset, source, path in zip(datasets, sources, paths, strict=True):
            writer = SidecarWriter(transaction, path, "progress")
            _write_rows(writer, dataset, source)
            writer.close(source.made, extra={"reward_model_path": f"regrasp {named}"})
        transaction.commit(lambda: all_exist_same(pairs, overwrite=config.overwrite))
    weighting = f"--sample_weighting.type=rabc --sample_weighting.progress_path={shlex.quote(str(paths[0]))}"
    return StageResult(
        lines=[f"Wrote {listing(map(str, paths))}", f"Next: lerobot-train … {weighting}"], written=list(paths)
    )


def _from_values(dataset: Dataset, config: ProgressConfig) -> _Source:
    assert config.values is not None
    values = open_sidecar(dataset, "values", config.values, reader="progress")
    rows = values.stream(["value"], kept_positions(dataset, values.excluded))
    lengths = dataset.index().length
    made = Provenance(
        stage="progress",
        config={"source": dataset.source.value},
        fingerprint=dataset.index().fingerprint,
        inputs={"values": values.id},
        notes={"tags": {"values": values.tag}, "excluded": sorted(values.excluded)},
        created=today(),
    )

    def take(positions: np.ndarray) -> np.ndarray:
        return rows.take(int(lengths[positions].sum()))["value"] + np.float32(1.0)

    return _Source(take=take, excluded=set(values.excluded), made=made)


def _from_scores(dataset: Dataset, config: ProgressConfig) -> _Source:
    tags = parse_scores(config.scores, config.map)
    judged = judged_progress(dataset, tags)
    numbers = dataset.index().episode_index
    rule = "the end's progress, shared out by headway" if tags.dense else "the end's progress, shared out evenly"
    made = Provenance(
        stage="progress",
        config={
            "source": dataset.source.value,
            "scores": sorted(config.scores),
            "map": config.map,
            "rule": rule if tags.terminal else "headway, summed up",
        },
        fingerprint=dataset.index().fingerprint,
        inputs=judged.inputs,
        notes={"excluded": judged.excluded},
        created=today(),
    )

    def take(positions: np.ndarray) -> np.ndarray:
        return np.concatenate([judged.frames[int(numbers[position])] for position in positions])

    return _Source(take=take, excluded=set(judged.excluded), made=made)


def _write_rows(writer: SidecarWriter, dataset: Dataset, source: _Source) -> None:
    """Write progress with the dataset's own ``index``, or the row's number where it has none."""
    index, keep = dataset.index(), kept_positions(dataset, source.excluded)
    chosen = None if len(keep) == len(index.length) else index.episode_index[keep].tolist()
    numbers = dataset.stream(["index"], chosen) if "index" in dataset.columns else None
    for batch in episode_batches(index.length[keep], _ROWS):
        positions = keep[batch]
        episode, frame = index.keys(positions)
        offsets = np.repeat(index.offset[positions], index.length[positions]) + _within(index.length[positions])
        number = offsets if numbers is None else numbers.take(len(episode))["index"].astype(np.int64)
        progress = source.take(positions)
        writer.write({"index": number, "episode_index": episode, "frame_index": frame, "progress_sparse": progress})


def _within(lengths: np.ndarray) -> np.ndarray:
    """0, 1, … for each episode, one after the other."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
