"""The thresholds that make labels of advantages: a quantile of a pool of frames, for each task or for all data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from regrasp.core.errors import ConfigError, listing
from regrasp.core.outcome import Source
from regrasp.core.scale import ScaleScope
from regrasp.data.index import EpisodeIndex
from regrasp.data.storage import Spool
from regrasp.recap.frames import Batch, Part
from regrasp.rl.labels import Ties, positive_quantile
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


@dataclass(frozen=True, kw_only=True)
class Scopes:
    """What has a threshold of its own: each task, or all data together."""

    names: list[str]

    @property
    def together(self) -> bool:
        """Whether one threshold serves all data."""
        return self.names == ["*"]

    @cached_property
    def _codes(self) -> dict[str, int]:
        return {name: code for code, name in enumerate(self.names)}

    def code(self, task: str) -> int:
        """The position of a task's scope in ``names``."""
        return 0 if self.together else self._codes[task]

    def codes(self, index: EpisodeIndex) -> np.ndarray:
        """The scope of every episode; -1 for one whose task has no labels in this run."""
        return np.array([0 if self.together else self._codes.get(task, -1) for task in index.task], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """What an advantage has to exceed, by scope; NaN where nothing needs a threshold. ``pooled`` counts its frames."""

    scopes: Scopes
    values: np.ndarray
    pooled: np.ndarray

    def of(self, task: str) -> float:
        """The threshold of a task."""
        return float(self.values[self.scopes.code(task)])


def find_thresholds(labellings: list[Labelling], settings: LabelSettings) -> Thresholds:
    """The quantile of the pooled advantages of each scope; NaN where nothing is pooled and nothing needs it.

    Raises:
        ConfigError: A task has frames that need a threshold, and none in the pool.
    """
    tasks = sorted({task for item in labellings for task in item.part.tasks})
    scopes = Scopes(names=["*"] if settings.scope == "global" else tasks)
    spool = Spool()
    for item in labellings:
        part = item.part
        if settings.pool == "rollouts" and part.dataset.source is Source.DEMO:
            continue
        code = scopes.codes(part.index)
        for batch in item.batches(True):
            groups = np.repeat(code[batch.positions], batch.length)
            values = batch.columns["advantage_continuous"]
            if settings.pool == "rollouts" and batch.correction is not None:
                groups, values = groups[~batch.correction], values[~batch.correction]
            spool.add(groups, values)
    pooled = np.zeros(len(scopes.names), dtype=np.int64)
    pooled[: len(spool.counts)] = spool.counts
    quantile = positive_quantile(settings.positive_fraction)
    values = stream_quantiles(spool.read, pooled, quantile)
    spool.close()
    _refuse_empty_pools(labellings, settings, scopes, pooled)
    return Thresholds(scopes=scopes, values=values, pooled=pooled)


def _refuse_empty_pools(
    labellings: list[Labelling], settings: LabelSettings, scopes: Scopes, pooled: np.ndarray
) -> None:
    """A task without frames in the pool has no threshold; which is fine where all its frames are forced positive."""
    for item in labellings:
        forced = settings.demos_positive and item.part.dataset.source is Source.DEMO
        lacking = [task for task in item.part.tasks if pooled[scopes.code(task)] == 0]
        if lacking and not forced:
            message = (
                f"'{item.part.dataset.name}' has frames of {listing(map(repr, lacking))}, for which the pool "
                f"({settings.pool}) has no frame to set a threshold by. Mend: --pool all or --scope global."
            )
            raise ConfigError(message)
