"""The synchronised cameras of one episode: checked, selected by timestamp, and joined in a collage."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int, UInt8

from regrasp.core.errors import ConfigError, VideoError
from regrasp.data.frames import FrameReader, episode_timestamps, iter_episode_frames
from regrasp.data.video import Footage, Size, VideoCursor, read_frames
from regrasp.rewards.jobs import Control, Job

if TYPE_CHECKING:
    from av.container import InputContainer

MOST_VIEWS = 4
_SAME_RATE = 1e-3
"""Frame rates that differ by less than this part are one."""


@dataclass(frozen=True, kw_only=True)
class Clip:
    """One camera's video file.

    Attributes:
        path: The file.
        times: When each frame is shown, in seconds of the file, ascending.
        fps: Its average frame rate.
        size: Height and width, as it is to be shown.
        turns: Quarter turns to the left that show it upright, for a camera that was held on its side.
    """

    path: Path
    times: Float[np.ndarray, " n"]
    fps: float
    size: Size
    turns: int = 0


class _ClipFootage(Footage):
    """A file that was named by itself, whose error names no dataset."""

    def error(self, problem: str) -> VideoError:
        return VideoError(
            f"The video '{self.path}' cannot be judged: {problem}. Mend: restore the file, or leave it out."
        )


class Views:
    """The cameras of a job, of one rate, length and start; frames of them by number.

    Attributes:
        names: What each view is called.
        sizes: Height and width of each, as recorded.
        timestamps: When each frame is shown, in seconds since the episode's start.
        duration_s: The episode's length: the last frame lasts as long as a frame does.
        fps: Frames per second, on average.
    """

    def __init__(self, job: Job) -> None:
        """Open the job's cameras and check that they belong together.

        Raises:
            VideoError: A video is missing, unreadable or not synchronised with the first.
            ConfigError: There are more views than a collage holds.
        """
        self.job = job
        if job.episode is not None:
            self._open_episode(job)
        else:
            self._open_clips(job)
        if len(self.names) > MOST_VIEWS:
            message = f"Job {job.id!r} has {len(self.names)} views; a collage holds at most {MOST_VIEWS}. Mend: fewer."
            raise ConfigError(message)
        self._recorded = self.timestamps
        self._order = np.arange(len(self.timestamps))
        self._change(job.control, job.shown)

    def _change(self, control: Control | None, shown: float) -> None:
        """Show the frames in another order, fewer of them, or one throughout; the cameras stay together."""
        if control in ("reversed", "reversed prefix"):
            self._order = self._order[::-1]
        elif control == "frozen":
            self._order = np.zeros_like(self._order)
        if shown < 1:
            self.timestamps = self.timestamps[: self.shown_frames(shown)]
            self.duration_s = _duration(self.timestamps, self.fps)

    def shown_frames(self, share: float) -> int:
        """Return how many frames are a share of these, at least one."""
        return max(1, round(len(self.timestamps) * share))

    def _open_episode(self, job: Job) -> None:
        place = job.episode
        assert place is not None
        self._clips: list[Clip] = []
        self.names = list(place.cameras)
        self.timestamps = episode_timestamps(place.dataset, place.number)
        self.fps = place.dataset.fps
        cameras = [place.dataset.cameras[name] for name in place.cameras]
        self.sizes: list[Size] = []
        for camera in cameras:
            if camera.height is None or camera.width is None:
                first = iter_episode_frames(place.dataset, camera.name, place.number, rows=slice(1))
                height, width = next(first).shape[:2]
                self.sizes.append((height, width))
            else:
                self.sizes.append((camera.height, camera.width))
        self.duration_s = _duration(self.timestamps, self.fps)

    def _open_clips(self, job: Job) -> None:
        self._clips = [read_clip(path) for path in job.videos]
        check_synchronised(self._clips)
        first = self._clips[0]
        self.names = [path.stem for path in job.videos]
        self.sizes = [clip.size for clip in self._clips]
        self.timestamps, self.fps = first.times - first.times[0], first.fps
        self.duration_s = _duration(self.timestamps, self.fps)

    def frames(self, view: int, numbers: Int[np.ndarray, " n"], size: Size) -> UInt8[np.ndarray, "n h w 3"]:
        """Return frames of one view, in the order asked, resized to ``size``; a frame asked twice is decoded once."""
        unique, back = np.unique(self._order[numbers], return_inverse=True)
        if self.job.episode is not None:
            place = self.job.episode
            with contextlib.closing(FrameReader(place.dataset, place.cameras[view], size)) as reader:
                return reader.read(place.number, self._recorded[unique])[back]
        clip = self._clips[view]
        with contextlib.closing(VideoCursor(_footage(clip), _turned(size, clip.turns))) as cursor:
            frames = read_frames(cursor, clip.times[unique])
        return np.rot90(frames, clip.turns, axes=(1, 2))[back]

    def collage(self, numbers: Int[np.ndarray, " n"], most_height: int) -> UInt8[np.ndarray, "n h w 3"]:
        """Return frames with all views in one picture; one view alone is only resized.

        Two and three views stand in a row: left, right; left, centre, right. Four stand in two rows: top, front or
        bottom; left, right.

        Args:
            numbers: Which frames.
            most_height: The most pixels of a view's height; smaller views are not enlarged.
        """
        cell = self.cell(most_height)
        rows, columns = grid(len(self.names))
        canvas = np.zeros((len(numbers), rows * cell[0], columns * cell[1], 3), dtype=np.uint8)
        for view, size in enumerate(self.sizes):
            height, width = fit(size, cell)
            top = (view // columns) * cell[0] + (cell[0] - height) // 2
            left = (view % columns) * cell[1] + (cell[1] - width) // 2
            canvas[:, top : top + height, left : left + width] = self.frames(view, numbers, (height, width))
        return canvas

    def cell(self, most_height: int) -> Size:
        """Return the height and width that each view gets in a collage, both even."""
        height = min(most_height, max(size[0] for size in self.sizes))
        width = max(size[1] * height / size[0] for size in self.sizes)
        return _even(height), _even(width)

    def collage_size(self, most_height: int) -> Size:
        """Return the collage's height and width."""
        cell, (rows, columns) = self.cell(most_height), grid(len(self.names))
        return rows * cell[0], columns * cell[1]

    def nearest(self, times_s: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return the number of the frame shown nearest to each time; the earlier of two equally near."""
        return nearest_frames(self.timestamps, times_s)


def nearest_frames(timestamps: Float[np.ndarray, " t"], times_s: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Return the position of the timestamp nearest to each time; the earlier of two equally near.

    Args:
        timestamps: Ascending.
        times_s: In the same seconds.
    """
    after = np.searchsorted(timestamps, times_s).clip(1, max(1, len(timestamps) - 1))
    if len(timestamps) == 1:
        return np.zeros(len(times_s), dtype=np.int64)
    later_is_nearer = (timestamps[after] - times_s) < (times_s - timestamps[after - 1]) - 1e-9
    return np.where(later_is_nearer, after, after - 1)


def uniform_frames(
    timestamps: Float[np.ndarray, " t"], *, per_second: float, most: int, duration_s: float
) -> Int[np.ndarray, " n"]:
    """Return frames at even times from the first to the last, without repeats.

    Args:
        timestamps: When the episode's frames are shown.
        per_second: How many are wanted for a second of a short episode.
        most: The most frames.
        duration_s: The episode's length.
    """
    count = min(most, len(timestamps), max(1, round(duration_s * per_second)))
    if count == 1:
        return np.array([len(timestamps) - 1])
    return np.unique(nearest_frames(timestamps, np.linspace(timestamps[0], timestamps[-1], count)))


def grid(views: int) -> tuple[int, int]:
    """Return the rows and columns of a collage of 1 to 4 views."""
    return (2, 2) if views == 4 else (1, views)


def fit(size: Size, cell: Size) -> Size:
    """Return the largest even height and width of ``size``'s shape within ``cell``."""
    scale = min(cell[0] / size[0], cell[1] / size[1])
    return min(cell[0], _even(size[0] * scale)), min(cell[1], _even(size[1] * scale))


def _even(pixels: float | int) -> int:
    return max(2, 2 * round(pixels / 2))


def _duration(timestamps: Float[np.ndarray, " t"], fps: float) -> float:
    return round(float(timestamps[-1] - timestamps[0]) + 1.0 / fps, 6)


def read_clip(path: Path) -> Clip:
    """Read when a video's frames are shown, from its packets; only the first is decoded, to see which way is up.

    Raises:
        VideoError: It is missing, is no video, or holds no frame.
    """
    import av
    from av.error import FFmpegError

    def error(problem: str) -> VideoError:
        return VideoError(
            f"The video '{path}' cannot be judged: {problem}. Mend: correct the path, or restore the file."
        )

    missing = _missing(path)
    if missing is not None:
        raise error(missing)
    try:
        with contextlib.closing(av.open(str(path))) as container:
            if not container.streams.video:
                raise error("the file holds no video stream")
            stream = container.streams.video[0]
            scale = float(stream.time_base or 1)
            kept = [p.pts for p in container.demux(stream) if p.pts is not None and not p.is_discard]
            size = (stream.codec_context.height, stream.codec_context.width)
            turns = _turns(container) if kept else 0
    except (FFmpegError, OSError) as trouble:
        if isinstance(trouble, VideoError):
            raise
        raise error(f"it cannot be read as a video ({trouble.strerror or trouble})") from trouble
    times = np.unique(np.array(kept, dtype=np.float64) * scale)
    if not len(times) or 0 in size:
        raise error("the file holds no frame, or does not say when its frames are shown")
    fps = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else float(stream.average_rate or 1)
    return Clip(path=path, times=times, fps=float(fps), size=_turned(size, turns), turns=turns)


def _turns(container: "InputContainer") -> int:
    """How many quarter turns to the left show the first frame upright, as the file says of its camera."""
    container.seek(0)
    first = next(container.decode(video=0), None)
    return 0 if first is None else round(first.rotation / 90) % 4


def _turned(size: Size, turns: int) -> Size:
    return (size[1], size[0]) if turns % 2 else size


def _missing(path: Path) -> str | None:
    """Why there is no file to read; None where there is one."""
    try:
        return None if S_ISREG(path.stat().st_mode) else "it is no file"
    except FileNotFoundError:
        return "there is no such file"
    except (OSError, ValueError) as trouble:  # such as a folder without access, or a name that is too long
        return f"it cannot be looked up ({getattr(trouble, 'strerror', None) or trouble})"


def check_synchronised(clips: Sequence[Clip]) -> None:
    """Refuse cameras that differ in frame rate, frame count, start, or the time of a frame, with the figures.

    Raises:
        VideoError: They do.
    """
    first = clips[0]
    tolerance = 0.5 / first.fps
    for clip in clips[1:]:
        apart = None
        if abs(clip.fps - first.fps) > _SAME_RATE * first.fps:
            apart = f"{first.fps:.3f} and {clip.fps:.3f} frames per second"
        elif len(clip.times) != len(first.times):
            apart = f"{len(first.times)} and {len(clip.times)} frames"
        elif abs(clip.times[0] - first.times[0]) > tolerance:
            apart = f"a start at {first.times[0]:.3f} s and at {clip.times[0]:.3f} s"
        else:
            off = np.abs(clip.times - first.times)
            worst = int(off.argmax())
            if off[worst] > tolerance:
                apart = f"frame {worst} at {first.times[worst]:.3f} s and at {clip.times[worst]:.3f} s"
        if apart:
            message = (
                f"Cameras are judged together only if they show the same times; '{first.path}' and '{clip.path}' have "
                f"{apart}. Mend: cut and resample them to one clock, or judge one camera."
            )
            raise VideoError(message)


def _footage(clip: Clip) -> Footage:
    return _ClipFootage(
        path=clip.path,
        dataset=clip.path.parent.name,
        camera=clip.path.stem,
        episode=0,
        start_s=0.0,
        end_s=None,
        tolerance_s=0.5 / clip.fps,
    )
