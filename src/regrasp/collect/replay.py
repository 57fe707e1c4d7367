"""Videos of episodes that ran without being drawn: simulators are deterministic, so the actions are run again."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from regrasp.collect.environment import Environment, EnvironmentSpec
from regrasp.collect.environments import start_environment, watching_camera
from regrasp.collect.rollout import EpisodeRecord


class Replayer:
    """Draws episodes of one environment, in a process of its own."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        """Start a copy of the environment with a camera.

        Raises:
            ConfigError: images cannot be drawn on this machine.
        """
        self._camera = watching_camera(spec)
        self._environment: Environment = start_environment(replace(spec, cameras=(self._camera,)), copies=1, workers=1)

    def write(self, episode: EpisodeRecord, path: Path) -> None:
        """Write an episode as an H.264 video at the environment's frame rate."""
        first = self._environment.reset([episode.seed])[self._camera.key]
        result = self._environment.step(episode.actions[None])
        frames = np.concatenate((first, result.observations[self._camera.key][0]))
        write_video(path, frames, self._environment.spec.fps)

    def close(self) -> None:
        """Stop the environment."""
        self._environment.close()


def write_video(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write frames uint8 [T, H, W, 3], of even height and width, as an H.264 video."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))
        container.mux(stream.encode())
