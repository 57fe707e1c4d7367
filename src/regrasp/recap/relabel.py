"""New labels from stored values: another fraction, scope, lookahead or discount, in seconds and on a CPU."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from regrasp.core.errors import ConfigError, MissingSidecar, SidecarError
from regrasp.core.scale import ReturnScale, ScaleScope, ScaleSet
from regrasp.data.dataset import Dataset
from regrasp.data.rlinf import read_mixture
from regrasp.data.sidecar import Sidecar, open_sidecar
from regrasp.recap.advantages import recorded_outcomes
from regrasp.recap.frames import (
    AdvantageSettings,
    Part,
    check_source,
    common_discount,
    common_scales,
    computed,
    correction_columns,
    kept_positions,
    stored,
)
from regrasp.recap.labelling import check_ranges, label_datasets, outcomes_of
from regrasp.recap.selection import Selection, StageResult, open_datasets, tell
from regrasp.recap.thresholds import Labelling, LabelSettings, Pool, resolve_pool
from regrasp.rl.advantage import FailureEnd
from regrasp.rl.labels import Ties


@dataclass(frozen=True, kw_only=True)
class RelabelConfig(Selection):
    """Make new labels from the values that an advantages sidecar holds. What is left out stays as it was."""

    source: str
    """The tag of the advantages to start from."""
    tag: str
    """The name of the new labels."""
    positive_fraction: float | None = None
    """The share of the pool above the threshold."""
    lookahead: int | None = None
    """N, in frames."""
    gamma: float | None = None
    """The discount per frame."""
    scope: ScaleScope | None = None
    """Whether each task has a threshold or all data share one."""
    pool: Pool | None = None
    """The frames that set the threshold."""
    ties: Ties | None = None
    """What a frame exactly at the threshold is."""
    discount_next_value: bool | None = None
    """Whether the next value is discounted by gamma^n; --no-discount-next-value turns it off."""
    failure_end: FailureEnd | None = None
    """What is left after a failure's last frame: see `regrasp advantages`; paid where the source does not say."""
    demos_positive: bool | None = None
    """Whether demonstrations are positive whatever their advantage; --no-demos-positive turns it off."""
    corrections_positive: bool | None = None
    """Whether corrections are positive whatever their advantage; --no-corrections-positive turns it off."""
    correction_column: str | None = None
    """The column that marks corrections, if it is none of the known ones."""
    returns: str | None = None
    """The tag of the returns, for another lookahead or discount; the source's own where it says which."""
    chunk_rows: int = 1 << 17
    """About how many frames are held at a time."""
    overwrite: bool = False
    """Replace labels of this tag that were made otherwise."""
    dry_run: bool = False
    """Report the labels, and write nothing."""


_DEFAULTS: dict[str, Any] = {
    "scope": "task",
    "pool": "auto",
    "ties": "negative",
    "discount_next_value": True,
    "failure_end": "paid",
    "demos_positive": True,
    "corrections_positive": True,
}


def run(config: RelabelConfig) -> StageResult:
    """Write ``advantages_{tag}.parquet`` for every dataset, from the advantages tagged ``source``.

    Raises:
        MissingSidecar: There are no such advantages, or no returns where another lookahead or discount needs them.
        ConfigError: A setting is out of range, or is not known of a source that does not say its own.
    """
    if config.tag == config.source and not config.overwrite:
        message = f"--tag and --source are both {config.tag!r}. Mend: give the new labels another tag."
        raise ConfigError(message)
    datasets = open_datasets(config)
    sources = [(dataset, open_sidecar(dataset, "advantages", config.source, reader="relabel")) for dataset in datasets]
    for dataset, sidecar in sources:
        check_source(dataset, sidecar)
    before = _before(config, sources)
    wanted = _wanted(config, sources, before)
    given = [name for name in _OF_ADVANTAGES if getattr(config, name) is not None]
    recompute = any(getattr(config, name) != before.get(name) for name in given)
    labellings, advantage = _labellings(config, sources, wanted, recompute=recompute)
    settings = LabelSettings(
        positive_fraction=wanted["positive_fraction"],
        scope=wanted["scope"],
        pool=resolve_pool(wanted["pool"], labellings),
        ties=wanted["ties"],
        demos_positive=wanted["demos_positive"],
        corrections_positive=wanted["corrections_positive"],
    )
    result = label_datasets(
        labellings,
        advantage,
        settings,
        stage="relabel",
        tag=config.tag,
        overwrite=config.overwrite,
        dry_run=config.dry_run,
    )
    how = (
        f"advantages computed again with N {advantage.lookahead}, gamma {advantage.discount:g}"
        if recompute
        else "advantages as they were"
    )
    return StageResult(
        lines=[f"From {config.source}: {how}, pool: {settings.pool}", *result.lines], written=result.written
    )


_OF_ADVANTAGES = ("lookahead", "gamma", "discount_next_value", "failure_end")
_SETTINGS = ("positive_fraction", "lookahead", "gamma", *_DEFAULTS)


def _wanted(config: RelabelConfig, sources: list[tuple[Dataset, Sidecar]], before: dict[str, Any]) -> dict[str, Any]:
    """The settings of the new labels: those given, else the source's; refused where out of range."""
    given = {name: getattr(config, name) for name in _SETTINGS if getattr(config, name) is not None}
    wanted = {name: given.get(name, before.get(name)) for name in _SETTINGS}
    if wanted["positive_fraction"] is None:
        message = f"'{sources[0][1].path}' does not say its positive fraction. Mend: give --positive-fraction."
        raise ConfigError(message)
    check_ranges(
        lookahead=1 if wanted["lookahead"] is None else wanted["lookahead"],
        discount=wanted["gamma"],
        positive_fraction=wanted["positive_fraction"],
        chunk_rows=config.chunk_rows,
    )
    return wanted


def _before(config: RelabelConfig, sources: list[tuple[Dataset, Sidecar]]) -> dict[str, Any]:
    """The settings that the source was made with, as far as it says; None where datasets differ and a flag decides."""
    settings: dict[str, Any] = {}
    for dataset, sidecar in sources:
        if sidecar.provenance is not None:
            found = {name: sidecar.provenance.config[name] for name in _SETTINGS if name in sidecar.provenance.config}
        else:
            tag = (read_mixture(dataset).get("tags") or {}).get(config.source) or {}
            found = {"positive_fraction": tag["positive_quantile"]} if "positive_quantile" in tag else {}
        for name, value in found.items():
            if settings.setdefault(name, value) == value:
                continue
            if getattr(config, name) is None:
                message = (
                    f"The labels tagged {config.source!r} were made in different runs: {name} is {settings[name]} in "
                    f"'{sources[0][1].path}' and {value} in '{sidecar.path}'. Mend: label all in one run first."
                )
                raise SidecarError(message)
            settings[name] = None
    return _DEFAULTS | settings


def _labellings(
    config: RelabelConfig, sources: list[tuple[Dataset, Sidecar]], wanted: dict[str, Any], *, recompute: bool
) -> tuple[list[Labelling], AdvantageSettings]:
    scales = _scales(sources)
    returns = [_returns(config, dataset, sidecar) for dataset, sidecar in sources] if recompute else None
    for (dataset, source), sidecar in zip(sources, returns or [], strict=False):
        tasks = {dataset.index().task[position] for position in kept_positions(dataset, source.excluded)}
        _check_scale(sidecar, sorted(tasks), scales)
    _tell_discount(sources, wanted["gamma"])
    if recompute and wanted["gamma"] is None and returns is not None:
        wanted["gamma"] = common_discount([(d, r) for (d, _), r in zip(sources, returns, strict=True)], None)
    if recompute and wanted["lookahead"] is None:
        message = f"'{sources[0][1].path}' does not say its lookahead. Mend: give --lookahead."
        raise ConfigError(message)
    advantage = AdvantageSettings(
        lookahead=wanted["lookahead"],
        discount=wanted["gamma"],
        discount_next_value=wanted["discount_next_value"],
        failure_end=wanted["failure_end"],
    )
    made = []
    corrections = correction_columns([dataset for dataset, _ in sources], config.correction_column)
    for place, (dataset, source) in enumerate(sources):
        recorded = source.provenance.config.get("correction_column") if source.provenance else None
        part = Part(
            dataset=dataset,
            keep=kept_positions(dataset, source.excluded),
            scales=scales,
            correction_column=corrections[place] if config.correction_column else recorded or corrections[place],
            rows=config.chunk_rows,
        )
        made.append(_labelling(part, advantage, source, returns[place] if returns else None))
    return made, advantage


def _labelling(part: Part, advantage: AdvantageSettings, source: Sidecar, returns: Sidecar | None) -> Labelling:
    tags = (source.provenance.notes if source.provenance else {}).get("tags", {})
    made_from = source.provenance.inputs if source.provenance else {}
    recorded = {name: made_from[name] for name in ("returns",) if name in made_from}
    return Labelling(
        part=part,
        batches=lambda only_advantage: (
            stored(part, source, only_advantage=only_advantage)
            if returns is None
            else computed(part, advantage, rewards=returns, returns=source, values=source, value_column="value_current")
        ),
        inputs={"source": source.id, **recorded, **({"returns": returns.id} if returns is not None else {})},
        outcomes=outcomes_of(source) or recorded_outcomes(part.dataset),
        tags={**tags, **({"returns": returns.tag} if returns is not None else {}), "source": source.tag},
    )


def _scales(sources: list[tuple[Dataset, Sidecar]]) -> ScaleSet:
    """The scale that the values are in: what the source says, or what its rows show."""
    if all(sidecar.provenance is not None for _, sidecar in sources):
        return common_scales(sources, None)[0]
    found = {_shown_scale(dataset, sidecar) for dataset, sidecar in sources}
    low = min(found)
    if max(found) - low > 1e-6 * abs(low):
        message = (
            f"The sources were scaled differently ({low:g} and {max(found):g} at the lower end), so they cannot share "
            "thresholds. Mend: label all datasets in one run first."
        )
        raise SidecarError(message)
    return ScaleSet.single(ReturnScale(low, 0.0))


def _shown_scale(dataset: Dataset, source: Sidecar) -> float:
    """The lower end of a scale [low, 0]: reward_sum is reward_sum_raw / -low in every row.

    ``mixture_config.yaml`` is not asked: its range is that of the last run, whatever its tag.
    """
    stream = source.stream(["reward_sum", "reward_sum_raw"], kept_positions(dataset, source.excluded))
    ratios = []
    for length in dataset.index().length.tolist():
        rows = stream.take(length)
        unit, raw = rows["reward_sum"], rows["reward_sum_raw"]
        ratios.append(raw[unit != 0] / unit[unit != 0])
    ratio = np.concatenate(ratios)
    if not len(ratio) or ratio.min() <= 0 or np.ptp(ratio) > 1e-6 * ratio.max():
        message = (
            f"'{source.path}' does not say its return scale, and its rows do not show one that ends at 0. Mend: run "
            "`regrasp advantages` from its returns and values."
        )
        raise SidecarError(message)
    return -round(float(np.median(ratio)), 6)


def _check_scale(returns: Sidecar, tasks: list[str], scales: ScaleSet) -> None:
    """Refuse rewards of another scale than the one that the values are in."""
    scale = returns.provenance.scale if returns.provenance else None
    difference = ScaleSet.from_json(scale).differs_from(scales, tasks) if scale else None
    if difference:
        message = (
            f"'{returns.path}' has another scale than the values ({difference}). Mend: fit and predict values on these "
            "returns, and run `regrasp advantages`."
        )
        raise SidecarError(message)


def _tell_discount(sources: list[tuple[Dataset, Sidecar]], discount: float | None) -> None:
    """Say when the values were learnt under another discount: exact values then no longer give advantage 0."""
    learnt = {sidecar.provenance.config.get("gamma") for _, sidecar in sources if sidecar.provenance}
    other = sorted(gamma for gamma in learnt if gamma is not None and gamma != discount)
    if other and discount is not None:
        tell(
            f"the source has gamma {other[0]:g}, and --gamma is {discount:g}: where values were learnt at another "
            "discount, even exact ones have advantages"
        )


def _returns(config: RelabelConfig, dataset: Dataset, source: Sidecar) -> Sidecar:
    tags = (source.provenance.notes if source.provenance else {}).get("tags", {})
    tag = config.returns or tags.get("returns")
    if tag is None:
        message = (
            f"Another lookahead or discount needs the rewards, and '{source.path}' does not say which returns it was "
            "made from. Mend: give --returns TAG."
        )
        raise MissingSidecar(message)
    returns = open_sidecar(dataset, "returns", tag, reader="relabel")
    recorded = source.provenance.inputs.get("returns") if source.provenance else None
    if config.returns is None and recorded is not None and returns.id != recorded:
        message = (
            f"'{returns.path}' was made again since '{source.path}' was made from it, so its rewards are not those "
            "that the values belong to. Mend: fit and predict values on the new returns and run `regrasp advantages`, "
            "or name the returns to use with --returns TAG."
        )
        raise SidecarError(message)
    return returns
