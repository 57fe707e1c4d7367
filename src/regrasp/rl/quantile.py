"""Exact quantiles of a stream that is too long to hold, group by group.

The values are read a few times. Each reading narrows the order statistics that are wanted to a bin a 65,536th as wide, until
what lies in the bin fits in memory. The result is numpy's: linear between the two neighbours.
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float, Int, UInt64

_BITS = 16
_ENOUGH = 1 << 16

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
        self.histogram = np.zeros(1 << _BITS, dtype=np.int64)
        self.kept: list[np.ndarray] = []
        self.above = np.inf

    @property
    def collects(self) -> bool:
        return self.inside <= _ENOUGH or self.shift == 0

    def feed(self, values: np.ndarray) -> None:
        """Take a block of the group's values in this reading."""
        keys = _sortable(values)
        if self.shift < 64:
            within = (keys >> np.uint64(self.shift)) == np.uint64(self.prefix)
            greater = values[(keys >> np.uint64(self.shift)) > np.uint64(self.prefix)]
            self.above = min(self.above, greater.min(initial=np.inf))
            keys, values = keys[within], values[within]
        if self.shift == 0:
            self.kept = self.kept or [values[:1]]
        elif self.collects:
            self.kept.append(values)
        else:
            bins = (keys >> np.uint64(self.shift - _BITS)) & np.uint64((1 << _BITS) - 1)
            self.histogram += np.bincount(bins.astype(np.int64), minlength=1 << _BITS)

    def narrow(self) -> None:
        """Go to the bin that holds the lower rank."""
        cumulative = np.cumsum(self.histogram)
        chosen = int(np.searchsorted(cumulative, self.rank - self.below, side="right"))
        self.below += int(cumulative[chosen] - self.histogram[chosen])
        self.inside = int(self.histogram[chosen])
        self.prefix, self.shift = (self.prefix << _BITS) | chosen, self.shift - _BITS
        self.histogram[:] = 0

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
        One value per group; NaN for a group without rows. Memory is 0.5 MiB per group, whatever the stream's length.
    """
    searches = {group: _Search(int(count), quantile) for group, count in enumerate(counts) if count}
    done: dict[int, float] = {}
    while len(done) < len(searches):
        open_searches = {group: search for group, search in searches.items() if group not in done}
        for groups, values in stream():
            for group in np.unique(groups):
                if int(group) in open_searches:
                    open_searches[int(group)].feed(values[groups == group])
        for group, search in open_searches.items():
            if search.collects:
                done[group] = search.value()
            else:
                search.narrow()
    return np.array([done.get(group, np.nan) for group in range(len(counts))])
