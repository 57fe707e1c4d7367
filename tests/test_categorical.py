"""The value's 201 atoms: worked targets, and what two-hot and expectation undo of each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrasp.rl.categorical import ATOMS, atoms, expectation, two_hot


def dense(targets: np.ndarray) -> np.ndarray:
    lower, upper_weight = two_hot(targets)
    weights = np.zeros((len(targets), ATOMS))
    rows = np.arange(len(targets))
    weights[rows, lower] += 1 - upper_weight
    weights[rows, lower + 1] += upper_weight
    return weights


@pytest.mark.parametrize(
    ("target", "weights"),
    [
        (-0.4975, {100: 0.5, 101: 0.5}),  # (1 - 0.4975) / 0.005 = 100.5
        (-0.123, {175: 0.6, 176: 0.4}),  # 0.877 / 0.005 = 175.4
        (-1 / 300, {199: 2 / 3, 200: 1 / 3}),  # 200 - 200/300 = 199.333
        (0.0, {200: 1.0}),
        (-1.0, {0: 1.0}),
        (-0.005, {199: 1.0}),
        (-0.29, {142: 1.0}),  # 0.71 / 0.005 = 141.99999999999997 in float64: still the atom
    ],
)
def test_worked_targets(target: float, weights: dict[int, float]):
    found = dense(np.array([target]))[0]
    assert np.flatnonzero(found).tolist() == sorted(weights)
    assert found[sorted(weights)] == pytest.approx([weights[atom] for atom in sorted(weights)])


def test_the_atoms_are_a_200th_apart_from_minus_one_to_zero():
    assert (len(atoms()), atoms()[0], atoms()[200]) == (ATOMS, -1.0, 0.0) == (201, -1.0, 0.0)
    assert atoms()[1] == pytest.approx(-0.995)
    np.testing.assert_allclose(np.diff(atoms()), 0.005)


def test_every_atom_is_its_own_target_with_all_of_the_weight():
    np.testing.assert_array_equal(dense(atoms()), np.eye(ATOMS))


def test_the_cross_entropy_of_uniform_logits_is_the_logarithm_of_the_number_of_atoms():
    # -sum_i w_i log(1/201) = log 201 = 5.3033, whatever the weights.
    entropy = -(dense(np.array([-0.123])) * np.log(np.full(ATOMS, 1 / ATOMS))).sum()
    assert entropy == pytest.approx(5.3033, abs=5e-5)


@given(st.lists(st.floats(-1, 0), min_size=1, max_size=50).map(np.array))
def test_the_mean_of_a_two_hot_target_is_the_target(targets: np.ndarray):
    weights = dense(targets)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1.0)
    np.testing.assert_allclose(expectation(weights), targets, rtol=0, atol=1e-11)


@given(st.floats(-1, 0))
def test_the_two_atoms_are_the_neighbours_of_the_target(target: float):
    (lower,), (weight,) = two_hot(np.array([target]))
    assert 0 <= lower < ATOMS - 1
    assert 0 <= weight <= 1
    assert atoms()[lower] - 1e-9 <= target <= atoms()[lower + 1] + 1e-9


def test_the_expectation_keeps_leading_dimensions():
    probabilities = np.full((2, 3, ATOMS), 1 / ATOMS)
    np.testing.assert_allclose(expectation(probabilities), np.full((2, 3), -0.5))


@pytest.mark.parametrize("target", [0.001, -1.001, float("nan"), -300.0, float("inf")])
def test_a_target_that_is_no_unit_return_is_refused(target: float):
    with pytest.raises(ValueError, match=rf"found {target}\. Convert returns with their ReturnScale"):
        two_hot(np.array([-0.5, target]))
