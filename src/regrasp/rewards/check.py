"""How far a judge can be trusted: its scores against known outcomes, as pure functions.

Every measure is named for exactly what it is, and is NaN where it is undefined, such as an AUROC over successes alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import isotonic_regression
from scipy.stats import rankdata

from regrasp.rl.statistics import Interval, wilson_interval

LEVELS = 5


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """Counts of predicted and true successes."""

    true_positive: int
    false_positive: int
    false_negative: int
    true_negative: int

    @property
    def accuracy(self) -> float:
        """The share of right predictions."""
        right = self.true_positive + self.true_negative
        total = right + self.false_positive + self.false_negative
        return right / total if total else float("nan")


def confusion(predicted: Bool[np.ndarray, " n"], truth: Bool[np.ndarray, " n"]) -> Confusion:
    """Count predictions by what they are and what is true."""
    return Confusion(
        true_positive=int((predicted & truth).sum()),
        false_positive=int((predicted & ~truth).sum()),
        false_negative=int((~predicted & truth).sum()),
        true_negative=int((~predicted & ~truth).sum()),
    )


def auroc(scores: Float[np.ndarray, " n"], truth: Bool[np.ndarray, " n"]) -> float:
    """The probability that a success is scored above a failure, a tie counting half; NaN without one of each."""
    positives = int(truth.sum())
    negatives = len(truth) - positives
    if not positives or not negatives:
        return float("nan")
    ranks = rankdata(scores)
    return float((ranks[truth].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def mean_absolute_error(scores: Float[np.ndarray, " n"], truth: Float[np.ndarray, " n"]) -> float:
    """The mean distance of scores from true ones; NaN for none."""
    return float(np.abs(scores - truth).mean()) if len(scores) else float("nan")


def quadratic_kappa(scores: Int[np.ndarray, " n"], truth: Int[np.ndarray, " n"]) -> float:
    """Cohen's kappa with quadratic weights, of whole scores 1 to 5.

        kappa = 1 - sum_ij w_ij O_ij / sum_ij w_ij E_ij,   w_ij = (i - j)^2

    O counts pairs of scores; E is what independent scores of the same frequencies would give. 1 is full agreement, 0
    that of chance. NaN where both always give one and the same score.
    """
    observed = np.zeros((LEVELS, LEVELS))
    np.add.at(observed, (scores - 1, truth - 1), 1.0)
    expected = np.outer(observed.sum(axis=1), observed.sum(axis=0)) / max(len(scores), 1)
    level = np.arange(LEVELS)
    weight = (level[:, None] - level[None, :]) ** 2
    by_chance = float((weight * expected).sum())
    return 1.0 - float((weight * observed).sum()) / by_chance if by_chance else float("nan")


def pearson(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> float:
    """The linear correlation; NaN where either is constant."""
    da, db = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((da**2).sum() * (db**2).sum()))
    return float((da * db).sum() / scale) if scale > 0 else float("nan")


def spearman(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> float:
    """The linear correlation of ranks, ties sharing their mean rank; NaN where either is constant."""
    return pearson(rankdata(a), rankdata(b))


def voc_spearman(progress: Float[np.ndarray, " t"]) -> float:
    """Value-order correlation of an episode's progress with time, as GVL and VLAC define it: Spearman's."""
    return spearman(progress, np.arange(len(progress), dtype=np.float64))


def voc_pearson(progress: Float[np.ndarray, " t"]) -> float:
    """Value-order correlation of an episode's progress with time, as Robometer defines it: Pearson's."""
    return pearson(progress, np.arange(len(progress), dtype=np.float64))


def mean_of_defined(values: Float[np.ndarray, " n"]) -> float:
    """The mean of the values that are defined; NaN where none is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def kendall(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Kendall's tau-a and tau-b.

        tau_a = (C - D) / P,   tau_b = (C - D) / sqrt((P - T_a)(P - T_b))

    P pairs, of which C agree in order, D do not, and T are tied in one of the two. tau-a never reaches 1 among ties.
    """
    upper = np.triu_indices(len(a), 1)
    da = np.sign(a[:, None] - a[None, :])[upper]
    db = np.sign(b[:, None] - b[None, :])[upper]
    pairs, net = len(da), float((da * db).sum())
    untied = float(np.sqrt(float((da != 0).sum()) * float((db != 0).sum())))
    return net / pairs if pairs else float("nan"), net / untied if untied else float("nan")


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Attempts of like probability.

    Attributes:
        probability: The mean that was said.
        share: How many of them were successes, with the Wilson interval.
        count: How many attempts they are.
    """

    probability: float
    share: Interval
    count: int


def reliability(probability: Float[np.ndarray, " n"], truth: Bool[np.ndarray, " n"], *, bins: int = 10) -> list[Bin]:
    """Return the bins of equal width that hold an attempt, in order: what was said, and what was true."""
    place = np.minimum((probability * bins).astype(np.int64), bins - 1)
    found = []
    for number in np.unique(place):
        members = place == number
        share = wilson_interval(int(truth[members].sum()), int(members.sum()))
        said = float(probability[members].mean())
        found.append(Bin(probability=said, share=share, count=int(members.sum())))
    return found


def calibration_error(probability: Float[np.ndarray, " n"], truth: Bool[np.ndarray, " n"], *, bins: int = 10) -> float:
    """The expected calibration error over bins of equal width.

    ECE = sum_b n_b / n |mean truth in b - mean probability in b|
    """
    if not len(probability):
        return float("nan")
    place = np.minimum((probability * bins).astype(np.int64), bins - 1)
    count = np.bincount(place, minlength=bins)
    gap = np.bincount(place, weights=truth.astype(np.float64) - probability, minlength=bins)
    return float(np.abs(gap).sum() / count.sum())


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A rising map from progress to the probability of success, linear between the progress values it was fitted on."""

    progress: Float[np.ndarray, " k"]
    probability: Float[np.ndarray, " k"]

    def __call__(self, progress: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return the probability of success; beyond what it was fitted on, that of the nearest end."""
        return np.interp(progress, self.progress, self.probability)


def fit_calibration(progress: Float[np.ndarray, " n"], truth: Bool[np.ndarray, " n"]) -> Calibration:
    """Fit the rising map with the least squared error to the outcomes (isotonic regression)."""
    places, back, count = np.unique(progress, return_inverse=True, return_counts=True)
    share = np.bincount(back, weights=truth.astype(np.float64)) / count
    fitted = isotonic_regression(share, weights=count.astype(np.float64)).x
    return Calibration(progress=places, probability=np.asarray(fitted, dtype=np.float64))


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The half of the attempts that a calibration was not fitted on.

    Attributes:
        raw: Their progress, taken as a probability of success.
        mapped: The same through the calibration.
        truth: Whether they succeeded.
        calibration: What was fitted on the other half.
    """

    raw: Float[np.ndarray, " n"]
    mapped: Float[np.ndarray, " n"]
    truth: Bool[np.ndarray, " n"]
    calibration: Calibration


def held_out_calibration(
    progress: Float[np.ndarray, " n"], truth: Bool[np.ndarray, " n"], *, seed: int = 0
) -> HeldOut | None:
    """Fit a calibration on one half of the attempts, and return how it does on the other.

    The halves are drawn within successes and within failures, so that each has its share; None below two of each.
    """
    random = np.random.default_rng(seed)
    fitted_on = np.zeros(len(truth), dtype=bool)
    for kind in (truth, ~truth):
        places = random.permutation(np.flatnonzero(kind))
        if len(places) < 2:
            return None
        fitted_on[places[: len(places) // 2]] = True
    calibration = fit_calibration(progress[fitted_on], truth[fitted_on])
    rest = ~fitted_on
    raw = progress[rest]
    return HeldOut(raw=raw, mapped=calibration(raw), truth=truth[rest], calibration=calibration)


def bootstrap(
    measure: Callable[..., float], *columns: np.ndarray, samples: int = 1000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """A measure of episodes with its percentile bootstrap interval; episodes are drawn again with replacement.

    Draws in which the measure is undefined are left out.
    """
    random = np.random.default_rng(seed)
    count = len(columns[0])
    drawn = []
    for _ in range(samples if count else 0):
        rows = random.integers(0, count, count)
        drawn.append(measure(*(column[rows] for column in columns)))
    kept = np.array([value for value in drawn if np.isfinite(value)])
    tail = (1 - confidence) / 2
    low, high = np.quantile(kept, [tail, 1 - tail]) if len(kept) else (float("nan"), float("nan"))
    return Interval(value=measure(*columns), low=float(low), high=float(high))


def preference(real: Float[np.ndarray, " n"], control: Float[np.ndarray, " n"]) -> float:
    """The share of episodes that are scored above their own controls, a tie counting half; NaN for none."""
    if not len(real):
        return float("nan")
    return float(((real > control) + 0.5 * (real == control)).mean())
