"""Frames of a video file, found by presentation time and never by number.

A frame is wanted at a time; the frame given is the one whose presentation timestamp is nearest (the earlier of two
equally near), and it must lie within the tolerance, which callers set to half a frame interval. PyAV decodes, with one
thread: parallel work is one process an episode. A wanted size is reached by swscale straight from the decoder's
planes, in uint8, for every kind of access, so that training and inference see the same pixels.
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from jaxtyping import Float, UInt8

from regrasp.core.errors import VideoError

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.video.reformatter import VideoReformatter

Size = tuple[int, int]
"""Height and width, in pixels."""

RESIZE = "swscale-area-1"
"""The name of the one resize, for caches and checkpoints: it changes when the pixels would."""

FORWARD_S = 0.5
"""Random access decodes on, instead of seeking, to a time at most this far ahead."""

SAME_S = 1e-4
"""Times this close are one: timestamps are stored as float32, presentation times as whole ticks."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Footage:
    """One episode's part of a video file, with what an error has to say about it.

    Attributes:
        path: The file.
        dataset: The dataset's name.
        camera: The camera's name in the run.
        episode: The episode's number.
        start_s: The time in the file of the episode's time 0.
        end_s: The time in the file at which the episode ends; None for the end of the file.
        tolerance_s: How far a frame may lie from the time at which it is wanted.
    """

    path: Path
    dataset: str
    camera: str
    episode: int
    start_s: float
    end_s: float | None
    tolerance_s: float

    def times_in_file(self, timestamps: Sequence[float] | np.ndarray) -> Float[np.ndarray, " n"]:
        """Turn an episode's timestamps into times in the file; a VideoError says when they pass the episode's end."""
        times = np.asarray(timestamps, dtype=np.float64) + self.start_s
        if self.end_s is not None and times.size and times.max() > self.end_s + self.tolerance_s:
            raise self.error(
                f"the metadata end it at {self.end_s:.3f} s of the file, before its last frame, which is due at "
                f"{times.max():.3f} s"
            )
        return times

    def error(self, problem: str) -> VideoError:
        """Return the error that says what is wrong with this footage and which stages can go on without it."""
        return VideoError(
            f"Camera {self.camera!r} of episode {self.episode} in {self.dataset!r} cannot be used: {problem}. File: "
            f"'{self.path}'. Mend: restore the file. Without it, the stages that read no video go on (returns, "
            "advantages, relabel), and so does `regrasp value fit` with --cameras naming the other cameras, or "
            "--cameras none."
        )


class VideoCursor:
    """One open decoder, moved forward in a file; it belongs to the process that opened it.

    Attributes:
        footage: What is read.
        size: Height and width of the frames given; None for the file's own.
        process: The process that opened it. A decoder used after a fork gives wrong frames.
        last_s: Where known, the time in the file of the episode's last frame, for the error of a short video.
    """

    def __init__(self, footage: Footage, size: Size | None) -> None:
        """Open the file of ``footage``; frames are given at ``size``, or at the file's own for None."""
        from av.video.reformatter import VideoReformatter

        self.footage = footage
        self.size = size
        self.process = os.getpid()
        self.last_s: float | None = None
        self._reformatter: VideoReformatter = VideoReformatter()
        self._container = _open_container(footage)
        self._decoded = self._decode()
        self._before: tuple[float, VideoFrame] | None = None
        self._at: tuple[float, VideoFrame] | None = None
        self._ended = False
        self._wanted_s = -math.inf

    def close(self) -> None:
        """Close the file."""
        self._before = self._at = None
        self._container.close()

    def can_walk_to(self, time_s: float) -> bool:
        """Tell whether decoding on reaches ``time_s`` sooner than a seek would."""
        position = self._before or self._at
        return position is not None and position[0] <= time_s <= position[0] + FORWARD_S

    def seek(self, time_s: float) -> None:
        """Move to the last key frame at or before ``time_s``."""
        from av.error import FFmpegError

        near_start = time_s - self.footage.tolerance_s <= 0
        try:
            if near_start:
                self._rewind()
                return
            stream = self._container.streams.video[0]
            self._container.seek(int(time_s / (stream.time_base or 1)), stream=stream, backward=True)
            self._forget()
            self._at = next(self._decoded, None)
            if (
                self._at is None or self._at[0] > time_s + SAME_S
            ):  # the file's index overshoots: walk from the beginning
                self._rewind()
        except FFmpegError as error:
            raise self.footage.error(f"seeking to {time_s:.3f} s fails ({error.strerror or error})") from error

    def nearest(self, time_s: float) -> UInt8[np.ndarray, "h w 3"]:
        """Return the frame nearest to ``time_s``, which is at or after every time asked since the last seek."""
        from av.error import FFmpegError

        self._wanted_s = time_s
        try:
            while self._at is None or self._at[0] < time_s - SAME_S:
                following = next(self._decoded, None)
                if following is None:
                    self._ended = True
                    break
                self._before, self._at = self._at, following
        except FFmpegError as error:
            raise self.footage.error(f"decoding fails before {time_s:.3f} s ({error.strerror or error})") from error
        return self._pixels(self._choose(time_s))

    def _choose(self, time_s: float) -> "VideoFrame":
        near = [held for held in (self._before, self._at) if held is not None]
        if not near:
            raise self.footage.error("the file holds no frame")
        found_s, frame = min(near, key=lambda held: abs(held[0] - time_s))
        if abs(found_s - time_s) <= self.footage.tolerance_s:
            return frame
        if found_s < time_s and self._ended:
            raise self.footage.error(
                f"the video's last frame is at {found_s:.3f} s of the file, but the episode goes on to "
                f"{max(time_s, self.last_s or time_s):.3f} s"
            )
        raise self.footage.error(
            f"no frame lies within {self.footage.tolerance_s * 1e3:.1f} ms of {time_s:.3f} s of the file; the nearest "
            f"is at {found_s:.3f} s"
        )

    def _pixels(self, frame: "VideoFrame") -> UInt8[np.ndarray, "h w 3"]:
        return pixels(frame, self.size, self._reformatter)

    def _rewind(self) -> None:
        if self._before is None and self._at is None and not self._ended:
            return  # just opened
        self._container.close()
        self._container = _open_container(self.footage)
        self._forget()

    def _forget(self) -> None:
        self._before = self._at = None
        self._ended = False
        self._wanted_s = -math.inf
        self._decoded = self._decode()

    def _decode(self) -> "Iterator[tuple[float, VideoFrame]]":
        """Frames as they are shown; a group of frames is left out where the next one begins before the wanted time."""
        stream = self._container.streams.video[0]
        scale = float(stream.time_base or 1)
        held: list[Packet] = []
        skipped = False
        for packet in self._container.demux(stream):
            due = packet.pts is None or packet.pts * scale > self._wanted_s + SAME_S
            if due:
                if skipped:
                    stream.codec_context.flush_buffers()
                yield from _decoded(held, scale)
                held, skipped = [], False
            elif packet.is_keyframe and held:
                held, skipped = [], True
            held.append(packet)
        yield from _decoded(held, scale)


def _decoded(packets: "Sequence[Packet]", scale: float) -> "Iterator[tuple[float, VideoFrame]]":
    for packet in packets:
        for frame in packet.decode():
            if frame.pts is not None:
                yield frame.pts * scale, cast("VideoFrame", frame)


def frames_in_order(
    footage: Footage, timestamps: Sequence[float] | np.ndarray, size: Size | None
) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
    """Yield the frames at an episode's timestamps, ascending: one seek, then each frame decoded once.

    Args:
        footage: The episode's part of a file.
        timestamps: Seconds since the episode's start, not descending; frames between them are decoded and left out.
        size: Height and width to give, or None for the file's own.

    Raises:
        VideoError: The file is missing or cannot be decoded, ends early, or has no frame near a timestamp.
    """
    times = footage.times_in_file(timestamps)
    if not times.size:
        return
    cursor = VideoCursor(footage, size)
    try:
        cursor.last_s = float(times[-1])
        cursor.seek(float(times[0]))
        for time_s in times:
            yield cursor.nearest(float(time_s))
    finally:
        cursor.close()


def read_frames(cursor: VideoCursor, times: Float[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
    """Return the frames at any times in the file, in the order asked; decoded in ascending order."""
    order = np.argsort(times, kind="stable")
    frames: dict[int, np.ndarray] = {}
    for position in order:
        time_s = float(times[position])
        if not cursor.can_walk_to(time_s):
            cursor.seek(time_s)
        frames[int(position)] = cursor.nearest(time_s)
    return np.stack([frames[position] for position in range(len(times))])


def pixels(frame: "VideoFrame", size: Size | None, reformatter: "VideoReformatter") -> UInt8[np.ndarray, "h w 3"]:
    """Convert a decoded frame to RGB, and to ``size`` in the same step: the one resize of every reader."""
    from av.video.reformatter import Interpolation

    height, width = size or (frame.height, frame.width)
    resized = reformatter.reformat(frame, width, height, "rgb24", interpolation=Interpolation.AREA)
    return resized.to_ndarray()


def _open_container(footage: Footage) -> "InputContainer":
    import av
    from av.error import FFmpegError

    if not footage.path.is_file():
        raise footage.error("there is no such file")
    try:
        container = av.open(str(footage.path))
    except (FFmpegError, OSError) as error:
        raise footage.error(f"it cannot be opened as a video ({error.strerror or error})") from error
    if not container.streams.video:
        container.close()
        raise footage.error("the file holds no video stream")
    try:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
    except (FFmpegError, RuntimeError, ValueError) as error:
        container.close()
        raise footage.error(f"no decoder serves it ({error})") from error
    return container


@cache
def torchcodec_decoder() -> type | None:
    """Return torchcodec's decoder class, or None, with one warning, where it cannot load (it needs FFmpeg)."""
    try:
        from torchcodec.decoders import VideoDecoder
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        log.warning("torchcodec cannot load (%s); PyAV decodes instead, with the same frames.", reason)
        return None
    return VideoDecoder
