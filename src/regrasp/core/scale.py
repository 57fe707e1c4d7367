"""The one place where returns and advantages change their unit.

A return is a point and an advantage is a difference: they convert differently, and only here.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from regrasp.core.errors import SidecarError, listing

ScaleScope = Literal["task", "global"]
"""Whether one scale serves each task (the paper) or all data (RLinf)."""

_EVERY_TASK = "*"


@dataclass(frozen=True)
class ReturnScale:
    """The range of returns that is mapped to [-1, 0].

    Attributes:
        low: The least return, in reward units; becomes -1. An array holds one scale for each row.
        high: The greatest return, in reward units; becomes 0. Above ``low``.
    """

    low: float | np.ndarray
    high: float | np.ndarray

    def __post_init__(self) -> None:
        """Refuse a range that is empty or not finite."""
        if not np.all(np.isfinite(self.low) & np.isfinite(self.high) & (np.asarray(self.low) < self.high)):
            message = f"A return scale needs finite low < high; found low {self.low}, high {self.high}."
            raise SidecarError(message)

    @property
    def width(self) -> float | np.ndarray:
        """``high - low``, in reward units."""
        return self.high - self.low

    def to_unit(self, returns: np.ndarray) -> np.ndarray:
        """Map returns (points, reward units) to the unit in which values live, [-1, 0]."""
        return (returns - self.high) / self.width

    def from_unit(self, unit: np.ndarray) -> np.ndarray:
        """Map unit values back to returns, in reward units."""
        return unit * self.width + self.high

    def difference_to_unit(self, differences: np.ndarray) -> np.ndarray:
        """Map differences of returns (advantages, sums of rewards) to the unit: no offset."""
        return differences / self.width

    def difference_from_unit(self, unit: np.ndarray) -> np.ndarray:
        """Map differences in the unit back to reward units."""
        return unit * self.width


@dataclass(frozen=True)
class ScaleSet:
    """The scales of a run: one for each task, or one for all of them."""

    scope: ScaleScope
    scales: dict[str, ReturnScale]

    @classmethod
    def single(cls, scale: ReturnScale) -> "ScaleSet":
        """Return the set in which ``scale`` serves every task."""
        return cls("global", {_EVERY_TASK: scale})

    def for_task(self, task: str) -> ReturnScale:
        """Return the scale of ``task``; a SidecarError names a task that has none."""
        key = _EVERY_TASK if self.scope == "global" else task
        try:
            return self.scales[key]
        except KeyError:
            message = (
                f"There is no return scale for the task {task!r}; it was made for: {listing(map(repr, self.scales))}. "
                "Mend: run `regrasp returns` (and `regrasp value fit`) over all datasets of the run together."
            )
            raise SidecarError(message) from None

    def for_rows(self, tasks: list[str], lengths: np.ndarray) -> ReturnScale:
        """Return one scale for every frame of episodes with these tasks and lengths, one after the other."""
        scales = [self.for_task(task) for task in tasks]
        low, high = [float(scale.low) for scale in scales], [float(scale.high) for scale in scales]
        return ReturnScale(np.repeat(low, lengths), np.repeat(high, lengths))

    def to_json(self) -> dict[str, object]:
        """Return the JSON form that provenance and checkpoints hold."""
        return {"scope": self.scope, "scales": {task: [s.low, s.high] for task, s in self.scales.items()}}

    @classmethod
    def from_json(cls, data: dict) -> "ScaleSet":
        """Read what ``to_json`` wrote."""
        return cls(data["scope"], {task: ReturnScale(low, high) for task, (low, high) in data["scales"].items()})

    def differs_from(self, other: "ScaleSet", tasks: list[str]) -> str | None:
        """Return the first task for which the two sets give other numbers, in words, or None."""
        for task in tasks:
            mine, theirs = self.for_task(task), other.for_task(task)
            if mine != theirs:
                return f"task {task!r}: [{mine.low:g}, {mine.high:g}] against [{theirs.low:g}, {theirs.high:g}]"
        return None
