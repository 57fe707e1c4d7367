"""The images of a fit at the model's size: decoded once into files, or read from the videos where those are too big."""

import functools
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
from jaxtyping import Float, Int, UInt8

from regrasp.core.provenance import digest
from regrasp.data.dataset import Dataset
from regrasp.data.frames import FrameReader, iter_episode_frames
from regrasp.data.video import RESIZE, Size
from regrasp.learn.episode_pool import in_processes
from regrasp.learn.episode_rows import DatasetRows, EpisodeRef

STRIDES = range(1, 9)
"""The cache keeps every frame, or as few as every eighth; beyond that, training reads frames from the videos."""
HELD_OUT_SHARE = 0.25
"""The greatest part of the cache that held-out frames take."""
HELD_OUT_FRAMES = 20_000
"""Held-out frames beyond this are thinned out, so that an evaluation stays short."""
MAPPED = 256
"""Cached episodes that are mapped at a time."""

Track = Callable[[Iterable[object], int], Iterable[object]]
"""Shows progress over some work, given how much there is."""


@dataclass(frozen=True, kw_only=True)
class Strides:
    """Which frames are kept in the cache."""

    training: int | None
    """Every so-manieth frame of training episodes; None: all are used, and read from the videos."""
    held_out: int
    """Every so-manieth frame of held-out episodes."""


def plan_strides(training: Sequence[int], held_out: Sequence[int], frame_bytes: int, budget: float) -> Strides:
    """Choose how many frames are kept in the cache.

    Args:
        training: Lengths of the training episodes.
        held_out: Lengths of the held-out episodes.
        frame_bytes: Of one frame, over all cameras; 0 without cameras.
        budget: The cache's size, in bytes.

    Returns:
        The least strides with which the frames fit: held-out frames into a quarter of the cache (and at most
        20 000 of them), training frames into what is left, up to every eighth; None where even these do not fit.
    """

    def frames(lengths: Sequence[int], stride: int) -> int:
        return sum(-(-length // stride) for length in lengths)

    held = 1
    while frames(held_out, held) > HELD_OUT_FRAMES or (
        frames(held_out, held) * frame_bytes > HELD_OUT_SHARE * budget and held < max(held_out)
    ):
        held += 1
    left = budget - frames(held_out, held) * frame_bytes
    fitting = [stride for stride in STRIDES if frames(training, stride) * frame_bytes <= left]
    return Strides(training=min(fitting) if fitting else None, held_out=held)


class Images:
    """Images of episodes at one size, from a cache where they are in it, else from the videos."""

    def __init__(
        self, datasets: Sequence[Dataset], rows: Sequence[DatasetRows], cameras: Sequence[str], size: Size, folder: Path
    ) -> None:
        """Serve the ``cameras`` of ``datasets``, in that order; the cache lies in ``folder``."""
        self.datasets, self.rows, self.cameras, self.size, self.folder = datasets, rows, cameras, size, folder
        self.strides: dict[tuple[int, int], int] = {}
        self._readers: dict[tuple[int, str], FrameReader] = {}

    def present(self, dataset: int) -> list[bool]:
        """Tell which of the cameras a dataset has."""
        return [camera in self.datasets[dataset].cameras for camera in self.cameras]

    def fill(self, episodes: Sequence[EpisodeRef], stride: int, workers: int, track: Track) -> None:
        """Decode every ``stride``-th frame of ``episodes`` into the cache, unless it is there; one episode a worker."""
        for unfinished in self.folder.glob("*/*/.episode_*.tmp"):  # of a fit that was killed
            unfinished.unlink()
        jobs = [
            _Job(
                dataset=episode.dataset,
                camera=camera,
                episode_index=episode.episode_index,
                timestamps=np.array(self._timestamps(episode)),
                size=self.size,
                stride=stride,
                path=self._path(episode, camera, stride),
            )
            for episode in episodes
            for camera, present in zip(self.cameras, self.present(episode.dataset), strict=True)
            if present and not self._path(episode, camera, stride).is_file()
        ]
        decode = functools.partial(_decode, self.datasets)
        for _ in track(in_processes(decode, jobs, workers), len(jobs)):
            pass
        self.strides |= {(episode.dataset, episode.episode_index): stride for episode in episodes}

    def forget_others(self) -> None:
        """Remove cached frames of other dataset versions, sizes and strides."""
        keys = {self._key(d, s) for (d, _), s in self.strides.items()}
        for path in self.folder.glob("*"):
            if path.name not in keys:
                shutil.rmtree(path)

    def read(self, episode: EpisodeRef, wanted: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n C h w 3"]:
        """Return the images of an episode's rows; zeros for cameras that its dataset lacks."""
        images = np.zeros((len(wanted), len(self.cameras), *self.size, 3), dtype=np.uint8)
        stride = self.strides.get((episode.dataset, episode.episode_index))
        for place, camera in enumerate(self.cameras):
            if camera not in self.datasets[episode.dataset].cameras:
                continue
            if stride is not None:
                images[:, place] = _mapped(self._path(episode, camera, stride))[wanted // stride]
            else:
                reader = self._reader(episode.dataset, camera)
                images[:, place] = reader.read(episode.episode_index, self._timestamps(episode)[wanted])
        return images

    def _timestamps(self, episode: EpisodeRef) -> Float[np.ndarray, " T"]:
        return self.rows[episode.dataset].timestamps[episode.first_row : episode.first_row + episode.length]

    def _reader(self, dataset: int, camera: str) -> FrameReader:
        if (dataset, camera) not in self._readers:
            self._readers[dataset, camera] = FrameReader(self.datasets[dataset], camera, self.size)
        return self._readers[dataset, camera]

    def _key(self, dataset: int, stride: int) -> str:
        opened = self.datasets[dataset]
        parts = [opened.index().fingerprint, RESIZE, list(self.size), stride]
        return f"{quote(opened.name, safe='')}-{digest(parts)[:12]}"

    def _path(self, episode: EpisodeRef, camera: str, stride: int) -> Path:
        folder = self.folder / self._key(episode.dataset, stride) / quote(camera, safe="")
        return folder / f"episode_{episode.episode_index:06d}.npy"


@functools.lru_cache(MAPPED)
def _mapped(path: Path) -> UInt8[np.ndarray, "n h w 3"]:
    return np.load(path, mmap_mode="r")


@dataclass(frozen=True, kw_only=True)
class _Job:
    dataset: int
    camera: str
    episode_index: int
    timestamps: Float[np.ndarray, " T"]
    size: Size
    stride: int
    path: Path


def _decode(datasets: Sequence[Dataset], job: _Job) -> None:
    """Write one episode's frames of one camera under another name, and rename."""
    job.path.parent.mkdir(parents=True, exist_ok=True)
    count = -(-len(job.timestamps) // job.stride)
    temporary = job.path.with_name(f".{job.path.name}.{os.getpid()}.tmp")
    try:
        images = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=(count, *job.size, 3))
        frames = iter_episode_frames(
            datasets[job.dataset],
            job.camera,
            job.episode_index,
            job.size,
            timestamps=job.timestamps,
            rows=slice(None, None, job.stride),
        )
        for row, frame in enumerate(frames):
            images[row] = frame
        images.flush()
        temporary.rename(job.path)
    finally:
        temporary.unlink(missing_ok=True)
