"""Thresholds and labels: what `advantages` and `relabel` share, so that they cannot drift apart."""

from dataclasses import replace

import numpy as np

from regrasp.core.errors import ConfigError, SidecarError, listing
from regrasp.core.outcome import Source
from regrasp.core.provenance import Provenance, digest, today
from regrasp.core.scale import ScaleSet
from regrasp.data.rlinf import MIXTURE_FILE
from regrasp.data.sidecar import Sidecar, SidecarWriter, all_exist_same, coded, sidecar_path
from regrasp.data.storage import Transaction
from regrasp.recap.frames import AdvantageSettings, Part
from regrasp.recap.label_report import LabelCount, mixture_file, report_lines
from regrasp.recap.selection import StageResult
from regrasp.recap.thresholds import Labelling, LabelSettings, Thresholds, find_thresholds
from regrasp.rl.labels import label


def check_ranges(*, lookahead: int, discount: float | None, positive_fraction: float, chunk_rows: int) -> None:
    """Refuse settings that are out of range."""
    if lookahead < 1:
        message = f"--lookahead is at least 1 frame; found {lookahead}."
        raise ConfigError(message)
    if discount is not None and not 0.0 <= discount <= 1.0:
        message = f"--gamma lies in [0, 1]; found {discount}."
        raise ConfigError(message)
    if not 0.0 < positive_fraction < 1.0:
        message = f"--positive-fraction lies between 0 and 1, both excluded; found {positive_fraction}."
        raise ConfigError(message)
    if chunk_rows < 1:
        message = f"--chunk-rows is at least 1; found {chunk_rows}."
        raise ConfigError(message)


def label_datasets(
    labellings: list[Labelling],
    advantage: AdvantageSettings,
    settings: LabelSettings,
    *,
    stage: str,
    tag: str,
    overwrite: bool,
    dry_run: bool,
) -> StageResult:
    """Find the thresholds, write ``advantages_{tag}.parquet`` for every dataset, and report what the labels are."""
    run = digest(
        sorted(digest([item.inputs, item.part.dataset.source, item.part.correction_column]) for item in labellings)
    )
    provenances = [_provenance(item, advantage, settings, stage, run) for item in labellings]
    paths = [sidecar_path(item.part.dataset, "advantages", tag) for item in labellings]

    def all_there() -> bool:
        return all_exist_same(zip(paths, provenances, strict=True), overwrite=overwrite)

    if all_there() and not dry_run:
        return StageResult(lines=[f"Already there, and the same: {listing(map(str, paths))}"], written=[])
    thresholds = find_thresholds(labellings, settings)
    if dry_run:
        counts = [_label(item, thresholds, settings, None) for item in labellings]
        lines = report_lines(labellings, counts, thresholds, settings)
        return StageResult(lines=[*lines, f"Would write {listing(map(str, paths))}"], written=[])
    with Transaction() as transaction:
        # published before the labels, so that labels that are all there mean that these are too
        mixtures = [transaction.create(item.part.dataset.sidecar_dir / MIXTURE_FILE) for item in labellings]
        counts = []
        for item, provenance, path in zip(labellings, provenances, paths, strict=True):
            writer = SidecarWriter(transaction, path, "advantages")
            count = _label(item, thresholds, settings, writer)
            writer.close(_with_findings(provenance, item, thresholds, count))
            counts.append(count)

        def guard() -> None:
            all_there()
            for item, handle in zip(labellings, mixtures, strict=True):
                handle.write(mixture_file(item, labellings, thresholds, settings, tag))

        transaction.commit(guard)
    lines = report_lines(labellings, counts, thresholds, settings)
    return StageResult(lines=[*lines, f"Wrote {listing(map(str, paths))}"], written=paths)


def _provenance(
    item: Labelling, advantage: AdvantageSettings, settings: LabelSettings, stage: str, run: str
) -> Provenance:
    part = item.part
    scales = {task: part.scales.for_task(task) for task in part.tasks}
    config = {
        "dataset": part.dataset.name,
        "source": part.dataset.source.value,
        "lookahead": advantage.lookahead,
        "gamma": advantage.discount,
        "discount_next_value": advantage.discount_next_value,
        "failure_end": advantage.failure_end,
        "positive_fraction": settings.positive_fraction,
        "scope": settings.scope,
        "pool": settings.pool,
        "ties": settings.ties,
        "demos_positive": settings.demos_positive,
        "corrections_positive": settings.corrections_positive,
        "correction_column": part.correction_column,
        "scale": {task: [scale.low, scale.high] for task, scale in scales.items()},
    }
    numbers = part.index.episode_index
    left_out = sorted(set(numbers.tolist()) - set(numbers[part.keep].tolist()))
    return Provenance(
        stage=stage,
        config=config,
        fingerprint=part.index.fingerprint,
        inputs={**item.inputs, "run": run},
        scale=part.scales.to_json(),
        notes={"tags": item.tags, "outcomes": item.outcomes, "excluded": left_out},
        created=today(),
    )


def _label(
    item: Labelling, thresholds: Thresholds, settings: LabelSettings, writer: SidecarWriter | None
) -> LabelCount:
    """Label a dataset, write the labels where there is a writer, and count them."""
    part = item.part
    code = thresholds.scopes.codes(part.index)
    demo = part.dataset.source is Source.DEMO
    positive = np.zeros(len(part.index.length), dtype=np.int64)
    ties = np.zeros(len(thresholds.scopes.names), dtype=np.int64)
    corrections = 0
    for batch in item.batches(False):
        values = batch.columns["advantage_continuous"]
        scope = np.repeat(code[batch.positions], batch.length)
        threshold = thresholds.values[scope]
        corrected = np.zeros(len(values), dtype=bool) if batch.correction is None else batch.correction
        forced = (demo and settings.demos_positive) | (corrected & settings.corrections_positive)
        labels = label(values, threshold, forced, ties=settings.ties)
        pooled = ~corrected & (not demo) if settings.pool == "rollouts" else np.True_
        ties += np.bincount(scope[(values == threshold) & pooled], minlength=len(ties))
        corrections += int(corrected.sum())
        starts = np.cumsum(batch.length) - batch.length
        positive[batch.positions] = np.add.reduceat(labels.astype(np.int64), starts)
        if writer is not None:
            name = coded(np.zeros(len(values), dtype=np.int32), [part.dataset.name])
            writer.write({**batch.columns, "dataset_name": name, "advantage": labels})
    keep = part.keep
    return LabelCount(positive=positive[keep], frames=part.index.length[keep], corrections=corrections, ties=ties)


def _with_findings(provenance: Provenance, item: Labelling, thresholds: Thresholds, count: LabelCount) -> Provenance:
    found = {task: thresholds.of(task) for task in item.part.tasks if np.isfinite(thresholds.of(task))}
    positive, frames = int(count.positive.sum()), int(count.frames.sum())
    statistics = {"positive": positive, "frames": frames, "corrections": count.corrections}
    return replace(provenance, statistics=statistics, notes={**provenance.notes, "thresholds": found})


def outcomes_of(sidecar: Sidecar) -> dict[str, str]:
    """The outcomes that a sidecar's provenance records, by episode."""
    return (sidecar.provenance.notes if sidecar.provenance else {}).get("outcomes", {})


def same_scale(part: Part, sidecar: Sidecar) -> None:
    """Refuse values that were predicted on another scale than the returns'."""
    scale = sidecar.provenance.scale if sidecar.provenance else None
    if scale is None:
        return
    difference = ScaleSet.from_json(scale).differs_from(part.scales, part.tasks)
    if difference:
        message = (
            f"'{sidecar.path}' was predicted on another scale than the returns' ({difference}). Mend: fit the value "
            "model on these returns and predict again."
        )
        raise SidecarError(message)
