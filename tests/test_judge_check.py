"""The measures of a judge, worked by hand or against scipy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from regrasp.rewards.check import (
    auroc,
    bootstrap,
    calibration_error,
    confusion,
    fit_calibration,
    held_out_calibration,
    kendall,
    mean_absolute_error,
    mean_of_defined,
    pearson,
    preference,
    quadratic_kappa,
    reliability,
    spearman,
    voc_pearson,
    voc_spearman,
)

GOOD = np.array([True, True, False, False])


def test_confusion_and_accuracy():
    found = confusion(np.array([True, False, True, False]), GOOD)
    assert (found.true_positive, found.false_negative, found.false_positive, found.true_negative) == (1, 1, 1, 1)
    assert found.accuracy == 0.5


def test_auroc_counts_ties_half():
    # pairs (success, failure): 4>3, 4>2, 3=3, 3>2: 3.5 of 4
    assert auroc(np.array([4.0, 3.0, 3.0, 2.0]), GOOD) == 3.5 / 4
    assert auroc(np.ones(4), GOOD) == 0.5
    assert math.isnan(auroc(np.ones(2), np.array([True, True])))


def test_quadratic_kappa_by_hand():
    # pairs (1,1), (5,5), (1,5), (5,5): observed disagreement 16. Frequencies of 1 and 5: 2, 2 and 1, 3 of 4, so that by
    # chance 16*(2*3/4 + 2*1/4) = 32 are expected: 1 - 16/32
    assert quadratic_kappa(np.array([1, 5, 1, 5]), np.array([1, 5, 5, 5])) == pytest.approx(0.5)
    assert quadratic_kappa(np.array([1, 3, 5]), np.array([1, 3, 5])) == 1
    assert math.isnan(quadratic_kappa(np.array([3, 3]), np.array([3, 3])))


def test_mean_absolute_error():
    assert mean_absolute_error(np.array([1.0, 4.5]), np.array([2.0, 5.0])) == 0.75


def test_value_order_correlation_is_of_two_kinds():
    rising = np.array([0.0, 0.1, 0.2, 1.0])
    assert voc_spearman(rising) == pytest.approx(1)
    # deviations of time -1.5 -.5 .5 1.5, of progress -.325 -.225 -.125 .675: 1.55 / sqrt(5 * .6275)
    assert voc_pearson(rising) == pytest.approx(1.55 / math.sqrt(5 * 0.6275))
    assert voc_spearman(rising[::-1].copy()) == pytest.approx(-1)
    assert math.isnan(voc_spearman(np.ones(4)))


def test_taus_differ_among_ties():
    # pairs: (0,1) tied in a; (0,2) and (1,2) agree: 2 of 3; tau-b = 2/sqrt(2*3)
    found = kendall(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0]))
    assert found == pytest.approx((2 / 3, 2 / math.sqrt(6)))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=3, max_size=30))
def test_correlations_are_scipys(pairs: list[tuple[int, int]]):
    a, b = np.array(pairs, dtype=np.float64).T
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert math.isnan(pearson(a, b))
        return
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert pearson(a, b) == pytest.approx(stats.pearsonr(a, b).statistic)
    assert kendall(a, b)[1] == pytest.approx(stats.kendalltau(a, b).statistic)


def test_calibration_error_by_hand():
    # bins of 0.1: [.05, .05] with truth 0, 1: gap |.5 - .05| = .45; [.95] with truth 1: .05; (2*.45 + 1*.05)/3
    found = calibration_error(np.array([0.05, 0.05, 0.95]), np.array([False, True, True]))
    assert found == pytest.approx((2 * 0.45 + 0.05) / 3)


def test_the_calibration_map_rises():
    # shares 1, 0, 1 at 0.1, 0.5, 0.9: the first two are pooled to 0.5
    found = fit_calibration(np.array([0.1, 0.5, 0.9]), np.array([True, False, True]))
    assert found.probability.tolist() == [0.5, 0.5, 1.0]
    assert found(np.array([0.0, 0.3, 0.7, 2.0])) == pytest.approx([0.5, 0.5, 0.75, 1.0])


def test_a_map_is_judged_on_the_half_that_it_has_not_seen():
    random = np.random.default_rng(0)
    truth = random.random(400) < 0.5
    progress = np.where(truth, 0.6, 0.4) + 0.05 * random.standard_normal(400)  # ranks well, and is far too modest
    found = held_out_calibration(progress, truth)
    assert found is not None
    assert abs(len(found.truth) - 200) <= 1
    assert calibration_error(found.raw, found.truth) > 0.3
    assert calibration_error(found.mapped, found.truth) < 0.1
    assert found.mapped.tolist() == found.calibration(found.raw).tolist()
    assert held_out_calibration(np.array([0.5, 0.6]), np.array([True, True])) is None


def test_reliability_counts_what_was_said_and_what_was_true():
    # [0, .1): .05 and .07, one true; [.9, 1]: .95 and 1.0, both true
    low, high = reliability(np.array([0.05, 0.95, 0.07, 1.0]), np.array([False, True, True, True]))
    assert (low.count, low.share.value, low.probability) == (2, 0.5, pytest.approx(0.06))
    assert (high.count, high.share.value, high.probability) == (2, 1.0, pytest.approx(0.975))
    # Wilson for 1 of 2, z = 1.96: (.5 + .9604 -+ 1.96 sqrt(.125 + .2401)) / 2.9208
    assert (low.share.low, low.share.high) == pytest.approx((0.0945, 0.9055), abs=1e-4)


def test_a_mean_leaves_out_what_is_undefined():
    assert mean_of_defined(np.array([1.0, np.nan, 2.0])) == 1.5
    assert math.isnan(mean_of_defined(np.array([np.nan])))


def test_an_interval_holds_its_value_and_is_the_same_again():
    random = np.random.default_rng(1)
    truth = random.random(60) < 0.5
    scores = truth + random.standard_normal(60)
    found = bootstrap(auroc, scores, truth, samples=200)
    assert found.low < found.value < found.high
    assert found == bootstrap(auroc, scores, truth, samples=200)


def test_preference_counts_ties_half():
    assert preference(np.array([3.0, 2.0, 1.0]), np.array([1.0, 2.0, 2.0])) == 0.5
