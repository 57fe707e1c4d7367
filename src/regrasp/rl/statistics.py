"""How sure a success rate, a throughput, or a difference of two policies is.

Episodes are the unit of chance: intervals cover which episodes were drawn, not which data or seed trained the policy.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats

RESAMPLES = 10_000
_BATCH = 500


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Three decimals, with the interval in brackets."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def __format__(self, spec: str) -> str:
        """``f"{interval:.2f}"`` is "1.35 [1.20, 1.52]", and "undefined" where the value is; no spec is ``str``."""
        if not spec:
            return str(self)
        if np.isnan(self.value):
            return "undefined"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def wilson_interval(successes: int, episodes: int, confidence: float = 0.95) -> Interval:
    """A success rate with its Wilson score interval, which stays inside [0, 1] and holds for few episodes.

        (p + z²/2n ± z sqrt(p(1−p)/n + z²/4n²)) / (1 + z²/n)

    Args:
        successes: k, from 0 to ``episodes``.
        episodes: n, at least 1.
        confidence: such as 0.95.

    Returns:
        p = k/n and its interval.

    Source:
        Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22, 1927.
    """
    found = stats.binomtest(successes, episodes).proportion_ci(confidence, method="wilson")
    return Interval(successes / episodes, float(found.low), float(found.high))


def throughput(success: Bool[np.ndarray, " E"], steps: Int[np.ndarray, " E"]) -> float:
    """Successes per 1000 environment steps: 1000 Σ success / Σ steps. A failure costs its steps.

    Args:
        success: whether each of E episodes succeeded.
        steps: how many steps each took, at least 1.
    """
    return 1000.0 * float(success.sum()) / float(steps.sum())


def throughput_interval(
    success: Bool[np.ndarray, " E"],
    steps: Int[np.ndarray, " E"],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Successes per 1000 steps with a percentile bootstrap interval over episodes.

    Args:
        success: whether each of E episodes succeeded.
        steps: how many steps each took.
        confidence: such as 0.95.
        resamples: bootstrap samples.
        seed: of the resampling; the same seed gives the same interval.
    """
    counts = _resample(len(success), resamples, seed)
    drawn = 1000.0 * (counts @ success.astype(float)) / (counts @ steps.astype(float))
    return _percentiles(throughput(success, steps), drawn, confidence)


def mcnemar(first: Bool[np.ndarray, " E"], second: Bool[np.ndarray, " E"]) -> float:
    """The exact two-sided p-value that two policies succeed equally often on the same initial states.

    Only episodes in which one succeeded and the other did not count: under equality each falls either way with
    probability 1/2.

    Args:
        first: success of one policy in each of E episodes.
        second: success of the other in the same episodes.

    Returns:
        p in (0, 1]; 1 where the two never differ.

    Source:
        McNemar, Psychometrika 12, 1947, in its exact (binomial) form.
    """
    only_first, only_second = int((first & ~second).sum()), int((~first & second).sum())
    if only_first + only_second == 0:
        return 1.0
    return float(stats.binomtest(only_first, only_first + only_second, 0.5).pvalue)


def success_difference(
    first: Bool[np.ndarray, " E"],
    second: Bool[np.ndarray, " E"],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """How much more often ``first`` succeeds than ``second``, with a bootstrap interval over the shared episodes.

    Args:
        first: success of one policy in each of E episodes.
        second: success of the other in the same episodes.
        confidence: such as 0.95.
        resamples: bootstrap samples.
        seed: of the resampling.
    """
    difference = first.astype(float) - second.astype(float)
    drawn = _resample(len(first), resamples, seed) @ difference / len(first)
    return _percentiles(float(difference.mean()), drawn, confidence)


def throughput_ratio(
    first: tuple[Bool[np.ndarray, " E"], Int[np.ndarray, " E"]],
    second: tuple[Bool[np.ndarray, " E"], Int[np.ndarray, " E"]],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The throughput of ``first`` over that of ``second``, with a bootstrap interval over the shared episodes.

    Args:
        first: success and steps of one policy in each of E episodes.
        second: those of the other in the same episodes.
        confidence: such as 0.95.
        resamples: bootstrap samples.
        seed: of the resampling.

    Returns:
        The ratio and its interval. NaN where ``second`` never succeeds: there is nothing to compare with. The upper end
        is infinite where samples without a success of ``second`` are frequent.
    """
    if not second[0].any():
        return Interval(float("nan"), float("nan"), float("nan"))
    counts = _resample(len(first[0]), resamples, seed)

    def drawn(of: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        return (counts @ of[0].astype(float)) / (counts @ of[1].astype(float))

    above, below = drawn(first), drawn(second)
    ratios = np.divide(above, below, out=np.full_like(above, np.inf), where=below > 0)
    return _percentiles(throughput(*first) / throughput(*second), ratios, confidence)


def _resample(episodes: int, resamples: int, seed: int) -> Float[np.ndarray, "R E"]:
    """How often each episode is drawn in each bootstrap sample of as many episodes."""
    generator = np.random.default_rng(seed)
    uniform = np.full(episodes, 1.0 / episodes)
    parts = [
        generator.multinomial(episodes, uniform, size=min(_BATCH, resamples - start)).astype(np.float32)
        for start in range(0, resamples, _BATCH)
    ]
    return np.concatenate(parts)


def _percentiles(value: float, drawn: Float[np.ndarray, " R"], confidence: float) -> Interval:
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(drawn, [tail, 1.0 - tail], method="closest_observation")
    return Interval(value, float(low), float(high))
