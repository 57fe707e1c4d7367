"""Environments in worker processes: the same results for any number, and for workers that die."""

import os
import signal
from typing import Any

import numpy as np
import pytest

from regrasp.collect.environment import STATE, EnvironmentSpec, Observation, SerialEnvironment, Step
from regrasp.collect.workers import WorkerEnvironment
from regrasp.core.errors import ConfigError, InternalError, NonFiniteData

SPEC = EnvironmentSpec(
    name="walk", task="walk", state_size=2, action_size=1, max_episode_steps=6, fps=10.0, robot_type="none"
)


class Walk:
    """A random walk: its state is the seed's own path plus the sum of the actions."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self.reset(0)

    def reset(self, seed: int) -> Observation:
        self._seed, self._generator, self._at = seed, np.random.default_rng(seed), np.zeros(2)
        return {STATE: self._at.astype(np.float32)}

    def step(self, action: np.ndarray) -> Step:
        if action[0] == 9.0:
            os.kill(os.getpid(), signal.SIGKILL)
        if action[0] == 8.0:
            raise ConfigError("the walk cannot take an eight")
        self._at = self._at + self._generator.normal(size=2) + action[0]
        return Step({STATE: self._at.astype(np.float32)}, float(action[0]), bool(self._at[0] > 3.0))

    def close(self) -> None:
        pass


def broken(_spec: EnvironmentSpec) -> Walk:
    os._exit(7)


def trajectory(environment: Any, kill: bool = False) -> list[np.ndarray]:
    """Everything that five copies give over twelve chunks, with resets as episodes end."""
    generator = np.random.default_rng(0)
    seen = [environment.reset([10, 11, 12, 13, 14])[STATE]]
    for number in range(12):
        if kill and number == 5:
            os.kill(environment.processes[1], signal.SIGKILL)
        result = environment.step(generator.uniform(-1, 1, (5, 3, 1)).astype(np.float32))
        seen += [result.observations[STATE], result.rewards, result.success, result.truncated, result.count]
        if result.ended.any():
            seen.append(environment.reset([100 + number if ended else None for ended in result.ended])[STATE])
    environment.close()
    return seen


def test_results_do_not_depend_on_the_number_of_workers_or_on_one_that_dies(caplog: pytest.LogCaptureFixture):
    expected = trajectory(SerialEnvironment([Walk(SPEC) for _ in range(5)]))
    for workers, kill in ((1, False), (2, False), (2, True), (5, False)):
        found = trajectory(WorkerEnvironment(SPEC, copies=5, workers=workers, start=Walk), kill)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert "walk: worker 1 (process" in caplog.text
    assert "killed by signal 9" in caplog.text


def test_a_worker_that_dies_again_at_the_same_place_is_an_error_that_names_it():
    environment = WorkerEnvironment(SPEC, copies=2, workers=2, start=Walk)
    environment.reset([4, 5])
    with pytest.raises(InternalError, match=r"worker 1 .*killed by signal 9.*seeds 5, ended, and so did the one"):
        environment.step(np.array([[[0.0]], [[9.0]]], np.float32))
    environment.close()


def test_an_error_in_a_worker_is_raised_where_it_was_asked():
    environment = WorkerEnvironment(SPEC, copies=2, workers=1, start=Walk)
    environment.reset([0, 1])
    with pytest.raises(ConfigError, match="cannot take an eight"):
        environment.step(np.full((2, 1, 1), 8.0, np.float32))
    environment.close()


def test_an_environment_that_cannot_start_says_so():
    with pytest.raises(InternalError, match=r"walk could not be started: worker 0 .*exit code 7"):
        WorkerEnvironment(SPEC, copies=1, workers=1, start=broken)


def test_workers_run_one_thread_each():
    environment = WorkerEnvironment(SPEC, copies=1, workers=1, start=Walk)
    pairs = open(f"/proc/{environment.processes[0]}/environ", "rb").read().split(b"\0")  # noqa: PTH123, SIM115
    environment.close()
    assert b"OMP_NUM_THREADS=1" in pairs


def test_actions_that_are_not_numbers_are_refused_with_the_copy():
    environment = SerialEnvironment([Walk(SPEC), Walk(SPEC)])
    environment.reset([0, 1])
    with pytest.raises(NonFiniteData, match="copies 1"):
        environment.step(np.array([[[0.0]], [[np.nan]]], np.float32))


def test_actions_of_another_size_are_refused_with_both_sizes():
    environment = SerialEnvironment([Walk(SPEC), Walk(SPEC)])
    with pytest.raises(ConfigError, match=r"actions of 1 numbers.*\[2, 1, 3\]"):
        environment.step(np.zeros((2, 1, 3), np.float32))
