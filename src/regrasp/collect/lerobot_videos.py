"""A LeRobot v3.0 dataset with cameras, written by LeRobot's own writer, which encodes the videos."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from regrasp.collect.environment import EnvironmentSpec
from regrasp.collect.lerobot_tables import episode_columns, episode_features
from regrasp.collect.rollout import EpisodeRecord


def write_with_videos(root: Path, spec: EnvironmentSpec, episodes: Iterable[EpisodeRecord]) -> int:
    """Write a dataset into the new folder ``root`` and return its number of frames.

    Args:
        root: must not exist.
        spec: of the environment, with its cameras.
        episodes: read once; only one is held at a time.
    """
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
        dataset.save_episode()
        frames += episode.steps
    dataset.finalize()
    return frames
