"""Parity of the fast Meta-World with the original, task by task."""

import numpy as np
import pytest

from regrasp.collect.environment import STATE, CameraSpec
from regrasp.collect.environments import describe_environment, start_environment
from regrasp.collect.metaworld_fast import FastMetaworld, metaworld_spec, quaternion_of
from regrasp.collect.metaworld_tasks import TASK_RULES
from regrasp.core.errors import ConfigError

pytest.importorskip("metaworld", reason="needs the extra metaworld")

from metaworld.env_dict import ENV_CLS_MAP
from metaworld.policies import ENV_POLICY_MAP
from scipy.spatial.transform import Rotation

DEMANDING = (
    "pick-place-v3",
    "push-v3",
    "peg-insert-side-v3",
    "drawer-open-v3",
    "door-open-v3",
    "reach-v3",
    "button-press-topdown-v3",
)


def original(task: str):
    """Meta-World's own environment, set up as its multi-task benchmark and LeRobot set it up."""
    environment = ENV_CLS_MAP[task]()
    environment._partially_observable = False
    del environment.sawyer_observation_space
    environment._freeze_rand_vec = False
    environment.seeded_rand_vec = True
    environment._set_task_called = True
    return environment


@pytest.mark.filterwarnings("ignore:Constant")
def compare(task: str, seeds: int, steps: int) -> int:
    """Step both with the scripted expert's actions plus noise; return how many steps were successes."""
    slow, fast, expert = original(task), FastMetaworld(metaworld_spec(task)), ENV_POLICY_MAP[task]()
    successes = 0
    for seed in range(seeds):
        slow.seed(seed)
        observation, _ = slow.reset()
        fast.reset(seed)
        np.testing.assert_array_equal(fast.observation, observation, err_msg=f"{task}, reset of seed {seed}")
        generator = np.random.default_rng(seed)
        for _ in range(steps):
            action = (expert.get_action(observation) + generator.normal(0.0, 0.1 * seed, 4)).astype(np.float32)
            observation, _, _, _, info = slow.step(action)
            step = fast.step(action)
            np.testing.assert_array_equal(fast.observation, observation, err_msg=task)
            np.testing.assert_array_equal(step.observation[STATE], observation.astype(np.float32))
            assert step.success == bool(info["success"])
            successes += step.success
    return successes


@pytest.mark.filterwarnings("ignore:Constant")
@pytest.mark.parametrize("task", DEMANDING)
def test_physics_observations_and_success_are_the_originals_over_hundreds_of_steps(task: str):
    assert compare(task, seeds=3, steps=160) > 0, "the test must see successes too"


@pytest.mark.filterwarnings("ignore:Constant")
@pytest.mark.parametrize("task", [task for task in TASK_RULES if task not in DEMANDING])
def test_every_other_task_agrees_too(task: str):
    compare(task, seeds=2, steps=60)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Constant")
@pytest.mark.parametrize("task", list(TASK_RULES))
def test_every_task_agrees_for_long(task: str):
    compare(task, seeds=6, steps=300)


def test_every_task_of_meta_world_is_covered():
    assert set(TASK_RULES) == set(ENV_CLS_MAP)


def test_a_seed_starts_the_same_episode_whatever_ran_before():
    simulator = FastMetaworld(metaworld_spec("peg-insert-side-v3"))
    first = simulator.reset(5)[STATE]
    simulator.reset(6)
    for _ in range(30):
        simulator.step(np.array([1.0, -1.0, -1.0, 1.0], np.float32))
    np.testing.assert_array_equal(simulator.reset(5)[STATE], first)


@pytest.mark.parametrize("seed", range(4))
def test_a_quaternion_is_the_one_that_scipy_gives(seed: int):
    for rotation in Rotation.random(50, rng=seed):
        matrix = rotation.as_matrix()
        np.testing.assert_allclose(
            quaternion_of(matrix.reshape(-1)), Rotation.from_matrix(matrix).as_quat(), atol=1e-15
        )


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("metaworld:pick-plce-v3", "metaworld:pick-place-v3"),
        ("metaword:pick-place-v3", "metaworld"),
        ("pusth", "pusht"),
        ("metaworld", "metaworld:"),
        ("pusht:v0", "pusht"),
    ],
)
def test_an_unknown_environment_is_refused_with_the_nearest_name(name: str, nearest: str):
    with pytest.raises(ConfigError, match=nearest):
        describe_environment(name)


def test_an_episode_is_at_most_as_long_as_meta_world_allows():
    with pytest.raises(ConfigError, match="500"):
        describe_environment("metaworld:reach-v3", max_episode_steps=501)


def test_an_episode_ends_at_its_limit_and_then_waits_for_a_reset():
    environment = start_environment(
        describe_environment("metaworld:reach-v3", max_episode_steps=5), copies=2, workers=0
    )
    environment.reset([1, None])
    result = environment.step(np.zeros((2, 8, 4), np.float32))
    assert result.count.tolist() == [5, 0]
    assert result.truncated.sum(axis=1).tolist() == [1, 0]
    assert environment.step(np.zeros((2, 1, 4), np.float32)).count.tolist() == [0, 0]


def test_images_are_drawn_where_the_machine_can_draw():
    spec = describe_environment("metaworld:reach-v3", cameras=(CameraSpec(name="front", height=48, width=64),))
    try:
        environment = start_environment(spec, copies=1, workers=1)  # in a process that has not imported mujoco yet
    except ConfigError as error:
        pytest.skip(str(error))
    image = environment.reset([0])["observation.images.front"]
    environment.close()
    assert image.shape == (1, 48, 64, 3)
    assert image.dtype == np.uint8
    assert image.std() > 10.0


def test_pusht_gives_the_same_episode_for_a_seed():
    pytest.importorskip("gym_pusht", reason="needs the extra pusht")
    environment = start_environment(describe_environment("pusht", max_episode_steps=20), copies=2, workers=0)
    first = environment.reset([3, 3])[STATE]
    np.testing.assert_array_equal(first[0], first[1])
    result = environment.step(np.full((2, 4, 2), 200.0, np.float32))
    assert result.rewards.shape == (2, 4)
    np.testing.assert_array_equal(result.observations[STATE][0], result.observations[STATE][1])
