"""The flow, guidance and the condition: worked by hand, as laws, and the same in both array libraries."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regrasp.rl.condition import conditioned_text, hashed_dropout, indicator
from regrasp.rl.flow import flow_matching_loss, integrate, interpolate, velocity_target
from regrasp.rl.guidance import guide, guided_velocity


def _pair(seed: int, shape: tuple[int, ...] = (3, 4, 2)) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape), rng.normal(size=shape)


def test_a_quarter_of_the_way_is_a_quarter_action():
    noise, action = np.array([[[2.0]], [[0.0]]]), np.array([[[6.0]], [[4.0]]])
    # 3/4 * 2 + 1/4 * 6 = 3;  1/2 * 0 + 1/2 * 4 = 2
    np.testing.assert_array_equal(interpolate(noise, action, np.array([0.25, 0.5])).ravel(), [3.0, 2.0])
    np.testing.assert_array_equal(velocity_target(noise, action).ravel(), [4.0, 4.0])


@given(seed=st.integers(0, 1000))
def test_the_path_begins_at_noise_and_ends_at_the_action(seed: int):
    noise, action = _pair(seed)
    np.testing.assert_array_equal(interpolate(noise, action, np.zeros(3)), noise)
    np.testing.assert_array_equal(interpolate(noise, action, np.ones(3)), action)


@given(seed=st.integers(0, 1000), steps=st.integers(1, 9))
def test_walking_the_true_velocity_gives_the_action(seed: int, steps: int):
    noise, action = _pair(seed)
    np.testing.assert_allclose(integrate(lambda x, t: action - noise, noise, steps), action, atol=1e-12)
    np.testing.assert_allclose(integrate(lambda x, t: (action - x) / (1 - t), noise, steps), action, atol=1e-12)


def test_euler_steps_are_those_of_the_worked_example():
    # dx/dt = 2t from 1 in four steps: 1 + (0 + 0.5 + 1 + 1.5) / 4 = 1.75
    assert integrate(lambda x, t: np.full_like(x, 2 * t), np.ones((1, 1, 1)), 4).item() == 1.75


def test_a_walk_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="at least 1 step; found 0"):
        integrate(lambda x, t: x, np.ones((1, 1, 1)), 0)


def test_the_loss_is_the_mean_over_what_is_not_padding():
    velocity = np.array([[[1.0, 2.0], [9.0, 9.0]], [[0.0, 4.0], [1.0, 1.0]]])
    is_pad = np.array([[[False], [True]], [[False], [False]]])
    # squares: 1 + 4 of two numbers, and 0 + 16 + 1 + 1 of four
    assert flow_matching_loss(velocity, np.zeros_like(velocity), is_pad) == pytest.approx(23 / 6)
    per_chunk = flow_matching_loss(velocity, np.zeros_like(velocity), is_pad, per_chunk=True)
    np.testing.assert_allclose(per_chunk, [2.5, 4.5])


def test_the_loss_without_padding_is_the_plain_mean():
    velocity, target = _pair(0)
    none = np.zeros((3, 4, 1), bool)
    assert flow_matching_loss(velocity, target) == pytest.approx(np.mean((velocity - target) ** 2))
    assert flow_matching_loss(velocity, target, none) == pytest.approx(flow_matching_loss(velocity, target))


def test_a_chunk_that_is_all_padding_weighs_nothing():
    velocity, target = _pair(1)
    is_pad = np.zeros((3, 4, 1), bool)
    is_pad[1] = True
    assert flow_matching_loss(velocity, target, is_pad, per_chunk=True)[1] == 0.0
    kept = flow_matching_loss(velocity[[0, 2]], target[[0, 2]])
    assert flow_matching_loss(velocity, target, is_pad) == pytest.approx(kept)


@given(seed=st.integers(0, 1000), value=st.sampled_from([0.0, 1e6, float("inf"), float("nan")]))
def test_padding_moves_neither_the_loss_nor_its_gradient(seed: int, value: float):
    velocity, target = (torch.from_numpy(a) for a in _pair(seed))
    steps = torch.zeros(3, 4, 1, dtype=torch.bool)
    steps[0, 2:] = True
    dims = torch.zeros(3, 1, 2, dtype=torch.bool)
    dims[2, :, 1] = True
    is_pad = steps | dims
    results = []
    for filled in (target, target.masked_fill(is_pad, value)):
        leaf = velocity.clone().requires_grad_()
        loss = flow_matching_loss(leaf, filled, is_pad)
        loss.backward()
        results.append((loss.item(), leaf.grad))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)
    assert results[0][1][is_pad].abs().sum() == 0


@given(seed=st.integers(0, 1000))
def test_numpy_and_torch_give_the_same_numbers(seed: int):
    noise, action = _pair(seed)
    rng = np.random.default_rng(seed)
    time, is_pad = rng.random(3), rng.random((3, 4, 1)) < 0.3
    is_pad[:, 0] = False
    as_torch = [torch.from_numpy(a) for a in (noise, action, time, is_pad)]
    here = interpolate(noise, action, time)
    there = interpolate(*as_torch[:3])
    np.testing.assert_allclose(there.numpy(), here)
    for per_chunk in (False, True):
        mine = flow_matching_loss(here, velocity_target(noise, action), is_pad, per_chunk=per_chunk)
        other = flow_matching_loss(there, velocity_target(*as_torch[:2]), as_torch[3], per_chunk=per_chunk)
        np.testing.assert_allclose(other.numpy(), mine)


def test_guidance_goes_past_the_condition_by_its_scale():
    null, positive = np.full((1, 1, 1), 1.0), np.full((1, 1, 1), 3.0)
    assert guide(null, positive, 2.0).item() == 5.0
    assert guide(null, positive, 0.5).item() == 2.0


@given(seed=st.integers(0, 1000))
def test_guidance_of_one_is_the_condition_and_of_zero_is_none_to_the_bit(seed: int):
    null, positive = _pair(seed)
    np.testing.assert_array_equal(guide(null, positive, 1.0), positive)
    np.testing.assert_array_equal(guide(null, positive, 0.0), null)


@pytest.mark.parametrize(("scale", "asked"), [(1.0, ["positive"]), (0.0, ["null"]), (2.0, ["null", "positive"])])
def test_guidance_asks_only_the_networks_it_needs(scale: float, asked: list[str]):
    calls = []
    velocity = guided_velocity(
        lambda x, t: calls.append("null") or x, lambda x, t: calls.append("positive") or 2 * x, scale
    )
    assert velocity(np.ones((1, 1, 1)), 0.0).item() == 1.0 + scale
    assert calls == asked


def test_the_condition_is_a_number_or_a_line_of_text():
    np.testing.assert_array_equal(indicator(np.array([True, False])), [1.0, -1.0])
    np.testing.assert_array_equal(indicator(np.array([True, False]), "unconditional"), [1.0, 0.0])
    assert conditioned_text("fold", 1.0) == "fold\nAdvantage: positive"
    assert conditioned_text("fold", -1.0) == "fold\nAdvantage: negative"
    assert conditioned_text("fold", 0.0) == "fold"


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.3, 1.0])
def test_hashed_dropout_leaves_out_its_share_of_frames_and_the_same_ones_each_time(probability: float):
    index = np.arange(20_000)
    out = hashed_dropout(index, probability, seed=0)
    assert out.mean() == pytest.approx(probability, abs=0.015)  # five standard deviations of a coin
    np.testing.assert_array_equal(out[::-7], hashed_dropout(index[::-7], probability, seed=0))


def test_hashed_dropout_of_other_seeds_is_independent():
    first, second = (hashed_dropout(np.arange(20_000), 0.3, seed) for seed in (0, 1))
    assert (first & second).mean() == pytest.approx(0.09, abs=0.015)
    assert (first[1:] & first[:-1]).mean() == pytest.approx(0.09, abs=0.015)
