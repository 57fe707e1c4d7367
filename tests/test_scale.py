"""Return scales: points and differences convert differently, and each task has its own."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrasp.core.errors import RegraspError, SidecarError
from regrasp.core.scale import ReturnScale, ScaleSet

SCALES = st.builds(lambda low, width: ReturnScale(low, low + width), st.floats(-1e4, 1e3), st.floats(0.5, 1e4))
NUMBERS = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=20).map(np.array)


def test_a_point_is_moved_and_a_difference_is_not():
    # [-300, 100] is 400 wide: -300 -> -1, -100 -> -0.5, 100 -> 0; a difference of 100 is a quarter.
    scale = ReturnScale(-300.0, 100.0)
    assert scale.to_unit(np.array([-300.0, -100.0, 100.0])).tolist() == [-1.0, -0.5, 0.0]
    assert scale.from_unit(np.array([-1.0, -0.5, 0.0])).tolist() == [-300.0, -100.0, 100.0]
    assert scale.difference_to_unit(np.array([100.0, -400.0])).tolist() == [0.25, -1.0]
    assert scale.difference_from_unit(np.array([0.25, -1.0])).tolist() == [100.0, -400.0]


@given(SCALES, NUMBERS)
def test_what_goes_to_the_unit_comes_back(scale: ReturnScale, numbers: np.ndarray):
    np.testing.assert_allclose(scale.from_unit(scale.to_unit(numbers)), numbers, atol=1e-7)
    np.testing.assert_allclose(scale.difference_from_unit(scale.difference_to_unit(numbers)), numbers, atol=1e-7)


@given(SCALES, NUMBERS)
def test_the_difference_of_two_points_converts_as_a_difference(scale: ReturnScale, numbers: np.ndarray):
    points = scale.to_unit(numbers) - scale.to_unit(numbers[::-1])
    np.testing.assert_allclose(points, scale.difference_to_unit(numbers - numbers[::-1]), atol=1e-9)


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (1.0, -1.0), (-np.inf, 0.0), (-1.0, np.nan)])
def test_a_scale_without_width_is_refused(low: float, high: float):
    with pytest.raises(SidecarError, match=re.escape(f"found low {low}, high {high}")):
        ReturnScale(low, high)


def test_one_bad_row_among_many_scales_is_refused():
    with pytest.raises(SidecarError, match="finite low < high"):
        ReturnScale(np.array([-1.0, 0.0]), np.array([0.0, 0.0]))


def per_task() -> ScaleSet:
    return ScaleSet("task", {"fold": ReturnScale(-100.0, 0.0), "pour": ReturnScale(-300.0, 100.0)})


def test_every_frame_has_the_scale_of_its_task():
    rows = per_task().for_rows(["pour", "fold"], np.array([1, 2]))
    assert rows.to_unit(np.array([-100.0, -100.0, -50.0])).tolist() == [-0.5, -1.0, -0.5]


def test_no_episodes_have_no_scales():
    assert per_task().for_rows([], np.zeros(0, dtype=np.int64)).to_unit(np.zeros(0)).tolist() == []


def test_a_global_scale_serves_tasks_that_it_never_saw():
    scales = ScaleSet.single(ReturnScale(-5.0, 0.0))
    assert scales.scope == "global"
    assert scales.for_task("anything") == ReturnScale(-5.0, 0.0)


def test_a_task_without_a_scale_is_named_with_those_that_have_one():
    with pytest.raises(SidecarError, match=r"task 'stir'; it was made for: 'fold', 'pour'\. Mend: .*together") as found:
        per_task().for_task("stir")
    assert isinstance(found.value, ValueError)
    assert isinstance(found.value, RegraspError)


@pytest.mark.parametrize("scales", [per_task(), ScaleSet.single(ReturnScale(-7.5, 0.25))])
def test_a_scale_set_survives_json(scales: ScaleSet):
    assert ScaleSet.from_json(json.loads(json.dumps(scales.to_json()))) == scales


def test_two_sets_differ_by_the_first_task_whose_numbers_do():
    other = ScaleSet("task", {"fold": ReturnScale(-100.0, 0.0), "pour": ReturnScale(-200.0, 100.0)})
    assert per_task().differs_from(other, ["fold"]) is None
    assert per_task().differs_from(other, ["fold", "pour"]) == "task 'pour': [-300, 100] against [-200, 100]"


def test_equal_numbers_are_equal_whatever_their_scope():
    single = ScaleSet.single(ReturnScale(-100.0, 0.0))
    assert per_task().differs_from(single, ["fold"]) is None
    assert per_task().differs_from(single, ["pour"]) == "task 'pour': [-300, 100] against [-100, 0]"
