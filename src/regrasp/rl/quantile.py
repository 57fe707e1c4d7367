"""Exact quantiles of a stream that is too long to hold, group by group.

The values are read a few times. Each reading narrows the order statistics that are wanted to a bin a 65,536th as wide,
until what lies in the bin fits in memory. The result is numpy's: linear between the two neighbours.
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float, Int, UInt64

_BITS = 16
_ENOUGH = 1 << 16
_HELD = 1 << 23
"""Numbers held at a time, at most (but at least one group's); groups that need more wait for another reading."""

Stream = Callable[[], Iterator[tuple[Int[np.ndarray, " R"], Float[np.ndarray, " R"]]]]
"""Starts a new reading; yields (group of each row, value of each row). Groups below 0 are left out."""


class _Search:
    """One group's search for the values of two neighbouring ranks."""

    def __init__(self, count: int, quantile: float) -> None:
        position = (count - 1) * quantile
        self.rank = int(np.floor(position))
        self.fraction = position - self.rank
        self.last = count - 1
        self.prefix, self.shift, self.below, self.inside = 0, 64, 0, count
        self.histogram: np.ndarray | None = None
        self.kept: list[np.ndarray] = []
        self.above = np.inf

    @property
    def collects(self) -> bool:
        return self.inside <= _ENOUGH or self.shift == 0

    @property
    def holds(self) -> int:
        """How many numbers the next reading keeps, at most."""
        return self.inside if self.collects and self.shift else 1 << _BITS

    def feed(self, values: np.ndarray) -> None:
        """Take a block of the group's values in this reading."""
        keys = _sortable(values)
        if self.shift < 64:
            within = (keys >> np.uint64(self.shift)) == np.uint64(self.prefix)
            greater = values[(keys >> np.uint64(self.shift)) > np.uint64(self.prefix)]
            self.above = min(self.above, greater.min(initial=np.inf))
            keys, values = keys[within], values[within]
        if self.collects:
            self.kept.append(values[:1] if self.shift == 0 else values)
        else:
            bins = (keys >> np.uint64(self.shift - _BITS)) & np.uint64((1 << _BITS) - 1)
            counts = np.bincount(bins.astype(np.int64), minlength=1 << _BITS)
            self.histogram = counts if self.histogram is None else self.histogram + counts

    def narrow(self) -> None:
        """Go to the bin that holds the lower rank."""
        assert self.histogram is not None, "the reading gave no row of this group"
        cumulative = np.cumsum(self.histogram)
        chosen = int(np.searchsorted(cumulative, self.rank - self.below, side="right"))
        self.below += int(cumulative[chosen] - self.histogram[chosen])
        self.inside = int(self.histogram[chosen])
        self.prefix, self.shift = (self.prefix << _BITS) | chosen, self.shift - _BITS
        self.histogram = None

    def value(self) -> float:
        """The quantile, once the bin's values were kept."""
        kept = np.sort(np.concatenate(self.kept))
        position = self.rank - self.below
        low = kept[0] if self.shift == 0 else kept[position]
        if self.rank == self.last:
            return float(low)
        inside = self.below + self.inside > self.rank + 1
        high = (low if self.shift == 0 else kept[position + 1]) if inside else self.above
        return float(np.quantile(np.array([low, high]), self.fraction))


def _sortable(values: Float[np.ndarray, " R"]) -> UInt64[np.ndarray, " R"]:
    """Unsigned integers in the order of the float64 values (-0 counts as 0)."""
    bits = (values + 0.0).view(np.uint64)
    negative = (bits >> np.uint64(63)).astype(bool)
    return np.where(negative, ~bits, bits | np.uint64(1 << 63))


def stream_quantiles(stream: Stream, counts: Int[np.ndarray, " G"], quantile: float) -> Float[np.ndarray, " G"]:
    """The quantile of each group of a stream, exactly as ``np.quantile(values, quantile)`` gives it.

    Args:
        stream: Starts a reading; called a few times, with the same rows each time. Values are finite.
        counts: The number of rows of each group.
        quantile: In [0, 1].

    Returns:
        One value per group; NaN for a group without rows. Memory has a bound, whatever the length and the groups.
    """
    searches = {group: _Search(int(count), quantile) for group, count in enumerate(counts) if count}
    done: dict[int, float] = {}
    while len(done) < len(searches):
        turn = _next_turn({group: search for group, search in searches.items() if group not in done})
        for groups, values in stream():
            for group, part in _by_group(groups, values):
                if group in turn:
                    turn[group].feed(part)
        for group, search in turn.items():
            if search.collects:
                done[group] = search.value()
                search.kept = []
            else:
                search.narrow()
    return np.array([done.get(group, np.nan) for group in range(len(counts))])


def _next_turn(waiting: dict[int, _Search]) -> dict[int, _Search]:
    """As many of the searches as may hold numbers in the same reading."""
    held = np.cumsum([search.holds for search in waiting.values()])
    many = max(1, int(np.searchsorted(held, _HELD, side="right")))
    return dict(list(waiting.items())[:many])


def _by_group(
    groups: Int[np.ndarray, " R"], values: Float[np.ndarray, " R"]
) -> Iterator[tuple[int, Float[np.ndarray, " _"]]]:
    """Split a block by group."""
    if not len(groups):
        return
    if groups[0] == groups[-1] and (groups == groups[0]).all():
        yield int(groups[0]), values
        return
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1])
    yield from zip(ordered[cuts].tolist(), np.split(values[order], cuts[1:]), strict=True)
