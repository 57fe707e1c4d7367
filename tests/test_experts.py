"""Scripted experts of chosen quality."""

import dataclasses

import numpy as np
import pytest

from regrasp.collect.collection import episode_seeds
from regrasp.collect.environments import describe_environment, start_environment
from regrasp.collect.experts import CLEAN, MIXES, Demonstrator, ExpertPolicy, Mix, Style, find_mix
from regrasp.collect.rollout import EpisodeRecord, run_episodes
from regrasp.core.errors import ConfigError

pytest.importorskip("metaworld", reason="needs the extra metaworld")

SPEC = describe_environment("metaworld:pick-place-v3", max_episode_steps=150)


def run(mix: Mix, seeds: list[int], copies: int = 8) -> list[EpisodeRecord]:
    environment = start_environment(SPEC, copies=copies, workers=0)
    return list(run_episodes(environment, ExpertPolicy(SPEC, mix), seeds))


class Script:
    """Always asks for the same action, and remembers what it saw."""

    def get_action(self, seen: np.ndarray) -> np.ndarray:
        self.seen = seen
        return np.array([3.0, -0.5, 0.0, 1.0])


def one_step(**style: object) -> tuple[np.ndarray, np.ndarray]:
    script = Script()
    expert = Demonstrator(script, Style(name="test", **style), np.random.default_rng(0))
    return expert.act(np.zeros(39, np.float32)), script.seen


def test_the_clean_style_gives_the_scripted_action_within_its_range():
    action, seen = one_step()
    assert action.tolist() == [1.0, -0.5, 0.0, 1.0]
    assert not seen.any()


def test_gain_slows_the_hand_and_not_the_gripper():
    action, _ = one_step(gain=0.5)
    assert action.tolist() == [0.5, -0.25, 0.0, 1.0]


def test_an_offset_moves_the_object_that_the_expert_sees():
    _, seen = one_step(offset=(0.014, 0.0, -0.01))
    assert seen[4:7].tolist() == [0.014, 0.0, -0.01]
    assert np.count_nonzero(seen) == 2


def test_a_pause_stops_the_hand_and_holds_the_gripper():
    action, _ = one_step(pause=1.0)
    assert action.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_pauses_are_as_frequent_and_as_long_as_said():
    # Pauses of mean length 10 with a start probability of 0.1 between them: working stretches last 10 steps too (the
    # step on which a pause starts belongs to the pause), less one step, so about 10 / (10 + 9) of the time is paused.
    expert = Demonstrator(Script(), Style(name="test", pause=0.1, pause_steps=10.0), np.random.default_rng(1))
    paused = [expert.act(np.zeros(39, np.float32))[0] == 0.0 for _ in range(20_000)]
    assert np.mean(paused) == pytest.approx(10 / 19, abs=0.03)


def test_noise_has_the_deviation_and_the_memory_that_were_asked_for():
    expert = Demonstrator(Script(), Style(name="test", noise=0.1, noise_steps=5.0), np.random.default_rng(2))
    shaking = np.array([expert.act(np.zeros(39, np.float32))[2] for _ in range(40_000)], float)
    assert shaking.std() == pytest.approx(0.1, rel=0.05)
    assert np.corrcoef(shaking[:-5], shaking[5:])[0, 1] == pytest.approx(np.exp(-1.0), abs=0.05)


def test_an_episode_depends_on_its_seed_alone():
    together, alone = run(MIXES["slow"], [5, 6, 7, 8], copies=4), run(MIXES["slow"], [7], copies=1)
    np.testing.assert_array_equal(together[2].actions, alone[0].actions)
    assert together[2].notes == alone[0].notes


def test_better_demonstrators_succeed_more_often_and_faster():
    seeds = episode_seeds(0, 24, "demo")
    clean, slow = run(MIXES["clean"], seeds), run(MIXES["slow"], seeds)
    assert np.mean([one.success for one in clean]) > 0.95
    assert 0.3 < np.mean([one.success for one in slow]) < 0.85
    quick = np.mean([one.steps for one in clean if one.success])
    assert np.mean([one.steps for one in slow if one.success]) > 1.3 * quick
    assert {one.notes["style"] for one in slow} == {"good", "slow", "offset"}


def test_the_styles_of_a_mix_are_drawn_as_weighted():
    names = [MIXES["slow"].draw(np.random.default_rng(i)).name for i in range(2000)]
    assert names.count("slow") / 2000 == pytest.approx(0.5, abs=0.04)
    assert names.count("good") / 2000 == pytest.approx(0.125, abs=0.03)


def test_a_style_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CLEAN.gain = 2.0  # type: ignore[misc]


def test_an_unknown_mix_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean 'slow'"):
        find_mix("slw")


def test_an_environment_without_an_expert_is_refused():
    with pytest.raises(ConfigError, match="no scripted expert for 'pusht'"):
        ExpertPolicy(describe_environment("pusht"), MIXES["clean"])
