"""PushT: a disc pushes a T onto its outline, in two dimensions (the package gym-pusht)."""

import os
import warnings
from typing import Any

import numpy as np

from regrasp.collect.environment import STATE, CameraSpec, EnvironmentSpec, Observation, Step
from regrasp.core.errors import ConfigError

MAX_EPISODE_STEPS = 300


def pusht_spec(*, max_episode_steps: int | None = None, cameras: tuple[CameraSpec, ...] = ()) -> EnvironmentSpec:
    """Return what a policy needs to know of PushT, without starting it.

    Args:
        max_episode_steps: 300 if not given.
        cameras: at most one, a view from above; any name.

    Raises:
        ConfigError: several cameras, or an episode without steps.
    """
    steps = MAX_EPISODE_STEPS if max_episode_steps is None else max_episode_steps
    if steps < 1:
        raise ConfigError(f"A PushT episode has at least 1 step; --max-episode-steps is {steps}.")
    if len(cameras) > 1:
        raise ConfigError(f"PushT has one camera, from above; {len(cameras)} were asked for.")
    return EnvironmentSpec(
        name="pusht",
        task="Push the T-shaped block onto the T-shaped target.",
        state_size=5,
        action_size=2,
        max_episode_steps=steps,
        fps=10.0,
        robot_type="2d pointer",
        state_names=("agent_x", "agent_y", "block_x", "block_y", "block_angle"),
        action_names=("target_x", "target_y"),
        cameras=cameras,
    )


class PushT:
    """One PushT simulation. Positions are in pixels of a 512 × 512 board, the angle in radians."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        """Start PushT, drawing the camera of ``spec`` if it has one.

        Raises:
            ConfigError: gym-pusht is not installed.
        """
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # pygame's import warns of setuptools
                from gym_pusht.envs import PushTEnv
        except ImportError as error:
            raise ConfigError(
                f"The environment 'pusht' needs the package gym-pusht, and importing it failed ({error}). Install it "
                f"with: pip install 'regrasp[pusht]'"
            ) from error
        self.spec = spec
        kwargs: dict[str, Any] = {"obs_type": "state"}
        for camera in spec.cameras:
            kwargs = {
                "obs_type": "pixels_agent_pos",
                "observation_height": camera.height,
                "observation_width": camera.width,
            }
        self._simulation: Any = PushTEnv(**kwargs)

    def reset(self, seed: int) -> Observation:
        """Start the episode of ``seed``; see ``Simulator.reset``."""
        raw, info = self._simulation.reset(seed=seed)
        return self._observe(raw, info)

    def step(self, action: np.ndarray) -> Step:
        """Move towards ``action``, a point of the board. The reward is the share of the target that is covered."""
        raw, reward, _, _, info = self._simulation.step(np.clip(action, 0.0, 512.0).astype(np.float64))
        return Step(self._observe(raw, info), float(reward), bool(info["is_success"]))

    def close(self) -> None:
        """Free the drawing surface."""
        self._simulation.close()

    def _observe(self, raw: Any, info: dict[str, Any]) -> Observation:  # noqa: ANN401 (an array or a dict)
        state = np.concatenate((np.asarray(info["pos_agent"]), np.asarray(info["block_pose"])))
        observation: Observation = {STATE: state.astype(np.float32)}
        for camera in self.spec.cameras:
            observation[camera.key] = raw["pixels"]
        return observation
