"""What can be said of returns without looking at the robot: one distribution, or one for each stretch of elapsed time.

A value model that is no better than these has learnt nothing that a clock does not know. They are made as strong as
their inputs allow: histograms of the training returns, smoothed by the amount that predicts other training episodes
best, and medians for the absolute error.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.ndimage import gaussian_filter1d

from regrasp.learn.value_metrics import HeldOut, Predictions
from regrasp.rl.categorical import ATOMS, two_hot

BINS = 50
"""Stretches of elapsed time, of equal length, over the longest training episode."""
BANDWIDTHS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Standard deviations of the smoothing, in atoms, that are tried."""
FOLDS = 5
"""Parts of the training episodes in the choice of the smoothing."""
PRIOR_FRAMES = 1.0
"""How many frames the whole training distribution, and a uniform one, count for in each stretch."""


@dataclass(frozen=True)
class TimeBaseline:
    """A distribution and a median for each stretch of elapsed time; with one stretch, a constant.

    Attributes:
        stretch: Frames in a stretch; the last one has no end.
        log_probabilities: Of each stretch.
        median: The median training return of each stretch, in the unit.
    """

    stretch: int
    log_probabilities: Float[np.ndarray, "bins 201"]
    median: Float[np.ndarray, " bins"]

    def predict(self, held_out: HeldOut) -> Predictions:
        """Return what the baseline says of the held-out frames."""
        bins = np.minimum(held_out.elapsed // self.stretch, len(self.median) - 1)
        return Predictions.of(self.log_probabilities[bins], held_out.target, self.median[bins])


def constant_baseline(training: HeldOut) -> TimeBaseline:
    """Fit the best constant: the training returns' smoothed histogram, and their median."""
    return _fit(training, bins=1)


def elapsed_time_baseline(training: HeldOut) -> TimeBaseline:
    """Fit the best function of elapsed frames alone."""
    return _fit(training, bins=BINS)


def _fit(training: HeldOut, bins: int) -> TimeBaseline:
    stretch = int(np.ceil((training.elapsed.max() + 1) / bins))
    place = training.elapsed // stretch
    bins = int(place.max()) + 1
    counts = np.zeros((FOLDS, bins, ATOMS))
    lower, weight = two_hot(training.target)
    fold = training.episode % FOLDS
    np.add.at(counts, (fold, place, lower), 1 - weight)
    np.add.at(counts, (fold, place, lower + 1), weight)
    whole = counts.sum(axis=0)
    losses = [_cross_validated(counts, whole, bandwidth) for bandwidth in BANDWIDTHS]
    median = np.array([np.median(training.target[place == b]) if (place == b).any() else np.nan for b in range(bins)])
    filled = np.maximum.accumulate(np.where(np.isnan(median), 0, np.arange(bins)))
    return TimeBaseline(stretch, _smoothed(whole, BANDWIDTHS[int(np.argmin(losses))]), median[filled])


def _cross_validated(
    counts: Float[np.ndarray, "folds bins 201"], whole: Float[np.ndarray, "bins 201"], bandwidth: float
) -> float:
    """Return the cross-entropy of each fold under the histogram of the others, in nats, summed over frames."""
    others = (whole - fold for fold in counts)
    return -sum(
        float((fold * _smoothed(rest, bandwidth)).sum())
        for fold, rest in zip(counts, others, strict=True)
        if fold.any() and rest.any()
    )


def _smoothed(counts: Float[np.ndarray, "bins 201"], bandwidth: float) -> Float[np.ndarray, "bins 201"]:
    """Return log-probabilities: smoothed over atoms, and drawn to the whole distribution where there is little data."""
    smooth = gaussian_filter1d(counts, bandwidth, axis=1, mode="reflect")
    whole = smooth.sum(axis=0, keepdims=True)
    prior = (whole + 1 / ATOMS) / (whole + 1 / ATOMS).sum()
    mixed = smooth + PRIOR_FRAMES * prior
    return np.log(mixed / mixed.sum(axis=1, keepdims=True))
