"""Thresholds and labels: what `advantages` and `relabel` share, so that they cannot drift apart."""

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from regrasp.core.errors import ConfigError, SidecarError, listing
from regrasp.core.outcome import Source
from regrasp.core.provenance import Provenance, digest
from regrasp.core.scale import ScaleScope
from regrasp.data.rlinf import MIXTURE_FILE, mixture_with, read_mixture
from regrasp.data.sidecar import Sidecar, SidecarWriter, coded, existing_is_same, sidecar_path
from regrasp.data.storage import Spool, Transaction
from regrasp.recap.frames import AdvantageSettings, Batch, Part
from regrasp.recap.selection import StageResult
from regrasp.rl.labels import Ties, label, positive_quantile
from regrasp.rl.quantile import stream_quantiles

Pool = Literal["auto", "rollouts", "all"]
"""The frames that a threshold is a quantile of."""


@dataclass(frozen=True, kw_only=True)
class LabelSettings:
    """How advantages become labels."""

    positive_fraction: float
    scope: ScaleScope
    pool: Literal["rollouts", "all"]
    ties: Ties
    demos_positive: bool
    corrections_positive: bool


@dataclass(frozen=True, kw_only=True)
class Labelling:
    """One dataset to be labelled: where its advantages come from, and what they depend on."""

    part: Part
    batches: Callable[[bool], Iterator[Batch]]
    """Starts a reading; True where the advantages alone are enough."""
    inputs: dict[str, str]
    outcomes: dict[str, str]
    tags: dict[str, str]


def resolve_pool(pool: Pool, labellings: list[Labelling]) -> Literal["rollouts", "all"]:
    """What ``auto`` stands for: the rollouts where there are any, else all."""
    rollouts = any(item.part.dataset.source is Source.ROLLOUT for item in labellings)
    if pool == "rollouts" and not rollouts:
        message = "--pool rollouts, but the run has no rollout dataset. Mend: give --rollouts, or --pool all."
        raise ConfigError(message)
    return ("rollouts" if rollouts else "all") if pool == "auto" else pool


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


@dataclass(frozen=True, kw_only=True)
class _Thresholds:
    scopes: list[str]
    values: np.ndarray
    pooled: np.ndarray

    def of(self, task: str) -> float:
        return float(self.values[self.code(task)])

    def code(self, task: str) -> int:
        return 0 if self.scopes == ["*"] else self.scopes.index(task)


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
    """Find the thresholds, write ``advantages_{tag}.parquet`` for every dataset, and report what the labels are like."""
    run = digest([item.inputs for item in labellings])
    provenances = [_provenance(item, advantage, settings, stage, run) for item in labellings]
    paths = [sidecar_path(item.part.dataset, "advantages", tag) for item in labellings]
    same = [existing_is_same(p, v, overwrite=overwrite) for p, v in zip(paths, provenances, strict=True)]
    if all(same) and not dry_run:
        return StageResult(lines=[f"Already there, and the same: {listing(map(str, paths))}"], written=[])
    thresholds = _find_thresholds(labellings, settings)
    with Transaction() as transaction:
        counts = []
        for item, provenance, path in zip(labellings, provenances, paths, strict=True):
            writer = SidecarWriter(transaction, path, "advantages")
            count = _write_labels(writer, item, thresholds, settings)
            writer.close(_with_findings(provenance, item, thresholds, count))
            counts.append(count)
        lines = _report(labellings, counts, thresholds, settings)
        if dry_run:
            return StageResult(lines=[*lines, f"Would write {listing(map(str, paths))}"], written=[])
        mixtures = [transaction.create(item.part.dataset.sidecar_dir / MIXTURE_FILE) for item in labellings]

        def guard() -> None:
            for path, provenance in zip(paths, provenances, strict=True):
                existing_is_same(path, provenance, overwrite=overwrite)
            for item, handle in zip(labellings, mixtures, strict=True):
                handle.write(_mixture(item, labellings, thresholds, settings, tag))

        transaction.commit(guard)
    return StageResult(lines=[*lines, f"Wrote {listing(map(str, paths))}"], written=paths)


def _provenance(
    item: Labelling, advantage: AdvantageSettings, settings: LabelSettings, stage: str, run: str
) -> Provenance:
    tasks = sorted({item.part.index.task[p] for p in item.part.keep})
    config = {
        "source": item.part.dataset.source.value,
        "lookahead": advantage.lookahead,
        "gamma": advantage.discount,
        "discount_next_value": advantage.discount_next_value,
        "positive_fraction": settings.positive_fraction,
        "scope": settings.scope,
        "pool": settings.pool,
        "ties": settings.ties,
        "demos_positive": settings.demos_positive,
        "corrections_positive": settings.corrections_positive,
        "correction_column": item.part.correction_column,
        "scale": {t: [item.part.scales.for_task(t).low, item.part.scales.for_task(t).high] for t in tasks},
    }
    numbers = item.part.index.episode_index
    left_out = sorted(set(numbers.tolist()) - set(numbers[item.part.keep].tolist()))
    return Provenance(
        stage=stage,
        config=config,
        fingerprint=item.part.index.fingerprint,
        inputs={**item.inputs, "run": run},
        scale=item.part.scales.to_json(),
        notes={"tags": item.tags, "outcomes": item.outcomes, "excluded": left_out},
        created=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    )


def _find_thresholds(labellings: list[Labelling], settings: LabelSettings) -> _Thresholds:
    tasks = sorted({item.part.index.task[p] for item in labellings for p in item.part.keep})
    scopes = ["*"] if settings.scope == "global" else tasks
    spool = Spool()
    for item in labellings:
        part = item.part
        if settings.pool == "rollouts" and part.dataset.source is Source.DEMO:
            continue
        code = np.array([0 if scopes == ["*"] else scopes.index(task) for task in part.index.task], dtype=np.int64)
        for batch in item.batches(True):
            groups = np.repeat(code[batch.positions], batch.length)
            values = batch.columns["advantage_continuous"]
            if settings.pool == "rollouts" and batch.correction is not None:
                groups, values = groups[~batch.correction], values[~batch.correction]
            spool.add(groups, values)
    pooled = np.zeros(len(scopes), dtype=np.int64)
    pooled[: len(spool.counts)] = spool.counts
    quantile = positive_quantile(settings.positive_fraction)
    values = stream_quantiles(spool.read, pooled, quantile)
    spool.close()
    _refuse_empty_pools(labellings, settings, scopes, pooled)
    return _Thresholds(scopes=scopes, values=values, pooled=pooled)


def _refuse_empty_pools(
    labellings: list[Labelling], settings: LabelSettings, scopes: list[str], pooled: np.ndarray
) -> None:
    """A task without frames in the pool has no threshold; that is fine only where all its frames are forced positive."""
    empty = {scope for scope, count in zip(scopes, pooled, strict=True) if count == 0}
    for item in labellings:
        forced = settings.demos_positive and item.part.dataset.source is Source.DEMO
        tasks = sorted({item.part.index.task[p] for p in item.part.keep})
        lacking = [task for task in tasks if ("*" if scopes == ["*"] else task) in empty]
        if lacking and not forced:
            message = (
                f"'{item.part.dataset.name}' has frames of {listing(map(repr, lacking))}, for which the pool "
                f"({settings.pool}) has no frame to set a threshold by. Mend: --pool all or --scope global."
            )
            raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class _Count:
    """Labels of one dataset, by kept episode, and the frames at the thresholds by scope."""

    positive: np.ndarray
    frames: np.ndarray
    corrections: int
    ties: np.ndarray


def _write_labels(
    writer: SidecarWriter, item: Labelling, thresholds: _Thresholds, settings: LabelSettings
) -> _Count:
    part = item.part
    code = np.array([thresholds.code(task) for task in part.index.task], dtype=np.int64)
    demo = part.dataset.source is Source.DEMO
    positive = np.zeros(len(part.index.length), dtype=np.int64)
    ties = np.zeros(len(thresholds.scopes), dtype=np.int64)
    corrections = 0
    for batch in item.batches(False):
        values = batch.columns["advantage_continuous"]
        scope = np.repeat(code[batch.positions], batch.length)
        threshold = thresholds.values[scope]
        corrected = np.zeros(len(values), dtype=bool) if batch.correction is None else batch.correction
        forced = (demo and settings.demos_positive) | (corrected & settings.corrections_positive)
        labels = label(values, threshold, forced, ties=settings.ties)
        pooled = np.full(len(values), not demo) & ~corrected if settings.pool == "rollouts" else np.ones(len(values), bool)
        ties += np.bincount(scope[(values == threshold) & pooled], minlength=len(ties))
        corrections += int(corrected.sum())
        starts = np.cumsum(batch.length) - batch.length
        positive[batch.positions] = np.add.reduceat(labels.astype(np.int64), starts)
        name = coded(np.zeros(len(values), dtype=np.int32), [part.dataset.name])
        writer.write({**batch.columns, "dataset_name": name, "advantage": labels})
    keep = part.keep
    return _Count(positive=positive[keep], frames=part.index.length[keep], corrections=corrections, ties=ties)


def _with_findings(provenance: Provenance, item: Labelling, thresholds: _Thresholds, count: _Count) -> Provenance:
    tasks = sorted({item.part.index.task[p] for p in item.part.keep})
    found = {task: thresholds.of(task) for task in tasks if np.isfinite(thresholds.of(task))}
    statistics = {"positive": int(count.positive.sum()), "frames": int(count.frames.sum()), "corrections": count.corrections}
    values = {**provenance.__dict__, "statistics": statistics, "notes": {**provenance.notes, "thresholds": found}}
    return Provenance(**values)


def _report(
    labellings: list[Labelling], counts: list[_Count], thresholds: _Thresholds, settings: LabelSettings
) -> list[str]:
    groups: dict[tuple[str, str], list[int]] = {}

    def add(kind: str, name: str, positive: int, frames: int) -> None:
        entry = groups.setdefault((kind, name), [0, 0])
        entry[0] += positive
        entry[1] += frames

    for item, count in zip(labellings, counts, strict=True):
        index = item.part.index
        for position, positive, frames in zip(item.part.keep.tolist(), count.positive.tolist(), count.frames.tolist(), strict=True):
            add("dataset", item.part.dataset.name, positive, frames)
            add("source", item.part.dataset.source.value, positive, frames)
            add("outcome", item.outcomes.get(str(int(index.episode_index[position])), "unknown"), positive, frames)
            add("task", index.task[position], positive, frames)
    aimed = f"{settings.positive_fraction:.0%} of {'rollout frames that are not corrections' if settings.pool == 'rollouts' else 'all frames'}"
    lines = [f"Threshold per {settings.scope}: positive is {'>=' if settings.ties == 'positive' else '>'} the quantile that leaves {aimed} above it"]
    for scope, value, pooled, tied in zip(thresholds.scopes[:8], thresholds.values, thresholds.pooled, sum(c.ties for c in counts), strict=False):
        what = f"{value:.6g} over {pooled} frames, {tied} of them exactly at it ({tied / pooled:.1%})" if pooled else "none: no frame in the pool, all forced positive"
        lines.append(f"  {'all data' if scope == '*' else repr(scope)}: {what}")
    lines.append("Positive frames:")
    shown = [(key, entry) for key, entry in groups.items() if key[0] != "task"] + [(k, e) for k, e in groups.items() if k[0] == "task"][:8]
    for (kind, name), (positive, frames) in sorted(shown, key=lambda item: ["dataset", "source", "outcome", "task"].index(item[0][0])):
        lines.append(f"  {kind:8} {name}: {positive} of {frames} ({positive / max(frames, 1):.1%})")
    corrections = sum(count.corrections for count in counts)
    forced = [word for word, on in (("demonstrations", settings.demos_positive), ("corrections", settings.corrections_positive)) if on]
    lines.append(f"Positive by rule: {' and '.join(forced) or 'nothing'}; {corrections} correction frames in the data")
    return lines


def _mixture(
    item: Labelling, labellings: list[Labelling], thresholds: _Thresholds, settings: LabelSettings, tag: str
) -> bytes:
    """RLinf's record of the run beside one dataset's labels."""
    scales = {other.part.dataset.name: _range(other) for other in labellings}
    run = {
        "global_return_min": min(low for low, _ in scales.values()),
        "global_return_max": max(high for _, high in scales.values()),
        "datasets": [
            {
                "name": other.part.dataset.name,
                "weight": other.part.dataset.weight,
                "return_min": scales[other.part.dataset.name][0],
                "return_max": scales[other.part.dataset.name][1],
            }
            for other in labellings
        ],
    }
    entry: dict = {"positive_quantile": settings.positive_fraction}
    if thresholds.scopes == ["*"]:
        entry["unified_threshold"] = float(thresholds.values[0])
    else:
        pairs = zip(thresholds.scopes, thresholds.values.tolist(), strict=True)
        entry["task_thresholds"] = {scope: value for scope, value in pairs if np.isfinite(value)}
    return mixture_with(read_mixture(item.part.dataset), run, tag, entry)


def _range(item: Labelling) -> tuple[float, float]:
    scales = [item.part.scales.for_task(item.part.index.task[p]) for p in item.part.keep]
    return float(min(s.low for s in scales)), float(max(s.high for s in scales))


def outcomes_of(sidecar: Sidecar) -> dict[str, str]:
    """The outcomes that a sidecar's provenance records, by episode."""
    return (sidecar.provenance.notes if sidecar.provenance else {}).get("outcomes", {})


def same_scale(part: Part, sidecar: Sidecar) -> None:
    """Refuse values that were predicted on another scale than the returns'."""
    scale = sidecar.provenance.scale if sidecar.provenance else None
    if scale is None:
        return
    from regrasp.core.scale import ScaleSet

    difference = ScaleSet.from_json(scale).differs_from(part.scales, sorted(set(part.index.task)))
    if difference:
        message = f"'{sidecar.path}' was predicted on another scale than the returns' ({difference}). Mend: fit the value model on these returns and predict again."
        raise SidecarError(message)
