"""A LeRobot v3.0 dataset with cameras, written by LeRobot's own writer, which encodes the videos."""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from regrasp.collect.environment import EnvironmentSpec
from regrasp.collect.lerobot_tables import episode_columns, episode_features
from regrasp.collect.rollout import EpisodeRecord
from regrasp.core.errors import ConfigError

LEAST_SIDE = 32
"""Pixels. The AV1 encoder ends the whole process on smaller pictures."""


def check_cameras(spec: EnvironmentSpec) -> None:
    """Refuse cameras whose videos cannot be encoded, before anything is recorded.

    Raises:
        ConfigError: a camera is smaller than ``LEAST_SIDE``; it is named.
    """
    for camera in spec.cameras:
        if min(camera.height, camera.width) < LEAST_SIDE:
            raise ConfigError(
                f"The camera {camera.name!r} of {spec.name} is {camera.height} x {camera.width} pixels, and videos are "
                f"recorded of at least {LEAST_SIDE} a side. Mend: choose a larger --image-size."
            )


def write_with_videos(root: Path, spec: EnvironmentSpec, episodes: Iterable[EpisodeRecord]) -> int:
    """Write a dataset into the new folder ``root`` and return its number of frames.

    Args:
        root: must not exist.
        spec: of the environment, with its cameras.
        episodes: read once; only one is held at a time.
    """
    with _quietly():
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        features = episode_features(spec)
        for camera in spec.cameras:
            names = ["height", "width", "channels"]
            features[camera.key] = {"dtype": "video", "shape": (camera.height, camera.width, 3), "names": names}
        dataset = LeRobotDataset.create(
            f"regrasp/{root.name}",
            fps=int(spec.fps),
            features=features,
            root=root,
            robot_type=spec.robot_type,
            use_videos=True,
        )
        frames = 0
        for episode in episodes:
            columns = episode_columns(episode)
            for t in range(episode.steps):
                frame = {key: np.atleast_1d(value[t]) for key, value in columns.items()}
                frame.update({camera.key: episode.observations[camera.key][t] for camera in spec.cameras})
                dataset.add_frame({**frame, "task": spec.task})
            dataset.save_episode(parallel_encoding=False)  # else it forks this process, which has threads
            frames += episode.steps
        dataset.finalize()
    return frames


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the libraries' reports of each episode from the user, and this process's scheduling from the encoder.

    SVT-AV1 makes a process of root's a real-time one, which then keeps a core from every other.
    """
    import av.logging
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar

    os.environ.setdefault("SVT_LOG", "1")  # errors alone
    lerobot = logging.getLogger("lerobot")
    level, scheduling = lerobot.level, os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None
    lerobot.setLevel(logging.ERROR)
    av.logging.set_libav_level(av.logging.ERROR)  # LeRobot gives the log back to libav while it works
    disable_progress_bar()
    try:
        yield
    finally:
        enable_progress_bar()
        av.logging.set_libav_level(av.logging.INFO)  # libav's own default
        lerobot.setLevel(level)
        if scheduling == getattr(os, "SCHED_OTHER", None) and scheduling is not None:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
