"""Labels: strict by default, ties as asked, forced frames positive; and the fraction that comes out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrasp.rl.labels import label, positive_quantile

ADVANTAGES = st.lists(st.floats(-1, 1) | st.sampled_from([0.0, 0.25]), min_size=1, max_size=60).map(np.array)


def test_a_frame_at_the_threshold_is_negative_as_in_the_paper():
    found = label(np.array([0.1, 0.2, 0.3]), 0.2)
    assert found.tolist() == [False, False, True]


def test_a_frame_at_the_threshold_is_positive_as_in_rlinf():
    found = label(np.array([0.1, 0.2, 0.3]), 0.2, ties="positive")
    assert found.tolist() == [False, True, True]


def test_forced_frames_are_positive_below_the_threshold_too():
    forced = np.array([True, False, False])
    assert label(np.array([-9.0, -9.0, 9.0]), 0.0, forced).tolist() == [True, False, True]


def test_every_frame_has_the_threshold_of_its_own_scope():
    assert label(np.array([0.5, 0.5]), np.array([0.4, 0.6])).tolist() == [True, False]


def test_a_scope_without_a_threshold_has_no_positive_frames_but_the_forced():
    # A threshold that could not be found is NaN, and no advantage lies above it.
    found = label(np.array([5.0, 5.0]), np.array([np.nan, np.nan]), np.array([False, True]), ties="positive")
    assert found.tolist() == [False, True]


def test_the_quantile_leaves_the_positive_fraction_above_it():
    assert positive_quantile(0.3) == 0.7
    # Ten different advantages 0..9: the 0.7 quantile is 6.3, and 7, 8 and 9 lie above it.
    advantages = np.arange(10.0)
    assert label(advantages, float(np.quantile(advantages, positive_quantile(0.3)))).sum() == 3


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 30.0, float("nan")])
def test_a_positive_fraction_out_of_range_is_refused(fraction: float):
    with pytest.raises(ValueError, match=f"both excluded; found {fraction}"):
        positive_quantile(fraction)


@given(ADVANTAGES, st.floats(0.01, 0.99))
def test_strict_labels_never_exceed_the_fraction_whatever_the_ties(advantages: np.ndarray, fraction: float):
    threshold = float(np.quantile(advantages, positive_quantile(fraction)))
    positive = int(label(advantages, threshold).sum())
    # At most the ranks above (n - 1) q, of which there are fewer than (n - 1) (1 - q) + 1.
    assert positive < (len(advantages) - 1) * fraction + 1 + 1e-9


@given(ADVANTAGES, st.floats(-1, 1))
def test_the_two_rules_differ_by_the_ties_alone(advantages: np.ndarray, threshold: float):
    strict, loose = label(advantages, threshold), label(advantages, threshold, ties="positive")
    assert (loose ^ strict).tolist() == (advantages == threshold).tolist()


@given(ADVANTAGES, st.floats(-1, 1), st.floats(-1, 1))
def test_a_higher_threshold_never_makes_a_frame_positive(advantages: np.ndarray, first: float, second: float):
    assert (label(advantages, max(first, second)) <= label(advantages, min(first, second))).all()
