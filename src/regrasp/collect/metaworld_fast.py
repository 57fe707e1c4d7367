"""Meta-World v3 with the original's physics, observations and success, without what a policy does not use.

The original spends most of a step in Python reward code, name look-ups and a second forward pass, and most of a
reset in 100 simulated steps that bring the hand to its start. Here a step is the physics, the kinematics, and the
task's rule for success; the hand's start is simulated once and restored. ``tests/test_metaworld_fast.py`` compares
every task with the original.
"""

import json
from importlib import import_module
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from regrasp.collect.environment import STATE, CameraSpec, EnvironmentSpec, Observation, Step
from regrasp.collect.metaworld_tasks import SCENE_MOVES_DURING_RESET, TASK_RULES, Place, TaskRules, Turn
from regrasp.collect.rendering import SceneRenderer, choose_backend
from regrasp.core.errors import ConfigError, nearest

FPS = 80.0
MAX_EPISODE_STEPS = 500
STATE_SIZE = 39
FRAME_SKIP = 5
STATE_NAMES = (
    *("hand_x", "hand_y", "hand_z", "gripper_opening"),
    *(f"object_{i}" for i in range(14)),
    *("previous_hand_x", "previous_hand_y", "previous_hand_z", "previous_gripper_opening"),
    *(f"previous_object_{i}" for i in range(14)),
    *("goal_x", "goal_y", "goal_z"),
)
ACTION_NAMES = ("delta_x", "delta_y", "delta_z", "gripper")


def task_text(task: str) -> str:
    """Return LeRobot's instruction for a Meta-World task, so that datasets of either agree.

    Raises:
        ConfigError: no such task.
    """
    if task not in TASK_RULES:
        raise ConfigError(
            f"Meta-World v3 has no task {task!r}.{nearest(task, TASK_RULES)} Its {len(TASK_RULES)} tasks are named as "
            f"in 'metaworld:pick-place-v3'."
        )
    package = find_spec("lerobot")
    if package is None or not package.submodule_search_locations:
        raise ConfigError("The text of Meta-World's tasks comes with lerobot, which is not installed here.")
    path = Path(package.submodule_search_locations[0]) / "envs" / "metaworld_config.json"
    return json.loads(path.read_text())["TASK_DESCRIPTIONS"][task]


def metaworld_spec(
    task: str, *, max_episode_steps: int | None = None, cameras: tuple[CameraSpec, ...] = ()
) -> EnvironmentSpec:
    """Return what a policy needs to know of a Meta-World task, without starting it.

    Args:
        task: such as ``pick-place-v3``.
        max_episode_steps: 500 (Meta-World's own) if not given, and at most that.
        cameras: cameras to render besides the state.

    Raises:
        ConfigError: no such task, or an episode longer than Meta-World's.
    """
    text = task_text(task)
    steps = MAX_EPISODE_STEPS if max_episode_steps is None else max_episode_steps
    if not 1 <= steps <= MAX_EPISODE_STEPS:
        raise ConfigError(f"A Meta-World episode has 1 to {MAX_EPISODE_STEPS} steps; --max-episode-steps is {steps}.")
    return EnvironmentSpec(
        name=f"metaworld:{task}",
        task=text,
        state_size=STATE_SIZE,
        action_size=4,
        max_episode_steps=steps,
        fps=FPS,
        robot_type="sawyer",
        state_names=STATE_NAMES,
        action_names=ACTION_NAMES,
        cameras=cameras,
    )


def quaternion_of(matrix: np.ndarray) -> tuple[float, float, float, float]:
    """Return a rotation matrix's unit quaternion (x, y, z, w), signed as scipy's ``Rotation.as_quat`` signs it.

    Args:
        matrix: orthonormal, 9 numbers in row order.

    Source:
        Markley, "Unit quaternion from rotation matrix", Journal of Guidance, Control, and Dynamics 31(2), 2008.
    """
    m00, m01, m02, m10, m11, m12, m20, m21, m22 = matrix.tolist()
    trace = m00 + m11 + m22
    largest = max(m00, m11, m22, trace)
    if largest == m00:
        x, y, z, w = 1 - trace + 2 * m00, m10 + m01, m20 + m02, m21 - m12
    elif largest == m11:
        x, y, z, w = m10 + m01, 1 - trace + 2 * m11, m21 + m12, m02 - m20
    elif largest == m22:
        x, y, z, w = m20 + m02, m21 + m12, 1 - trace + 2 * m22, m10 - m01
    else:
        x, y, z, w = m21 - m12, m02 - m20, m10 - m01, 1 + trace
    norm = sqrt(x * x + y * y + z * z + w * w)
    return x / norm, y / norm, z / norm, w / norm


def _load(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"Environments 'metaworld:...' need the packages metaworld and mujoco, and importing {name} failed "
            f"({error}). Install them with: pip install 'regrasp[metaworld]'"
        ) from error


def _original_environment(task: str) -> Any:  # noqa: ANN401 (a class of a package without stubs)
    """Return Meta-World's own environment of ``task``, its goal visible and its randomness seeded."""
    environment = _load("metaworld.env_dict").ENV_CLS_MAP[task]()
    environment._partially_observable = False
    del environment.sawyer_observation_space
    environment._freeze_rand_vec = False
    environment.seeded_rand_vec = True
    environment._set_task_called = True
    return environment


class FastMetaworld:
    """One Meta-World v3 task. A seed's episode is the one that the original's ``seed`` and ``reset`` start."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        """Load the task that ``spec`` (of ``metaworld_spec``) names."""
        self.spec = spec
        task = spec.name.partition(":")[2]
        if spec.cameras:
            choose_backend()
        self._rules: TaskRules = TASK_RULES[task]
        self._simulates_resets = task in SCENE_MOVES_DURING_RESET
        self._mujoco: Any = _load("mujoco")
        self.original = _original_environment(task)
        self._simulate_hand = self.original._reset_hand
        self.original._reset_hand = self._reset_hand
        self._model, self._data = self.original.model, self.original.data
        space = self.original.sawyer_observation_space
        self._low, self._high = space.low, space.high
        self._hand_state: np.ndarray | None = None
        self._action = np.zeros(4, np.float32)
        self.observation = np.zeros(STATE_SIZE)
        self._bind()
        self._renderer = SceneRenderer(self._model, self._data, spec.cameras) if spec.cameras else None

    def _bind(self) -> None:
        """Look every name up once: MuJoCo's arrays are views that stay valid while the data lives."""
        data = self._data
        self._hand = data.body("hand").xpos
        self._claws = data.body("rightclaw").xpos, data.body("leftclaw").xpos
        self._tips = data.site("rightEndEffector").xpos, data.site("leftEndEffector").xpos
        self._places = [(self._point(place), np.array(place.offset)) for place in self._rules.places]
        self._turns = [self._turn(turn) for turn in self._rules.turns]
        self._mocap_low, self._mocap_high = self.original.mocap_low, self.original.mocap_high

    def _point(self, place: Place) -> np.ndarray:
        if place.kind == "dial":
            return self._data.body(place.name).xpos
        return getattr(self._data, place.kind)(place.name).xpos

    def _turn(self, turn: Turn) -> tuple[bool, np.ndarray]:
        """Return (it is a matrix, the array to read)."""
        if turn.kind == "constant":
            return False, np.array(turn.constant)
        if turn.kind == "body":
            return False, self._data.body(turn.name).xquat
        return True, getattr(self._data, turn.kind.partition(" ")[0])(turn.name).xmat

    @property
    def target(self) -> np.ndarray:
        """Where the task wants the object, in metres."""
        return self.original._target_pos

    @property
    def fingertips(self) -> np.ndarray:
        """The point between the two fingertips, in metres."""
        return (self._tips[0] + self._tips[1]) / 2.0

    def site(self, name: str) -> np.ndarray:
        """A site's position in metres."""
        return self._data.site(name).xpos

    def joint(self, name: str) -> float:
        """A joint's position, in metres or radians."""
        return float(self._data.joint(name).qpos[0])

    def original_success(self) -> bool:
        """What Meta-World's own reward code says of the current state."""
        self._mujoco.mj_forward(self._model, self._data)
        return bool(self.original.evaluate_state(self.observation, self._action)[1]["success"])

    def reset(self, seed: int) -> Observation:
        """Start the episode that the original starts after ``seed(seed)``; see ``Simulator.reset``."""
        self.original.np_random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        self.observation = self.original.reset()[0]
        self._previous = self.observation[:18].copy()
        return self._observe()

    def step(self, action: np.ndarray) -> Step:
        """Apply one float32 action [4]: the hand's move and the gripper's effort, each in [-1, 1]."""
        original, data = self.original, self._data
        move = np.clip(action[:3], -1, 1) * original.action_scale
        data.mocap_pos[0] = np.clip(data.mocap_pos[0] + move, self._mocap_low, self._mocap_high)
        data.ctrl[0], data.ctrl[1] = action[3], -action[3]
        self._mujoco.mj_step(self._model, data, nstep=FRAME_SKIP)
        self._mujoco.mj_kinematics(self._model, data)
        self._action = action
        current = self._read()
        self.observation = np.clip(np.concatenate((current, self._previous, self.target)), self._low, self._high)
        self._previous = current
        success = bool(self._rules.success(self))
        return Step(self._observe(), float(success), success)

    def close(self) -> None:
        """Free the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _observe(self) -> Observation:
        observation: Observation = {STATE: self.observation.astype(np.float32)}
        if self._renderer is not None:
            observation.update(self._renderer.render())
        return observation

    def _read(self) -> np.ndarray:
        """Return hand, gripper and objects, 18 numbers."""
        current = np.zeros(18)
        current[:3] = self._hand
        gap = self._claws[0] - self._claws[1]
        current[3] = min(max(sqrt(gap.dot(gap)) / 0.1, 0.0), 1.0)
        start = 4
        for (point, offset), (is_matrix, turn) in zip(self._places, self._turns, strict=True):
            current[start : start + 3] = point + offset
            current[start + 3 : start + 7] = quaternion_of(turn) if is_matrix else turn
            start += 7
        if self._rules.places[0].kind == "dial":
            angle = self._data.joint("knob_Joint_1").qpos[0]
            current[4:7] += np.array([np.sin(angle), -np.cos(angle), 0.0]) * 0.05
        return current

    def _reset_hand(self, steps: int = 50) -> None:
        """Bring the hand to its start: by simulation the first time, and from memory after that.

        The last physics step is always simulated, because a reset's observation is computed from the positions
        that this step leaves, in the scene as it is now.
        """
        if self._simulates_resets:
            self._simulate_hand(steps)
            return
        mujoco, kind = self._mujoco, self._mujoco.mjtState.mjSTATE_INTEGRATION
        if self._hand_state is None:
            mujoco.mj_resetData(self._model, self._data)
            self._simulate_hand(steps - 1)
            mujoco.mj_step(self._model, self._data, nstep=FRAME_SKIP - 1)
            self._hand_state = np.empty(mujoco.mj_stateSize(self._model, kind))
            mujoco.mj_getState(self._model, self._data, self._hand_state, kind)
        mujoco.mj_setState(self._model, self._data, self._hand_state, kind)
        mujoco.mj_step(self._model, self._data)
        self.original.init_tcp = self.original.tcp_center
