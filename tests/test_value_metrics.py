"""Held-out metrics, worked by hand, and the baselines that a value model has to beat."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from regrasp.core.errors import ConfigError
from regrasp.learn.holdout import stratified_holdout
from regrasp.learn.value_baselines import constant_baseline, elapsed_time_baseline
from regrasp.learn.value_metrics import HeldOut, Predictions, ValueMetrics, auroc, evaluate, judge, spearman
from regrasp.rl.categorical import ATOMS


def frames(targets: list[list[float]], success: list[bool], width: float = 100.0) -> HeldOut:
    lengths = [len(one) for one in targets]
    return HeldOut(
        target=np.concatenate(targets).astype(np.float64),
        width=np.full(sum(lengths), width),
        episode=np.repeat(np.arange(len(lengths)), lengths),
        elapsed=np.concatenate([np.arange(n) for n in lengths]),
        success=np.array(success),
    )


def log_uniform(rows: int) -> np.ndarray:
    return np.full((rows, ATOMS), -np.log(ATOMS))


def test_uniform_logits_have_the_cross_entropy_of_201_atoms() -> None:
    found = Predictions.of(log_uniform(3), np.array([-0.4975, -0.123, 0.0]))
    assert found.cross_entropy == pytest.approx([5.3033] * 3, abs=1e-4)
    assert found.value == pytest.approx([-0.5] * 3)


def test_a_distribution_is_compared_with_the_two_hot_target() -> None:
    # -0.123 lies on atoms 175 (0.6) and 176 (0.4). With p = 0.5, 0.25 there: CE = -0.6 ln 0.5 - 0.4 ln 0.25 = 0.9704;
    # with 0.25, 0.5 it is 1.1090.
    log_p = np.full((3, ATOMS), np.log(1e-9))
    log_p[0, [175, 176]] = np.log([0.5, 0.25])
    log_p[1, [175, 176]] = np.log([0.25, 0.5])
    log_p[2, 10] = 0.0
    found = Predictions.of(log_p, np.full(3, -0.123))
    assert found.cross_entropy[:2] == pytest.approx([0.970406, 1.109035], abs=1e-5)
    assert found.best.tolist() == [True, False, False]
    assert found.neighbor.tolist() == [True, True, False]


def test_a_target_on_an_atom_has_one_neighbour() -> None:
    # -0.5 is atom 100 with weight 1: atom 101 is none of its. 0 is atom 200, held as upper weight 1 on 199.
    log_p = log_uniform(4)
    for row, atom in enumerate((100, 101, 200, 199)):
        log_p[row, atom] = 0.0
    found = Predictions.of(log_p, np.array([-0.5, -0.5, 0.0, 0.0]))
    assert found.best.tolist() == [True, False, True, False]
    assert found.neighbor.tolist() == [True, False, True, False]


def test_metrics_of_two_small_episodes() -> None:
    # Errors 0.1, 0.1, 0, 0 | 0.2, 0.2: mean 0.1; in frames, at a width of 100, 10.
    held_out = frames([[-0.3, -0.2, -0.1, 0.0], [-1.0, -0.9]], [True, False])
    value = np.array([-0.4, -0.3, -0.1, 0.0, -0.8, -0.7])
    metrics = evaluate(Predictions.of(log_uniform(6), held_out.target, value), held_out)
    assert metrics.mae_unit == pytest.approx(0.1)
    assert metrics.mae_frames == pytest.approx(10.0)
    assert metrics.spearman_episodes == pytest.approx(1.0)
    assert metrics.spearman == pytest.approx(1.0)
    assert (metrics.auroc_start, metrics.auroc_middle, metrics.auroc_end) == (1.0, 1.0, 1.0)
    assert (metrics.frames, metrics.episodes, metrics.undefined) == (6, 2, {})


def test_a_constant_value_has_no_rank_correlation_and_says_so() -> None:
    held_out = frames([[-0.2, -0.1], [-0.3, -0.2]], [True, True])
    metrics = evaluate(Predictions.of(log_uniform(4), held_out.target), held_out)
    assert np.isnan(metrics.spearman)
    assert np.isnan(metrics.spearman_episodes)
    assert metrics.spearman_undefined == 2
    assert np.isnan(metrics.auroc_end)
    assert set(metrics.undefined) == {"spearman", "spearman_episodes", "auroc"}
    assert "successes" in metrics.undefined["auroc"]
    assert metrics.to_json()["spearman"] is None


def test_auroc_counts_a_tie_as_half() -> None:
    # Pairs (positive, negative): 3>1, 3>2, 2>1, 2=2: 3.5 of 4.
    assert auroc(np.array([3.0, 2.0, 1.0, 2.0]), np.array([True, True, False, False])) == 0.875


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=30))
def test_spearman_averages_ties_as_scipy_does(pairs: list[tuple[int, int]]) -> None:
    first, second = (np.array(column) for column in zip(*pairs, strict=True))
    found = spearman(first, second)
    if len(set(first.tolist())) < 2 or len(set(second.tolist())) < 2:
        assert np.isnan(found)
    else:
        assert found == pytest.approx(spearmanr(first, second).statistic, abs=1e-12)


def metrics_with(cross_entropy: float, mae: float) -> ValueMetrics:
    held_out = frames([[-0.2, -0.1]], [True])
    base = evaluate(Predictions.of(log_uniform(2), held_out.target), held_out)
    return ValueMetrics(**(base.__dict__ | {"cross_entropy": cross_entropy, "mae_unit": mae}))


def test_a_model_has_to_win_both_metrics_against_both_baselines() -> None:
    baselines = {"constant": metrics_with(5.0, 0.2), "elapsed-time": metrics_with(4.0, 0.1)}
    assert judge(metrics_with(3.9, 0.09), baselines).beats_baselines
    assert judge(metrics_with(3.9, 0.09), baselines).warning is None
    lost = judge(metrics_with(4.0, 0.09), baselines)
    assert not lost.beats_baselines
    assert lost.losses == ("cross-entropy 4 against 4 of the elapsed-time baseline",)
    assert "beats the baselines that see no frame in MAE, but" in (lost.warning or "")
    assert "does not beat" in (judge(metrics_with(3.9, 0.2), baselines).warning or "")
    assert len(judge(metrics_with(float("nan"), 1.0), baselines).losses) == 4


def line(length: int, horizon: int = 100) -> list[float]:
    """The returns of a success: -(frames to the end) / horizon."""
    return [-(length - 1 - t) / horizon for t in range(length)]


def test_elapsed_time_predicts_episodes_of_one_length_and_the_constant_does_not() -> None:
    training = frames([line(50)] * 6, [True] * 6)
    held_out = frames([line(50)], [True])
    clock = evaluate(elapsed_time_baseline(training).predict(held_out), held_out)
    constant = evaluate(constant_baseline(training).predict(held_out), held_out)
    assert clock.mae_unit < 1e-9
    assert clock.cross_entropy < 1.5
    # Returns -0.49 .. 0 in steps of 0.01 are every other atom of 99: at best ln 50 = 3.91; the median is 0.125 away.
    assert constant.mae_unit == pytest.approx(0.125, abs=0.002)
    assert 3.9 < constant.cross_entropy < 5.0
    assert clock.spearman == pytest.approx(1.0)


def test_a_baseline_is_finite_on_returns_it_has_never_seen() -> None:
    training = frames([line(20), line(22)], [True, True])
    held_out = frames([[-1.0] * 90], [False])
    for baseline in (constant_baseline(training), elapsed_time_baseline(training)):
        metrics = evaluate(baseline.predict(held_out), held_out)
        assert np.isfinite(metrics.cross_entropy)
        assert np.isfinite(metrics.mae_unit)


def test_the_elapsed_time_baseline_does_not_trust_few_episodes_more_than_they_deserve() -> None:
    # Lengths differ, so the sharp histogram of the training episodes would be far off for others; the smoothing is
    # chosen on other episodes, and keeps the clock below the uniform distribution.
    generator = np.random.default_rng(0)
    training = frames([line(int(n)) for n in generator.integers(40, 80, 10)], [True] * 10)
    held_out = frames([line(int(n)) for n in generator.integers(40, 80, 5)], [True] * 5)
    metrics = evaluate(elapsed_time_baseline(training).predict(held_out), held_out)
    assert metrics.cross_entropy < np.log(ATOMS)
    assert metrics.cross_entropy < evaluate(constant_baseline(training).predict(held_out), held_out).cross_entropy


def test_every_stratum_of_two_or_more_is_on_both_sides() -> None:
    strata = ["a"] * 10 + ["b"] * 2 + ["c"]
    held = stratified_holdout(strata, 0.3, seed=0)
    assert held[:10].sum() == 3
    assert held[10:12].sum() == 1
    assert not held[12]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.floats(0.01, 0.99), st.integers(0, 5))
def test_a_split_never_takes_all_of_a_stratum(strata: list[int], fraction: float, seed: int) -> None:
    if max(map(strata.count, strata)) < 2:
        with pytest.raises(ConfigError, match="two episodes"):
            stratified_holdout(strata, fraction, seed)
        return
    held = stratified_holdout(strata, fraction, seed)
    assert np.array_equal(held, stratified_holdout(strata, fraction, seed))
    for stratum in set(strata):
        chosen = held[np.array(strata) == stratum]
        assert not chosen.all()
        assert chosen.any() or len(chosen) == 1


def test_a_share_out_of_range_is_refused() -> None:
    for fraction in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ConfigError, match="--holdout"):
            stratified_holdout(["a", "a"], fraction, 0)


def test_the_clock_knows_the_task() -> None:
    # Episodes of about 60 frames in one task and about 400 in the other, all successes on a scale of 400: a clock for
    # both tasks cannot say what a frame at time 30 is worth, a clock for each can.
    def frames(lengths: list[int]) -> HeldOut:
        episode = np.repeat(np.arange(len(lengths)), lengths)
        elapsed = np.concatenate([np.arange(length) for length in lengths])
        target = np.concatenate([-np.arange(length)[::-1] / 410 for length in lengths])
        width = np.full(len(target), 410.0)
        task = np.array([0 if length < 100 else 1 for length in lengths])
        won = np.ones(len(lengths), dtype=bool)
        return HeldOut(target=target, width=width, episode=episode, elapsed=elapsed, success=won, task=task)

    training = frames([60, 398, 61, 400, 59, 402, 60, 401, 62, 399])
    held_out = frames([60, 400])
    clock = evaluate(elapsed_time_baseline(training).predict(held_out), held_out)
    blind = dataclasses.replace(training, task=None), dataclasses.replace(held_out, task=None)
    pooled = evaluate(elapsed_time_baseline(blind[0]).predict(blind[1]), blind[1])
    assert clock.mae_unit < 0.01 < pooled.mae_unit
    assert clock.cross_entropy < pooled.cross_entropy - 0.1
