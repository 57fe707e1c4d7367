"""Values in the schema of LeRobot's RA-BC, so that stock weighted training takes them.

LeRobot (``rewards/sarm/rabc.py``) reads ``index, episode_index, frame_index, progress_sparse`` and weights a frame by
how much progress the next chunk makes. Progress is V + 1: 0 at the worst return of the scale, 1 at the best.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from regrasp.core.errors import listing
from regrasp.core.provenance import Provenance, today
from regrasp.data.dataset import Dataset
from regrasp.data.sidecar import Sidecar, SidecarWriter, all_exist_same, open_sidecar, sidecar_path
from regrasp.data.storage import Transaction
from regrasp.recap.frames import kept_positions
from regrasp.recap.returns import episode_batches
from regrasp.recap.selection import Selection, StageResult, open_datasets

_ROWS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class ProgressConfig(Selection):
    """Write values as progress, for LeRobot's weighted training (RA-BC)."""

    values: str
    """The tag of the values."""
    tag: str
    """The name of the progress: meta/progress_TAG.parquet."""
    overwrite: bool = False
    """Replace progress of this tag that was made otherwise."""


def run(config: ProgressConfig) -> StageResult:
    """Write ``progress_{tag}.parquet`` for every dataset of the run.

    Raises:
        MissingSidecar: There are no values of this tag.
        SidecarError: They do not fit the dataset, or the tag exists with another content.
    """
    datasets = open_datasets(config)
    values = [open_sidecar(dataset, "values", config.values, reader="progress") for dataset in datasets]
    paths = [sidecar_path(dataset, "progress", config.tag) for dataset in datasets]
    provenances = [_provenance(dataset, sidecar) for dataset, sidecar in zip(datasets, values, strict=True)]
    pairs = list(zip(paths, provenances, strict=True))
    if all_exist_same(pairs, overwrite=config.overwrite):
        return StageResult(lines=[f"Already there, and the same: {listing(map(str, paths))}"], written=[])
    with Transaction() as transaction:
        for dataset, sidecar, (path, made) in zip(datasets, values, pairs, strict=True):
            writer = SidecarWriter(transaction, path, "progress")
            _write_rows(writer, dataset, sidecar)
            writer.close(made, extra={"reward_model_path": f"regrasp value {config.values}"})
        transaction.commit(lambda: all_exist_same(pairs, overwrite=config.overwrite))
    following = "Next: lerobot-train … --sample_weighting.type=rabc --sample_weighting.progress_path=" + str(paths[0])
    return StageResult(lines=[f"Wrote {listing(map(str, paths))}", following], written=list[Path](paths))


def _provenance(dataset: Dataset, values: Sidecar) -> Provenance:
    return Provenance(
        stage="progress",
        config={"source": dataset.source.value},
        fingerprint=dataset.index().fingerprint,
        inputs={"values": values.id},
        notes={"tags": {"values": values.tag}, "excluded": sorted(values.excluded)},
        created=today(),
    )


def _write_rows(writer: SidecarWriter, dataset: Dataset, values: Sidecar) -> None:
    """Write progress with the dataset's own ``index``, or the row's number where it has none."""
    index, keep = dataset.index(), kept_positions(dataset, values.excluded)
    rows = values.stream(["value"], keep)
    chosen = None if len(keep) == len(index.length) else index.episode_index[keep].tolist()
    numbers = dataset.stream(["index"], chosen) if "index" in dataset.columns else None
    for batch in episode_batches(index.length[keep], _ROWS):
        positions = keep[batch]
        episode, frame = index.keys(positions)
        offsets = np.repeat(index.offset[positions], index.length[positions]) + _within(index.length[positions])
        number = offsets if numbers is None else numbers.take(len(episode))["index"].astype(np.int64)
        progress = rows.take(len(episode))["value"] + np.float32(1.0)
        writer.write({"index": number, "episode_index": episode, "frame_index": frame, "progress_sparse": progress})


def _within(lengths: np.ndarray) -> np.ndarray:
    """0, 1, … for each episode, one after the other."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
