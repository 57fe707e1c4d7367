"""Make two small LeRobot datasets of a simulated table-top task: demonstrations, and rollouts of a flawed policy.

    python examples/make_dataset.py OUT_DIR [--seed 0]

A gripper, seen from above, has to put a cube in the green or in the purple tray; the task's text says which.
The state holds what a robot feels of itself (where the gripper is, how far closed, whether something is in it);
where the cube is, only the camera sees. ``OUT_DIR/demos`` holds successes. ``OUT_DIR/rollouts`` holds what a policy
might do that learned from too few of them: it is slow and pauses, and where the cube lies on the right half of
the table it mostly wanders about with an empty fist until someone stops it, drops the cube over the edge, or
takes the wrong tray; now and then a person takes over (column ``intervention``). Everything is written by
LeRobot's own writer, as ``lerobot-record`` would.
"""

import argparse
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")

FPS = 10
SIZE = 96
LIMIT = 110
"""Frames after which an attempt has failed."""
SPEED = 0.025
"""The farthest that the gripper moves in a frame; the table is 1 x 1."""
REACH = 0.04
TRAYS = {"green": np.array([0.22, 0.18]), "purple": np.array([0.78, 0.18])}
COLOURS = {"green": (95, 150, 95), "purple": (140, 100, 160), "cube": (205, 45, 45), "gripper": (35, 35, 35)}
TASKS = {tray: f"put the cube in the {tray} tray" for tray in TRAYS}
FEATURES = {
    "observation.images.top": {"dtype": "video", "shape": (SIZE, SIZE, 3), "names": ["height", "width", "channel"]},
    "observation.state": {"dtype": "float32", "shape": (4,), "names": ["x", "y", "closed", "load"]},
    "action": {"dtype": "float32", "shape": (3,), "names": ["dx", "dy", "close"]},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    "intervention": {"dtype": "bool", "shape": (1,), "names": None},
}


@dataclass
class Table:
    """The simulated scene."""

    gripper: np.ndarray
    cube: np.ndarray
    light: float = 1.0
    closed: float = 0.0
    held: bool = False
    fallen: bool = False

    def state(self) -> np.ndarray:
        """Give what the robot feels of itself: x, y, how far closed, whether loaded. float32 [4]."""
        return np.array([*self.gripper, self.closed, self.held], dtype=np.float32)

    def step(self, action: np.ndarray) -> None:
        """Move by ``action[:2]`` (in table sizes), and close if ``action[2] > 0.5``, else open."""
        self.gripper = np.clip(self.gripper + np.clip(action[:2], -SPEED, SPEED), 0.03, 0.97)
        was_closed, self.closed = self.closed, float(np.clip(self.closed + (0.25 if action[2] > 0.5 else -0.25), 0, 1))
        if was_closed < 0.75 <= self.closed:
            self.held = not self.fallen and bool(np.linalg.norm(self.cube - self.gripper) < REACH)
        elif self.closed < 0.5:
            self.held = False
        if self.held:
            self.cube = self.gripper.copy()
        self.fallen = self.fallen or (not self.held and self.cube[0] > 0.92)

    def cube_in(self, tray: str) -> bool:
        """Whether the cube was put in a tray."""
        return not self.held and bool(np.linalg.norm(self.cube - TRAYS[tray]) < 0.08)

    def picture(self) -> np.ndarray:
        """Draw the view from above: uint8 [SIZE, SIZE, 3]."""
        y, x = (np.mgrid[:SIZE, :SIZE] + 0.5) / SIZE
        image = np.full((SIZE, SIZE, 3), (196, 182, 158), dtype=np.float64)
        for name, tray in TRAYS.items():
            image[np.hypot(x - tray[0], y - tray[1]) < 0.14] = COLOURS[name]
        if not self.fallen:
            image[np.maximum(abs(x - self.cube[0]), abs(y - self.cube[1])) < 0.07] = COLOURS["cube"]
        gap = 0.07 + 0.05 * (1 - self.closed)
        dx, dy = abs(abs(x - self.gripper[0]) - gap), y - self.gripper[1]
        image[(dx < 0.02) & (abs(dy) < 0.06)] = COLOURS["gripper"]
        image[(abs(x - self.gripper[0]) < gap) & (abs(dy + 0.08) < 0.025)] = COLOURS["gripper"]
        return np.clip(image * self.light, 0, 255).astype(np.uint8)


def drive(table: Table, goal: np.ndarray, *, close: bool, pace: float = 1.0) -> np.ndarray:
    """Take a step towards ``goal``: the action, float64 [3]."""
    step = goal - table.gripper
    return np.array([*(step * min(1.0, pace * SPEED / (np.abs(step).max() + 1e-9))), float(close)])


def skilled(table: Table, tray: str, pace: float = 1.0) -> np.ndarray:
    """Do the next thing that brings the cube to ``tray``."""
    goal = TRAYS[tray] if table.held else table.cube
    there = bool(np.abs(table.gripper - goal).max() < 0.02)
    if table.cube_in(tray) or table.fallen or (table.closed > 0 and not table.held and not there):
        return drive(table, table.gripper, close=False)
    return drive(table, goal, close=table.held != there, pace=pace)


@dataclass
class Clumsy:
    """A policy that learned from too few demonstrations; ``fault`` is what will go wrong, if anything."""

    rng: np.random.Generator
    tray: str
    fault: str | None
    pace: float
    pause_at: int
    pause: int
    goal: np.ndarray = field(default_factory=lambda: np.array([0.5, 0.5]))

    def act(self, table: Table, frame: int) -> np.ndarray:
        """Choose the action of one frame: float64 [3]."""
        if self.pause_at <= frame < self.pause_at + self.pause:
            return drive(table, table.gripper, close=table.held)
        if self.fault == "wander":
            if frame % 15 == 0:
                self.goal = self.rng.uniform((0.2, 0.4), (0.95, 0.95))
            return drive(table, self.goal, close=True, pace=0.6)
        if self.fault == "drop" and table.held:
            edge = np.array([1.0, table.gripper[1]])
            return drive(table, edge, close=bool(table.gripper[0] < 0.95), pace=self.pace)
        other = next(tray for tray in TRAYS if tray != self.tray)
        action = skilled(table, other if self.fault == "wrong" else self.tray, self.pace)
        action[:2] += self.rng.normal(0, 0.004, size=2)
        return action


def new_policy(rng: np.random.Generator, table: Table, tray: str) -> Clumsy:
    """Draw what goes wrong in one rollout: mostly something where the cube lies on the right, seldom elsewhere."""
    fails = rng.random() < (0.9 if table.cube[0] > 0.5 else 0.1)
    fault = str(rng.choice(["wander", "wander", "drop", "wrong"])) if fails else None
    pause = int(rng.integers(5, 30)) if rng.random() < 0.5 else 0
    return Clumsy(rng, tray, fault, pace=rng.uniform(0.45, 0.8), pause_at=int(rng.integers(5, 30)), pause=pause)


Frame = dict[str, np.ndarray | str]


def episode(rng: np.random.Generator, tray: str, *, demo: bool) -> Iterator[Frame]:
    """Act out one attempt: LeRobot frames until the cube is in the tray, the attempt has failed, or time is up."""
    table = Table(rng.uniform((0.3, 0.3), (0.7, 0.6)), rng.uniform((0.1, 0.45), (0.88, 0.9)), rng.uniform(0.95, 1.05))
    policy = new_policy(rng, table, tray)
    corrected = not demo and policy.fault == "wander" and rng.random() < 0.5
    from_frame = int(rng.integers(25, 40)) if corrected else LIMIT
    to_frame = from_frame + int(rng.integers(14, 30))
    fault_after = "wander" if rng.random() < 0.25 else None
    stopped, lost, pace = int(rng.integers(50, LIMIT)), 0, rng.uniform(0.75, 1.0)
    for frame in range(LIMIT):
        person = from_frame <= frame < to_frame
        policy.fault = fault_after if person else policy.fault
        action = skilled(table, tray, pace) if demo or person else policy.act(table, frame)
        seen = {"observation.images.top": table.picture(), "observation.state": table.state()}
        table.step(action)
        success = table.cube_in(tray) and table.closed == 0
        lost += table.fallen or (table.closed == 0 and any(table.cube_in(name) for name in TRAYS))
        given_up = lost > 12 or (policy.fault == "wander" and frame >= stopped)
        done = success or given_up or frame == LIMIT - 1
        yield seen | {
            "action": action.astype(np.float32),
            "next.reward": np.array([float(success)], dtype=np.float32),
            "next.done": np.array([done]),
            "next.success": np.array([success]),
            "intervention": np.array([person]),
            "task": TASKS[tray],
        }
        if done:
            return


def quiet_libraries() -> None:
    """Keep LeRobot, datasets and the video encoder from printing hundreds of lines about nothing amiss."""
    import av
    import datasets

    logging.getLogger("lerobot").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    av.logging.set_libav_level(av.logging.ERROR)


def write(root: Path, episodes: int, seed: int, *, demo: bool) -> str:
    """Write one dataset of ``episodes`` attempts, the two tasks in turn; a line that says what is in it."""
    quiet_libraries()
    from lerobot.configs import RGBEncoderConfig
    from lerobot.datasets import LeRobotDataset

    dataset = LeRobotDataset.create(
        f"example/{root.name}",
        fps=FPS,
        features=FEATURES,
        root=root,
        robot_type="simulated_gripper",
        rgb_encoder=RGBEncoderConfig(vcodec="h264", crf=18, preset="veryfast"),
        encoder_threads=1,
        streaming_encoding=True,
        encoder_queue_maxsize=LIMIT,
    )
    successes, corrections, total = 0, 0, 0
    for number in range(episodes):
        rng = np.random.default_rng([seed, int(demo), number])
        frames = list(episode(rng, list(TASKS)[number % 2], demo=demo))
        successes += bool(frames[-1]["next.success"])
        corrections += any(bool(frame["intervention"]) for frame in frames)
        total += len(frames)
        for frame in frames:
            dataset.add_frame(frame)
        dataset.save_episode()
    dataset.finalize()
    outcome = f"{successes} successes, {episodes - successes} failures, {corrections} with corrections"
    return f"{root}: {episodes} episodes, {total} frames ({outcome})"


def main() -> None:
    """Write ``OUT_DIR/demos`` and ``OUT_DIR/rollouts``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, help="a folder; its demos/ and rollouts/ must not exist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demos", type=int, default=14, help="how many demonstrations")
    parser.add_argument("--rollouts", type=int, default=30, help="how many rollouts")
    options = parser.parse_args()
    for name in ("demos", "rollouts"):
        if (options.out_dir / name).exists():
            parser.error(f"{options.out_dir / name} exists already; remove it, or name another folder")
    print(write(options.out_dir / "demos", options.demos, options.seed, demo=True))
    print(write(options.out_dir / "rollouts", options.rollouts, options.seed, demo=False))


if __name__ == "__main__":
    main()
