"""What is known of a judge from its rows: measures with intervals, and the reasons not to use it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from regrasp.rewards import check
from regrasp.rl.statistics import Interval

CHANCE = 0.5
LEAST_OF_EACH = 5
"""Successes and failures for a verdict: a guess prefers 5 of 5 successes once in 32 times, 2 of 2 once in 4."""
_MOST_INVALID = 0.1
"""The largest share of replies that may not parse."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One labelled attempt and what the judge said of it and of its changed copies.

    Attributes:
        row: The judge's row of the attempt as it is; None where it has none or is invalid.
        success: Whether it succeeded.
        score: Its true score, where it is known.
        spoilt: The rows of its spoilt copies, by what was done; invalid ones left out.
        over_time: Progress over ever longer beginnings, forwards, the last being the whole; None where one is invalid.
        over_reversed_time: The same of the attempt played backwards.
    """

    row: Row | None
    success: bool
    score: int | None
    spoilt: dict[str, Row]
    over_time: list[float] | None = None
    over_reversed_time: list[float] | None = None


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """What was found.

    Attributes:
        measures: By name; intervals where chance decides, None where a measure is undefined.
        reasons: Why the judge is not shown to be usable: none where it is.
        held_out: The half of the attempts that the calibration was judged on, where there are enough.
    """

    measures: dict[str, Any]
    reasons: list[str]
    held_out: check.HeldOut | None


def assess(
    evidence: list[Evidence], success_at: float, controls: tuple[str, ...], *, replies: int, invalid: int
) -> Assessment:
    """Measure a judge.

    Args:
        evidence: The labelled attempts.
        success_at: The least score of a success.
        controls: In which ways successes were spoilt.
        replies: How many rows the judge gave, of changed copies too.
        invalid: How many of these did not parse.
    """
    judged = [one for one in evidence if one.row is not None]
    good = np.array([one.success for one in judged], dtype=bool)
    progress = np.array([_progress(one.row) for one in judged], dtype=np.float64)
    area = check.bootstrap(check.auroc, progress, good)
    measures: dict[str, Any] = {
        "attempts": len(evidence),
        "successes": sum(one.success for one in evidence),
        "invalid": invalid,
        "auroc": area,
        **_outcomes(judged, good, success_at),
        **_scores(judged),
    }
    held_out = check.held_out_calibration(progress, good)
    for name, said in (("", "raw"), ("_after_isotonic", "mapped")):
        measures[f"ece_held_out{name}"] = (
            check.bootstrap(check.calibration_error, getattr(held_out, said), held_out.truth) if held_out else None
        )
    measures |= _order_in_time(judged)
    reasons = []
    if min(int(good.sum()), int((~good).sum())) < LEAST_OF_EACH:
        reasons.append(
            f"{int(good.sum())} successes and {int((~good).sum())} failures are too few to tell, with fewer than "
            f"{LEAST_OF_EACH} of each luck passes"
        )
    if not area.low > CHANCE:
        reasons.append(f"it does not tell successes from failures (AUROC {area})")
    if invalid > _MOST_INVALID * max(replies, 1):
        reasons.append(f"{invalid} of {replies} replies did not parse")
    preferences = {control: _preference(judged, control) for control in controls}
    for control, preferred in preferences.items():
        if not preferred.low > CHANCE:
            reasons.append(f"it does not score successes above the same ones {_words(control)} ({preferred})")
    measures |= {f"preferred_to_{control.replace(' ', '_')}": found for control, found in preferences.items()}
    return Assessment(measures=_plain(measures), reasons=reasons, held_out=held_out)


def _progress(row: Row | None) -> float:
    assert row is not None
    return float(row["progress"])


def _words(control: str) -> str:
    return "under a wrong instruction" if control == "wrong instruction" else control


def _plain(value: Any) -> Any:  # noqa: ANN401 - a JSON value
    """The value as JSON has it: None for what is undefined."""
    if isinstance(value, Interval):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, float):
        return float(value) if np.isfinite(value) else None
    return value


def _outcomes(judged: list[Evidence], good: np.ndarray, success_at: float) -> dict[str, Any]:
    """How scores of at least ``success_at`` do as predictions of success, where the profile gives scores."""
    scores = _given_scores(judged)
    if scores is None:
        return {}
    predicted = scores >= success_at
    counts = check.confusion(predicted, good)

    def accuracy(predicted: np.ndarray, good: np.ndarray) -> float:
        return check.confusion(predicted, good).accuracy

    return {"confusion": dataclasses.asdict(counts), "accuracy": check.bootstrap(accuracy, predicted, good)}


def _given_scores(judged: list[Evidence]) -> np.ndarray | None:
    scores = [one.row["score"] for one in judged if one.row is not None]
    return np.array(scores, dtype=np.int64) if scores and None not in scores else None


def _scores(judged: list[Evidence]) -> dict[str, Any]:
    """Scores against true ones, over the attempts of which these are known."""
    known = [one for one in judged if one.score is not None]
    scores = _given_scores(known)
    if scores is None:
        return {}
    true = np.array([one.score for one in known], dtype=np.int64)
    expected = np.array([one.row["expected_score"] for one in known if one.row is not None], dtype=np.float64)

    def tau(kind: int) -> Interval:
        return check.bootstrap(lambda a, b: check.kendall(a, b)[kind], expected, true.astype(np.float64))

    return {
        "scored_attempts": len(known),
        "mae": check.bootstrap(check.mean_absolute_error, scores.astype(np.float64), true.astype(np.float64)),
        "quadratic_kappa": check.bootstrap(check.quadratic_kappa, scores, true),
        "tau_a": tau(0),
        "tau_b": tau(1),
    }


def _order_in_time(judged: list[Evidence]) -> dict[str, Any]:
    """Value-order correlations of the successes, forwards and backwards, averaged over those where it is defined."""
    measures: dict[str, Any] = {}
    for name, suffix in (("over_time", ""), ("over_reversed_time", "_reversed")):
        curves = [getattr(one, name) for one in judged if one.success and getattr(one, name) is not None]
        for kind, measure in (("spearman", check.voc_spearman), ("pearson", check.voc_pearson)):
            found = np.array([measure(np.array(curve, dtype=np.float64)) for curve in curves])
            if len(found):
                measures[f"voc_{kind}{suffix}"] = check.bootstrap(check.mean_of_defined, found)
                measures[f"voc_{kind}{suffix}_undefined"] = int(np.isnan(found).sum())
    return measures


def _preference(judged: list[Evidence], control: str) -> Interval:
    """How often a success is scored above its own spoilt copy."""
    pairs = [(_progress(one.row), _progress(one.spoilt[control])) for one in judged if control in one.spoilt]
    real, spoilt = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return check.bootstrap(check.preference, real, spoilt)
