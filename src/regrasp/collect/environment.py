"""What an environment is: copies of one simulated task, stepped together by chunks of actions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from regrasp.core.errors import ConfigError, NonFiniteData, listing

STATE = "observation.state"
IMAGES = "observation.images"

Observation = dict[str, np.ndarray]
"""One observation, or a batch of them: ``observation.state`` float32 [..., S], other vectors where there are any and,
where cameras are rendered, ``observation.images.NAME`` uint8 [..., H, W, 3]."""


@dataclass(frozen=True, kw_only=True)
class CameraSpec:
    """A camera to render: its name in the dataset and its size in pixels."""

    name: str
    """NAME of ``observation.images.NAME``; or a whole key, such as LeRobot's ``observation.image``."""
    height: int = 96
    width: int = 96

    @property
    def key(self) -> str:
        """The observation's key, ``observation.images.NAME``."""
        return self.name if self.name.startswith("observation.") else f"{IMAGES}.{self.name}"


def camera_name(key: str) -> str:
    """Return the name under which a camera's observation has this key; see ``CameraSpec.key``."""
    return key.removeprefix(f"{IMAGES}.")


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:
    """What a policy and a recorder need to know of an environment before it is started."""

    name: str
    """As the user wrote it: ``metaworld:pick-place-v3``."""
    task: str
    """The instruction in words, as it is recorded and given to the policy."""
    state_size: int
    """Numbers in ``observation.state``; 0 where there is none."""
    action_size: int
    max_episode_steps: int
    """An episode is cut off after this many steps without success."""
    fps: float
    """Steps per simulated second."""
    robot_type: str
    state_names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()
    cameras: tuple[CameraSpec, ...] = field(default=())
    vectors: tuple[tuple[str, int], ...] = ()
    """Keys and sizes of what is observed beside the state, such as LeRobot's ``observation.environment_state``."""

    @property
    def vector_sizes(self) -> dict[str, int]:
        """The size of every vector that is observed, by its key; the state first."""
        return ({STATE: self.state_size} if self.state_size else {}) | dict(self.vectors)


@dataclass(frozen=True)
class Step:
    """What one action gave: the next observation, the reward, and whether the task is now done."""

    observation: Observation
    reward: float
    success: bool
    ended: bool = False
    """The environment ended the episode; without success, it failed."""


@runtime_checkable
class Simulator(Protocol):
    """One copy of an environment. Who runs it counts the steps, and ends an episode that takes too many.

    Two resets with one seed give the same observation, and the same actions after them the same steps.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        """What the environment is."""
        ...

    def reset(self, seed: int) -> Observation:
        """Start the episode that ``seed`` names and return its first observation."""
        ...

    def step(self, action: np.ndarray) -> Step:
        """Apply one float32 action [A]."""
        ...

    def close(self) -> None:
        """Free what the simulator holds; a second call does nothing."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChunkResult:
    """What N actions gave in each of B copies. Copy b ran its first ``count[b]`` actions; the rest is zeros.

    A copy stops at the end of its episode and then runs nothing until it is reset.
    """

    observations: Observation
    """After each action: [B, N, ...]."""
    rewards: np.ndarray
    """float32 [B, N]."""
    success: np.ndarray
    """bool [B, N]: the task was done after this action, which ends the episode."""
    truncated: np.ndarray
    """bool [B, N]: the episode ended without success: at ``max_episode_steps``, or where the environment gave it up."""
    count: np.ndarray
    """int64 [B]."""

    @property
    def ended(self) -> np.ndarray:
        """Whether each copy's episode ended in this chunk, bool [B]."""
        return np.any(self.success | self.truncated, axis=1)


@runtime_checkable
class Environment(Protocol):
    """B copies of one environment. Its results do not depend on how many processes run them."""

    @property
    def spec(self) -> EnvironmentSpec:
        """What the environment is."""
        ...

    @property
    def copies(self) -> int:
        """B, the number of copies."""
        ...

    def reset(self, seeds: Sequence[int | None]) -> Observation:
        """Start an episode in each copy that has a seed.

        Args:
            seeds: one per copy. None leaves that copy as it is.

        Returns:
            The first observations [B, ...]; zeros for copies that were left as they are.
        """
        ...

    def step(self, actions: np.ndarray) -> ChunkResult:
        """Run a chunk of actions [B, N, A] in every copy whose episode runs."""
        ...

    def close(self) -> None:
        """Stop the copies; a second call does nothing."""
        ...


class Slot:
    """One copy with its episode's state: how many steps it ran, and whether it still runs."""

    def __init__(self, simulator: Simulator) -> None:
        """Hold ``simulator``, with no episode running."""
        self.simulator = simulator
        self.steps = 0
        self.running = False

    def reset(self, seed: int) -> Observation:
        """Start the episode of ``seed``."""
        self.steps, self.running = 0, True
        return self.simulator.reset(seed)

    def run(self, actions: np.ndarray, result: ChunkResult, row: int) -> None:
        """Run ``actions`` [N, A] until the episode ends, writing row ``row`` of ``result``."""
        limit = self.simulator.spec.max_episode_steps
        for number, action in enumerate(actions):
            if not self.running:
                return
            step = self.simulator.step(action)
            self.steps += 1
            for key, value in step.observation.items():
                result.observations[key][row, number] = value
            result.rewards[row, number] = step.reward
            result.success[row, number] = step.success
            over = step.ended or self.steps >= limit
            result.truncated[row, number] = over and not step.success
            result.count[row] += 1
            self.running = not (step.success or over)


def empty_observations(spec: EnvironmentSpec, *shape: int) -> Observation:
    """Return observations of zeros with the leading dimensions ``shape``."""
    batch: Observation = {key: np.zeros((*shape, size), np.float32) for key, size in spec.vector_sizes.items()}
    for camera in spec.cameras:
        batch[camera.key] = np.zeros((*shape, camera.height, camera.width, 3), np.uint8)
    return batch


def empty_result(spec: EnvironmentSpec, copies: int, actions: int) -> ChunkResult:
    """Return a chunk result of ``copies`` rows in which nothing ran."""
    shape = (copies, actions)
    return ChunkResult(
        observations=empty_observations(spec, *shape),
        rewards=np.zeros(shape, np.float32),
        success=np.zeros(shape, bool),
        truncated=np.zeros(shape, bool),
        count=np.zeros(copies, np.int64),
    )


def check_actions(actions: np.ndarray, spec: EnvironmentSpec, copies: int) -> np.ndarray:
    """Return ``actions`` as float32 [B, N, A], or say what is wrong with them.

    Raises:
        ConfigError: the shape is not [copies, N >= 1, action_size].
        NonFiniteData: an action is NaN or infinite.
    """
    if actions.ndim != 3 or actions.shape[0] != copies or actions.shape[1] < 1 or actions.shape[2] != spec.action_size:
        raise ConfigError(
            f"{spec.name} takes actions of {spec.action_size} numbers for each of {copies} copies, [{copies}, N, "
            f"{spec.action_size}]; the policy gave {list(actions.shape)}. Use a policy that was trained for this "
            f"environment."
        )
    actions = np.ascontiguousarray(actions, np.float32)
    bad = ~np.isfinite(actions).all(axis=(1, 2))
    if bad.any():
        raise NonFiniteData(
            f"The policy gave NaN or infinite actions for {spec.name} in copies {listing(np.flatnonzero(bad))}. "
            f"Its weights or its normalisation statistics hold a value that is not finite: check the training's loss."
        )
    return actions


class SerialEnvironment:
    """Copies of an environment that run one after the other in this process."""

    def __init__(self, simulators: Sequence[Simulator]) -> None:
        """Take over ``simulators``, which must be copies of one environment."""
        self._slots = [Slot(simulator) for simulator in simulators]

    @property
    def spec(self) -> EnvironmentSpec:
        """What the environment is."""
        return self._slots[0].simulator.spec

    @property
    def copies(self) -> int:
        """B, the number of copies."""
        return len(self._slots)

    def reset(self, seeds: Sequence[int | None]) -> Observation:
        """Start an episode in each copy that has a seed; see ``Environment.reset``."""
        batch = empty_observations(self.spec, self.copies)
        for row, (slot, seed) in enumerate(zip(self._slots, seeds, strict=True)):
            if seed is not None:
                for key, value in slot.reset(seed).items():
                    batch[key][row] = value
        return batch

    def step(self, actions: np.ndarray) -> ChunkResult:
        """Run a chunk of actions; see ``Environment.step``."""
        actions = check_actions(actions, self.spec, self.copies)
        result = empty_result(self.spec, self.copies, actions.shape[1])
        for row, slot in enumerate(self._slots):
            slot.run(actions[row], result, row)
        return result

    def close(self) -> None:
        """Close every copy."""
        for slot in self._slots:
            slot.simulator.close()
