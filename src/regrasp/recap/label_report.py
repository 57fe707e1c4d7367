"""What a person and RLinf's tools are told about new labels."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from regrasp.data.rlinf import mixture_with, read_mixture
from regrasp.recap.frames import Part
from regrasp.recap.outcome_signal import one_sided
from regrasp.recap.thresholds import Labelling, LabelSettings, Thresholds


@dataclass(frozen=True, kw_only=True)
class LabelCount:
    """Labels of one dataset, by kept episode, and the frames at the thresholds by scope."""

    positive: np.ndarray
    frames: np.ndarray
    corrections: int
    ties: np.ndarray


_SHOWN = 8
_KINDS = ("dataset", "source", "outcome", "task")


def report_lines(
    labellings: list[Labelling], counts: list[LabelCount], thresholds: Thresholds, settings: LabelSettings
) -> list[str]:
    """What the labels are like: thresholds, ties, and the positive fraction by dataset, source, outcome and task."""
    rule, by_rule = (
        ">=" if settings.ties == "positive" else ">",
        (settings.demos_positive, settings.corrections_positive),
    )
    pool = "rollout frames that are not corrections" if settings.pool == "rollouts" else "all frames"
    aimed = f"{100 * settings.positive_fraction:.4g}% of {pool}"
    forced = [word for word, on in zip(("demonstrations", "corrections"), by_rule, strict=True) if on]
    driven = sum(count.corrections for count in counts)
    return [
        f"Threshold per {settings.scope}: positive is {rule} the quantile that leaves {aimed} above it",
        *_threshold_lines(counts, thresholds),
        "Positive frames:",
        *_fraction_lines(labellings, counts),
        f"Positive by rule: {' and '.join(forced) or 'nothing'}; {driven} correction frames in the data",
        *one_sided((task, outcome) for item in labellings for task, outcome in _attempts(item)),
    ]


def _attempts(item: Labelling) -> Iterator[tuple[str, str]]:
    index = item.part.index
    for position in item.part.keep.tolist():
        yield index.task[position], item.outcomes.get(str(int(index.episode_index[position])), "unknown")


def _threshold_lines(counts: list[LabelCount], thresholds: Thresholds) -> list[str]:
    lines = []
    ties = np.sum([count.ties for count in counts], axis=0)
    rows = zip(thresholds.scopes.names, thresholds.values, thresholds.pooled, ties, strict=True)
    for scope, value, pooled, tied in islice(rows, _SHOWN):
        what = f"{value:.6g} over {pooled} frames, {tied} of them exactly at it ({tied / max(pooled, 1):.1%})"
        what = what if pooled else "none: no frame in the pool, all forced positive"
        lines.append(f"  {'all data' if thresholds.scopes.together else repr(scope)}: {what}")
    rest = len(thresholds.scopes.names) - _SHOWN
    return [*lines, f"  and {rest} more tasks"] if rest > 0 else lines


def _fraction_lines(labellings: list[Labelling], counts: list[LabelCount]) -> list[str]:
    groups: dict[str, dict[str, list[int]]] = {kind: {} for kind in _KINDS}
    for item, count in zip(labellings, counts, strict=True):
        index = item.part.index
        rows = zip(item.part.keep.tolist(), count.positive.tolist(), count.frames.tolist(), strict=True)
        for position, positive, frames in rows:
            outcome = item.outcomes.get(str(int(index.episode_index[position])), "unknown")
            names = (item.part.dataset.name, item.part.dataset.source.value, outcome, index.task[position])
            for kind, name in zip(_KINDS, names, strict=True):
                entry = groups[kind].setdefault(name, [0, 0])
                entry[0] += positive
                entry[1] += frames
    lines = []
    for kind, found in groups.items():
        for name, (positive, frames) in islice(found.items(), _SHOWN):
            lines.append(f"  {kind:8} {name}: {positive} of {frames} ({positive / frames:.1%})")
        if len(found) > _SHOWN:
            lines.append(f"  and {len(found) - _SHOWN} more {kind}s")
    return lines


def mixture_file(
    item: Labelling, labellings: list[Labelling], thresholds: Thresholds, settings: LabelSettings, tag: str
) -> bytes:
    """RLinf's record of the run beside one dataset's labels."""
    labelled = [other.part for other in labellings if len(other.part.keep)]
    ranges = [_range(part) for part in labelled]
    run = {
        "global_return_min": min(low for low, _ in ranges),
        "global_return_max": max(high for _, high in ranges),
        "datasets": [
            {"name": part.dataset.name, "weight": part.dataset.weight, "return_min": low, "return_max": high}
            for part, (low, high) in zip(labelled, ranges, strict=True)
        ],
    }
    pairs = zip(thresholds.scopes.names, thresholds.values.tolist(), strict=True)
    found = {scope: value for scope, value in pairs if np.isfinite(value)}
    entry: dict = {"positive_quantile": settings.positive_fraction}
    if thresholds.scopes.together:
        entry |= {"unified_threshold": found["*"]} if found else {}
    else:
        entry["task_thresholds"] = found
    return mixture_with(read_mixture(item.part.dataset), run, tag, entry)


def _range(part: Part) -> tuple[float, float]:
    scales = [part.scales.for_task(task) for task in part.tasks]
    return float(min(s.low for s in scales)), float(max(s.high for s in scales))
