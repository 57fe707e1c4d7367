"""Rewards, returns and values of a dataset's frames, batch by batch, and the advantages that follow from them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from regrasp.core.errors import ConfigError, NonFiniteData, SidecarError, listing, nearest
from regrasp.core.scale import ReturnScale, ScaleScope, ScaleSet
from regrasp.data.columns import ColumnStream
from regrasp.data.dataset import Dataset
from regrasp.data.index import EpisodeIndex
from regrasp.data.sidecar import Sidecar
from regrasp.recap.returns import episode_batches
from regrasp.recap.selection import tell
from regrasp.rl.advantage import FailureEnd, discount_factor, failure_bootstrap, lookahead_sums


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """What an advantage depends on besides rewards and values; None where a file that holds advantages does not say."""

    lookahead: int | None
    discount: float | None
    discount_next_value: bool
    failure_end: FailureEnd


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Whole episodes, one row a frame. Advantage, values and ``reward_sum`` are in the unit, the others in frames."""

    positions: np.ndarray
    length: np.ndarray
    columns: dict[str, np.ndarray]
    """The numeric columns of the advantages sidecar."""
    correction: np.ndarray | None
    """True for the frames a person drove; None where the dataset does not say."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One dataset of a run, and which of its episodes get labels."""

    dataset: Dataset
    keep: np.ndarray
    scales: ScaleSet
    correction_column: str | None
    rows: int

    @cached_property
    def index(self) -> EpisodeIndex:
        """The dataset's episodes."""
        return self.dataset.index()

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks of the episodes that get labels, sorted."""
        return sorted({self.index.task[position] for position in self.keep})

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (positions, lengths) of about ``rows`` frames."""
        for batch in episode_batches(self.index.length[self.keep], self.rows):
            yield self.keep[batch], self.index.length[self.keep[batch]]

    def corrections(self) -> Callable[[int], np.ndarray | None]:
        """Return a function that gives the next rows' corrections."""
        if self.correction_column is None:
            return lambda rows: None
        chosen = None if len(self.keep) == len(self.index.length) else self.index.episode_index[self.keep].tolist()
        name = self.correction_column
        stream = self.dataset.stream([name], chosen)
        return lambda rows: _flags(stream.take(rows)[name], self.dataset, name)

    def keys(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The key columns of some episodes."""
        episode, frame = self.index.keys(positions)
        return {"episode_index": episode, "frame_index": frame}


def _flags(values: np.ndarray, dataset: Dataset, name: str) -> np.ndarray:
    if values.dtype == object or values.ndim > 1 or not np.isin(values, (0, 1)).all():
        message = (
            f"'{dataset.path}' has values other than 0 and 1 (or true and false) in {name!r}, which marks corrections. "
            "Mend: name another column with --correction-column, or correct this one."
        )
        raise SidecarError(message)
    return values.astype(bool)


def computed(
    part: Part, settings: AdvantageSettings, *, rewards: Sidecar, returns: Sidecar, values: Sidecar, value_column: str
) -> Iterator[Batch]:
    """Advantages from rewards and values; the one place where a stage computes them.

    Args:
        part: The dataset.
        settings: Lookahead and discount.
        rewards: The returns sidecar whose ``reward`` counts.
        returns: The sidecar whose ``return`` is passed on (the same, or the advantages that are relabelled).
        values: The sidecar that holds the values, in the unit.
        value_column: Its column, ``value`` or ``value_current``.
    """
    assert settings.lookahead is not None and settings.discount is not None
    same = rewards is returns
    reward_rows = rewards.stream(["reward", "return"] if same else ["reward"], part.keep)
    return_rows = reward_rows if same else returns.stream(["return"], part.keep)
    value_rows = return_rows if returns is values else values.stream([value_column], part.keep)
    if returns is values:
        return_rows = value_rows = values.stream(["return", value_column], part.keep)
    corrections = part.corrections()
    for positions, length in part.batches():
        rows = int(length.sum())
        taken = _take_all({id(s): s for s in (reward_rows, return_rows, value_rows)}, rows)
        reward = taken["reward"].astype(np.float64)
        value = taken[value_column].astype(np.float64)
        _check_finite(part, positions, {"reward": reward, value_column: value})
        scale = part.scales.for_rows([part.index.task[p] for p in positions], length)
        raw = scale.from_unit(value)
        after = failure_bootstrap(reward, raw, length) if settings.failure_end == "bounded" else 0.0
        sums = lookahead_sums(
            reward, raw, length, lookahead=settings.lookahead, discount=settings.discount, bootstrap=after
        )
        factor = discount_factor(sums.steps, settings.discount) if settings.discount_next_value else 1.0
        advantage = scale.difference_to_unit(sums.reward_sum + factor * sums.value_next - raw)
        columns = {
            **part.keys(positions),
            "num_valid_rewards": sums.steps,
            "advantage_continuous": advantage,
            "return": taken["return"].astype(np.float64),
            "value_current": value,
            "value_next": scale.to_unit(sums.value_next),
            "reward_sum": scale.difference_to_unit(sums.reward_sum),
            "reward_sum_raw": sums.reward_sum,
        }
        yield Batch(positions=positions, length=length, columns=columns, correction=corrections(rows))


def stored(part: Part, source: Sidecar, *, only_advantage: bool) -> Iterator[Batch]:
    """Advantages as they were written, for new thresholds; only they themselves where that is enough."""
    names = ["advantage_continuous"]
    if not only_advantage:
        names += ["num_valid_rewards", "return", "value_current", "value_next", "reward_sum", "reward_sum_raw"]
    stream = source.stream(names, part.keep)
    corrections = part.corrections()
    for positions, length in part.batches():
        rows = int(length.sum())
        columns = {**part.keys(positions), **stream.take(rows)}
        _check_finite(part, positions, {"advantage_continuous": columns["advantage_continuous"]})
        yield Batch(positions=positions, length=length, columns=columns, correction=corrections(rows))


def _take_all(streams: dict[int, ColumnStream], rows: int) -> dict[str, np.ndarray]:
    taken: dict[str, np.ndarray] = {}
    for stream in streams.values():
        taken |= stream.take(rows)
    return taken


def _check_finite(part: Part, positions: np.ndarray, columns: dict[str, np.ndarray]) -> None:
    for name, values in columns.items():
        bad = ~np.isfinite(values)
        if bad.any():
            episode, frame = part.index.keys(positions)
            message = (
                f"The {name} of '{part.dataset.name}', episode {episode[bad][0]}, frame {frame[bad][0]}, is "
                f"{values[bad][0]}. Mend: make that sidecar again."
            )
            raise NonFiniteData(message)


def kept_positions(dataset: Dataset, excluded: set[int]) -> np.ndarray:
    """The positions of the episodes that were not left out."""
    numbers = dataset.index().episode_index
    return np.flatnonzero(~np.isin(numbers, list(excluded))).astype(np.int64)


def correction_columns(datasets: list[Dataset], chosen: str | None) -> list[str | None]:
    """The column that marks each dataset's corrections: ``chosen``, or the known one that it has, or None.

    Raises:
        ConfigError: No dataset has ``chosen``.
    """
    found = [dataset.correction_column(chosen) for dataset in datasets]
    if chosen is not None and chosen not in found:
        known = list(dict.fromkeys(name for dataset in datasets for name in dataset.columns))
        message = (
            f"--correction-column {chosen}, but no dataset of the run has this column.{nearest(chosen, known)} "
            f"They have: {listing(known, 20)}."
        )
        raise ConfigError(message)
    for dataset, column in zip(datasets, found, strict=True):
        if chosen is not None and column != chosen:
            what = f"its {column!r} marks corrections" if column else "none of its frames counts as a correction"
            tell(f"{dataset.name}: has no column {chosen!r}, so {what}")
    return found


def check_source(dataset: Dataset, sidecar: Sidecar) -> None:
    """Refuse a sidecar that was made when its dataset counted as something else."""
    made_as = sidecar.provenance.config.get("source") if sidecar.provenance else None
    if made_as is not None and made_as != dataset.source:
        message = (
            f"'{sidecar.path}' was made with '{dataset.name}' as {made_as}, and it is now given as {dataset.source}. "
            f"Mend: give it as {made_as}, or run `{sidecar.command}` again with --overwrite."
        )
        raise SidecarError(message)


def common_scales(sidecars: list[tuple[Dataset, Sidecar]], wanted: ScaleScope | None) -> tuple[ScaleSet, str]:
    """The scale of a run, from what its returns say of themselves.

    Returns:
        The scales, and where they come from, in words.

    Raises:
        SidecarError: Two datasets were scaled differently.
        ConfigError: ``wanted`` is not how the returns were scaled.
    """
    known = [
        (dataset, s, ScaleSet.from_json(s.provenance.scale))
        for dataset, s in sidecars
        if s.provenance and s.provenance.scale
    ]
    if len(known) < len(sidecars):
        return _scales_from_returns(sidecars, wanted or "global")
    merged = ScaleSet(known[0][2].scope, {})
    for dataset, sidecar, scales in known:
        if wanted is not None and scales.scope != wanted:
            message = (
                f"--scale {wanted}, but '{sidecar.path}' was scaled per {scales.scope}. Mend: run `regrasp returns "
                f"--scale {wanted}` again, or leave --scale out."
            )
            raise ConfigError(message)
        for task, scale in scales.scales.items():
            if scales.scope != merged.scope or merged.scales.setdefault(task, scale) != scale:
                message = (
                    f"The returns of '{dataset.name}' and of '{known[0][0].name}' were made in different runs: their "
                    "scales differ. Mend: run `regrasp returns` over all datasets of this run together."
                )
                raise SidecarError(message)
    return merged, "the returns"


def _scales_from_returns(sidecars: list[tuple[Dataset, Sidecar]], scope: ScaleScope) -> tuple[ScaleSet, str]:
    """Low is the least return in the scope and high is 0, or the greatest return where that is above 0."""
    bounds: dict[str, tuple[float, float]] = {}
    for dataset, sidecar in sidecars:
        index, keep = dataset.index(), kept_positions(dataset, sidecar.excluded)
        stream = sidecar.stream(["return"], keep)
        for position in keep:
            values = stream.take(int(index.length[position]))["return"]
            key = "*" if scope == "global" else index.task[position]
            low, high = bounds.get(key, (0.0, 0.0))
            bounds[key] = (min(low, float(values.min())), max(high, float(values.max())))
    scales = ScaleSet(scope, {key: ReturnScale(low, high) for key, (low, high) in bounds.items()})
    return scales, f"the least and greatest returns ({scope}), since not all files say their scale"


def common_discount(sidecars: list[tuple[Dataset, Sidecar]], wanted: float | None) -> float:
    """The discount that the returns were made with.

    Raises:
        ConfigError: They differ from one another or from ``wanted``, or the files do not tell.
    """
    found = {_discount(dataset, sidecar): sidecar for dataset, sidecar in sidecars}
    known = [value for value in found if value is not None]
    if len(known) > 1 or (wanted is not None and known and known[0] != wanted):
        said = listing(f"{value:g} in '{found[value].path}'" for value in known)
        message = (
            f"The returns were made with gamma {said}{f', and --gamma is {wanted:g}' if wanted is not None else ''}. "
            "Mend: run `regrasp returns` over all datasets with one gamma."
        )
        raise ConfigError(message)
    if not known and wanted is None:
        message = (
            f"'{sidecars[0][1].path}' does not say its discount, and it cannot be told from its rows. Mend: give "
            "--gamma."
        )
        raise ConfigError(message)
    return wanted if wanted is not None else known[0]


def _discount(dataset: Dataset, sidecar: Sidecar) -> float | None:
    """Gamma from the provenance, else from G_t = r_t + gamma G_{t+1} over the first episode that tells."""
    if sidecar.provenance is not None and "gamma" in sidecar.provenance.config:
        return float(sidecar.provenance.config["gamma"])
    index, keep = dataset.index(), kept_positions(dataset, sidecar.excluded)
    stream = sidecar.stream(["return", "reward"], keep)
    for position in keep:
        rows = stream.take(int(index.length[position]))
        returns, reward = rows["return"].astype(np.float64), rows["reward"].astype(np.float64)
        if len(returns) > 1 and np.abs(returns[1:]).max() > 0:
            t = int(np.argmax(np.abs(returns[1:])))
            return round(float((returns[t] - reward[t]) / returns[t + 1]), 5)
    return None
