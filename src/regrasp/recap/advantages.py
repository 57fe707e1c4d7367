"""Stage 3: an advantage and a label for every frame, from rewards and values."""

import shlex
from dataclasses import dataclass

from regrasp.core.scale import ScaleScope
from regrasp.data.dataset import Dataset
from regrasp.data.outcomes import read_outcomes
from regrasp.data.sidecar import Sidecar, open_sidecar
from regrasp.recap.frames import (
    AdvantageSettings,
    Part,
    check_source,
    common_discount,
    common_scales,
    computed,
    correction_columns,
    kept_positions,
)
from regrasp.recap.labelling import check_ranges, label_datasets, outcomes_of, same_scale
from regrasp.recap.selection import Selection, StageResult, next_command, open_datasets, tell
from regrasp.recap.thresholds import Labelling, LabelSettings, Pool, resolve_pool
from regrasp.rl.advantage import FailureEnd
from regrasp.rl.labels import Ties


@dataclass(frozen=True, kw_only=True)
class AdvantagesConfig(Selection):
    """Compute an advantage and a label for every frame."""

    returns: str
    """The tag of the returns."""
    values: str
    """The tag of the values."""
    tag: str
    """The name of this set of labels: meta/advantages_TAG.parquet."""
    lookahead: int = 50
    """N, in frames."""
    positive_fraction: float = 0.3
    """The share of the pool above the threshold."""
    scope: ScaleScope = "task"
    """Whether each task has a threshold (the paper) or all data share one (RLinf)."""
    pool: Pool = "auto"
    """The frames that set the threshold; auto is the rollouts (without corrections) where there are any, else all."""
    ties: Ties = "negative"
    """What a frame exactly at the threshold is."""
    discount_next_value: bool = True
    """Whether the next value is discounted by gamma^n."""
    failure_end: FailureEnd = "bounded"
    """bounded: a failure that ends sooner than its value said is no good news, so frames that wait for a time limit are
    not positive for it; paid: nothing is left after its last frame, as after a success (the paper, RLinf)."""
    demos_positive: bool = True
    """Whether demonstrations are positive whatever their advantage."""
    corrections_positive: bool = True
    """Whether corrections are positive whatever their advantage."""
    correction_column: str | None = None
    """The column that marks corrections, if it is none of the known ones."""
    scale: ScaleScope | None = None
    """Checked against the returns' own scale; needed only for returns that do not say theirs."""
    gamma: float | None = None
    """Checked against the returns' own discount; needed only for returns that do not say theirs."""
    chunk_rows: int = 1 << 17
    """About how many frames are held at a time."""
    overwrite: bool = False
    """Replace labels of this tag that were made otherwise."""
    dry_run: bool = False
    """Report the labels, and write nothing."""


def run(config: AdvantagesConfig) -> StageResult:
    """Write ``advantages_{tag}.parquet`` and ``mixture_config.yaml`` for every dataset of the run.

    Raises:
        MissingSidecar: There are no returns or values of these tags.
        SidecarError: They do not fit the datasets or one another, or the tag exists with another content.
        ConfigError: A setting is out of range.
    """
    check_ranges(
        lookahead=config.lookahead,
        discount=config.gamma,
        positive_fraction=config.positive_fraction,
        chunk_rows=config.chunk_rows,
    )
    datasets = open_datasets(config)
    labellings, advantage, where = _labellings(config, datasets)
    settings = LabelSettings(
        positive_fraction=config.positive_fraction,
        scope=config.scope,
        pool=resolve_pool(config.pool, labellings),
        ties=config.ties,
        demos_positive=config.demos_positive,
        corrections_positive=config.corrections_positive,
    )
    result = label_datasets(
        labellings,
        advantage,
        settings,
        stage="advantages",
        tag=config.tag,
        overwrite=config.overwrite,
        dry_run=config.dry_run,
    )
    head = (
        f"N {config.lookahead}, gamma {advantage.discount:g}, pool: "
        f"{settings.pool}{' (auto)' if config.pool == 'auto' else ''}, scale from {where}"
    )
    flags = f"--source {shlex.quote(config.tag)} --tag NEW --positive-fraction 0.2"
    following = next_command("relabel", datasets, config, flags)
    return StageResult(lines=[head, *result.lines, f"Other thresholds: {following}"], written=result.written)


def _labellings(config: AdvantagesConfig, datasets: list[Dataset]) -> tuple[list[Labelling], AdvantageSettings, str]:
    """Find what each dataset's labels are made from, and where the scale comes from, in words."""
    returns = [(dataset, open_sidecar(dataset, "returns", config.returns, reader="advantages")) for dataset in datasets]
    values = [open_sidecar(dataset, "values", config.values, reader="advantages") for dataset in datasets]
    for dataset, sidecar in returns:
        check_source(dataset, sidecar)
    scales, where = common_scales(returns, config.scale)
    discount = common_discount(returns, config.gamma)
    advantage = AdvantageSettings(
        lookahead=config.lookahead,
        discount=discount,
        discount_next_value=config.discount_next_value,
        failure_end=config.failure_end,
    )
    labellings = []
    corrections = correction_columns(datasets, config.correction_column)
    for (dataset, reward), value, correction in zip(returns, values, corrections, strict=True):
        part = Part(
            dataset=dataset,
            keep=kept_positions(dataset, reward.excluded),
            scales=scales,
            correction_column=correction,
            rows=config.chunk_rows,
        )
        same_scale(part, value)
        _tell_older_returns(reward, value)
        labellings.append(_labelling(part, advantage, reward, value))
    return labellings, advantage, where


def _tell_older_returns(returns: Sidecar, values: Sidecar) -> None:
    """Say when the values were learnt from other returns than these, though their scale is the same."""
    learnt = values.provenance.notes.get("returns_id") if values.provenance else None
    if learnt is not None and learnt != returns.id:
        tell(f"'{values.path}' was learnt from other returns than '{returns.path}' as it is now; fit and predict again")


def _labelling(part: Part, advantage: AdvantageSettings, returns: Sidecar, values: Sidecar) -> Labelling:
    return Labelling(
        part=part,
        batches=lambda _: computed(
            part, advantage, rewards=returns, returns=returns, values=values, value_column="value"
        ),
        inputs={"returns": returns.id, "values": values.id},
        outcomes=outcomes_of(returns) or recorded_outcomes(part.dataset),
        tags={"returns": returns.tag, "values": values.tag},
    )


def recorded_outcomes(dataset: Dataset) -> dict[str, str]:
    """What a dataset says of its episodes itself; for reports on files that do not record outcomes."""
    return {str(number): outcome.value for number, outcome in read_outcomes(dataset).by_episode.items()}
