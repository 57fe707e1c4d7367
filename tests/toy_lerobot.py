"""A LeRobot environment plugin that a test installs in a folder of its own: a point that is to reach 1."""

import sys
from pathlib import Path

import pytest

PLUGIN = """
import os, signal
from dataclasses import dataclass, field
from pathlib import Path
import gymnasium as gym
import numpy as np
from lerobot.envs.configs import EnvConfig

class Point(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    observation_space = gym.spaces.Dict({
        "agent_pos": gym.spaces.Box(-9, 9, (2,), np.float64),
        "environment_state": gym.spaces.Box(-9, 9, (3,), np.float64),
        "pixels": gym.spaces.Dict({
            "top": gym.spaces.Box(0, 255, (64, 96, 3), np.uint8),
            "wrist": gym.spaces.Box(0, 255, (64, 64, 3), np.uint8),
        }),
    })

    def __init__(self, config):
        self.config, self._max_episode_steps, self.init_state_id = config, config.episode_length, 0
        self.task_description = "reach one"
        self.number = 0

    def _seen(self):
        top, wrist = np.full((64, 96, 3), self.steps, np.uint8), np.full((64, 64, 3), 200, np.uint8)
        return {"agent_pos": self.at.copy(), "environment_state": np.array([1.0, 2.0, self.init_state_id]),
                "pixels": {"top": top, "wrist": wrist}}

    def _told(self, success):
        return {} if self.config.silent else {"is_success": success}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.number += 1
        self.steps = 0
        self.at = self.np_random.uniform(-0.5, 0.5, 2) + (self.number if self.config.forgetful else 0)
        return self._seen(), self._told(False)

    def step(self, action):
        self.steps += 1
        self.at = self.at + 0.2 * np.asarray(action, float)
        mark = Path(self.config.dies) if self.config.dies else None
        if mark is not None and self.steps == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        success = bool(self.at[0] >= 1.0)
        gave_up = bool(self.at[0] <= -1.0)
        return self._seen(), float(self.at[0]), success or gave_up, self.steps >= self._max_episode_steps, \\
            self._told(success)

    def render(self):
        return np.full((33, 48, 3), 10 * self.steps, np.uint8)

@EnvConfig.register_subclass("toy_point")
@dataclass
class ToyConfig(EnvConfig):
    task: str | None = "point"
    fps: int = 10
    episode_length: int = 12
    dies: str = ""
    silent: bool = False
    forgetful: bool = False
    tasks: int = 1
    note: str = ""

    @property
    def gym_kwargs(self):
        return {}

    def create_envs(self, n_envs, use_async_envs=False):
        make = lambda: Point(self)
        return {"toy": {n: gym.vector.SyncVectorEnv([make] * n_envs) for n in range(self.tasks)}}
"""
METADATA = "Metadata-Version: 2.1\nName: lerobot_env_toy\nVersion: 0.1\n"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the plugin where LeRobot finds it, in this process and in those that it starts."""
    (folder / "lerobot_env_toy-0.1.dist-info").mkdir(parents=True)
    (folder / "lerobot_env_toy-0.1.dist-info" / "METADATA").write_text(METADATA)
    (folder / "lerobot_env_toy.py").write_text(PLUGIN)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(folder))
