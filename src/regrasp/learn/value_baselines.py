"""What can be said of returns without looking at the robot: one distribution, or one for each stretch of elapsed time.

A value model that is no better than these has learnt nothing that a clock does not know. They are made as strong as
their inputs allow: histograms of the training returns, smoothed, and cut into stretches, as predicts other training
episodes best, one clock for each task where that predicts them better, and medians for the absolute error.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.ndimage import gaussian_filter1d

from regrasp.learn.value_metrics import HeldOut, Predictions
from regrasp.rl.categorical import ATOMS, two_hot

BINS = (50, 12, 25, 100, 200, 400)
"""Stretches of elapsed time, of equal length, over the longest training episode, that are tried; at first 50."""
BANDWIDTHS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Standard deviations of the smoothing, in atoms, that are tried."""
FOLDS = 5
"""Parts of the training episodes in the choice of the smoothing."""
PRIOR_FRAMES = 1.0
"""How many frames the whole training distribution, and a uniform one, count for in each stretch."""


@dataclass(frozen=True)
class Clock:
    """A distribution and a median for each stretch of elapsed time; with one stretch, a constant.

    Attributes:
        stretch: Frames in a stretch; the last one has no end.
        log_probabilities: Of each stretch.
        median: The median training return of each stretch, in the unit.
        loss: Cross-entropy on training episodes left out in turn, in nats, summed over frames.
    """

    stretch: int
    log_probabilities: Float[np.ndarray, "bins 201"]
    median: Float[np.ndarray, " bins"]
    loss: float

    def bins(self, elapsed: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """The stretch of each frame."""
        return np.minimum(elapsed // self.stretch, len(self.median) - 1)


@dataclass(frozen=True)
class TimeBaseline:
    """What is said of frames by their elapsed time: by a clock for each task, or by one for all."""

    clocks: dict[int, Clock]
    otherwise: Clock

    def predict(self, held_out: HeldOut) -> Predictions:
        """Return what the baseline says of the held-out frames."""
        tasks = held_out.frame_task
        log_probabilities = np.empty((len(tasks), ATOMS))
        median = np.empty(len(tasks))
        for task in np.unique(tasks).tolist():
            clock, here = self.clocks.get(task, self.otherwise), tasks == task
            bins = clock.bins(held_out.elapsed[here])
            log_probabilities[here], median[here] = clock.log_probabilities[bins], clock.median[bins]
        return Predictions.of(log_probabilities, held_out.target, median)


def constant_baseline(training: HeldOut) -> TimeBaseline:
    """Fit the best constant: the training returns' smoothed histogram, and their median."""
    return TimeBaseline({}, _fit(training, np.ones(len(training.target), dtype=bool), bins=1))


def elapsed_time_baseline(training: HeldOut) -> TimeBaseline:
    """Fit the best function of elapsed frames and of the task alone."""
    tasks = training.frame_task
    pooled = _best(training, np.ones(len(tasks), dtype=bool))
    clocks = {task: _best(training, tasks == task) for task in np.unique(tasks).tolist()}
    apart = sum(clock.loss for clock in clocks.values())
    return TimeBaseline(clocks if apart < pooled.loss else {}, pooled)


def _best(training: HeldOut, rows: Bool[np.ndarray, " n"]) -> Clock:
    """The clock of these frames, with the stretches that predict episodes left out best."""
    return min((_fit(training, rows, bins) for bins in BINS), key=lambda clock: clock.loss)


def _fit(training: HeldOut, rows: Bool[np.ndarray, " n"], bins: int) -> Clock:
    elapsed, target = training.elapsed[rows], training.target[rows]
    stretch = int(np.ceil((elapsed.max() + 1) / bins))
    place = elapsed // stretch
    bins = int(place.max()) + 1
    counts = np.zeros((FOLDS, bins, ATOMS))
    lower, weight = two_hot(target)
    fold = np.unique(training.episode[rows], return_inverse=True)[1] % FOLDS
    np.add.at(counts, (fold, place, lower), 1 - weight)
    np.add.at(counts, (fold, place, lower + 1), weight)
    whole = counts.sum(axis=0)
    losses = [_cross_validated(counts, whole, bandwidth) for bandwidth in BANDWIDTHS]
    median = np.array([np.median(target[place == b]) if (place == b).any() else np.nan for b in range(bins)])
    filled = np.maximum.accumulate(np.where(np.isnan(median), 0, np.arange(bins)))
    best = int(np.argmin(losses))
    return Clock(stretch, _smoothed(whole, BANDWIDTHS[best]), median[filled], losses[best])


def _cross_validated(
    counts: Float[np.ndarray, "folds bins 201"], whole: Float[np.ndarray, "bins 201"], bandwidth: float
) -> float:
    """Return the cross-entropy of each fold under the histogram of the others, in nats, summed over frames.

    A fold that is all there is has no others, and is judged by a uniform distribution.
    """
    others = (whole - fold for fold in counts)
    return -sum(
        float((fold * _smoothed(rest, bandwidth)).sum())
        for fold, rest in zip(counts, others, strict=True)
        if fold.any()
    )


def _smoothed(counts: Float[np.ndarray, "bins 201"], bandwidth: float) -> Float[np.ndarray, "bins 201"]:
    """Return log-probabilities: smoothed over atoms, and drawn to the whole distribution where there is little data."""
    smooth = gaussian_filter1d(counts, bandwidth, axis=1, mode="reflect")
    whole = smooth.sum(axis=0, keepdims=True)
    prior = (whole + 1 / ATOMS) / (whole + 1 / ATOMS).sum()
    mixed = smooth + PRIOR_FRAMES * prior
    return np.log(mixed / mixed.sum(axis=1, keepdims=True))
