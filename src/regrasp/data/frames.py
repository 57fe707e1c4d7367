"""Frames of a dataset's cameras: whole episodes in order, or any frames by timestamp.

Video and images inside parquet are read through the same two doors, and reach a wanted size by the same resize
(``regrasp.data.video.pixels``): what a model is trained on is what it is asked about, to the pixel.
"""

import io
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8

from regrasp.core.errors import DatasetError, VideoError
from regrasp.data.dataset import Camera, Dataset
from regrasp.data.video import (
    Footage,
    Size,
    VideoCursor,
    frames_in_order,
    pixels,
    read_frames,
    torchcodec_decoder,
)

if TYPE_CHECKING:
    from av.video.reformatter import VideoReformatter

CLEARLY_LATER_S = 1e-3
"""A frame this much later than wanted may have a nearer one before it; less is rounding of timestamps."""


def iter_episode_frames(
    dataset: Dataset,
    camera: str,
    episode_index: int,
    size: Size | None = None,
    *,
    timestamps: Float[np.ndarray, " t"] | None = None,
    rows: slice | None = None,
) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
    """Yield an episode's frames of one camera in order, each decoded once, by one thread.

    A frame of a video is the one whose presentation time is nearest to the episode's start in the file plus the
    row's timestamp, and must lie within half a frame interval of it.

    Args:
        dataset: Where the episode lives.
        camera: The camera's name in the run.
        episode_index: The episode's number in the dataset.
        size: Height and width to resize to, in uint8 by swscale; None for the recorded size.
        timestamps: The ``timestamp`` of each of the episode's rows, where the caller has read them already.
        rows: Which of the episode's rows to give, such as ``slice(None, None, 4)``; None for all.

    Raises:
        VideoError: The video is missing, cannot be decoded, ends early or lacks a frame.
        DatasetError: The dataset has no such camera.
    """
    kept = rows or slice(None)
    if camera_of(dataset, camera).kind == "image":
        yield from _images_in_order(dataset, camera, episode_index, size, kept)
        return
    times = episode_timestamps(dataset, episode_index) if timestamps is None else timestamps
    yield from frames_in_order(footage(dataset, camera, episode_index), times[kept], size)


def episode_timestamps(dataset: Dataset, episode_index: int) -> Float[np.ndarray, " t"]:
    """Return the ``timestamp`` of each of an episode's rows: seconds since its start, float64."""
    index = dataset.index()
    rows = int(index.length[index.position(episode_index)])
    return dataset.stream(["timestamp"], [episode_index]).take(rows)["timestamp"].astype(np.float64)


class FrameReader:
    """Frames of one camera at any timestamps, for training.

    Decoders are opened on first use and only in the process that uses them: a reader may be made before a fork, or
    sent to another process, and opens its files anew there. At the recorded size torchcodec decodes (``exact`` seek),
    or PyAV with the same pixels where torchcodec cannot load; with a ``size``, always PyAV and the resize of
    ``iter_episode_frames``.
    """

    def __init__(self, dataset: Dataset, camera: str, size: Size | None = None, *, max_open: int = 16) -> None:
        """Read ``camera`` of ``dataset`` at ``size``, keeping at most ``max_open`` files open."""
        self.dataset = dataset
        self.camera = camera
        self.size = size
        self.max_open = max_open
        self._kind = camera_of(dataset, camera).kind
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._process = os.getpid()

    def read(self, episode_index: int, timestamps: Sequence[float] | np.ndarray) -> UInt8[np.ndarray, "n h w 3"]:
        """Return the frames nearest to ``timestamps``, seconds since the episode's start, in the order asked.

        Raises:
            VideoError: As for ``iter_episode_frames``.
        """
        if self._process != os.getpid():  # a fork shares the parent's file positions: those decoders are not ours
            self._open, self._process = OrderedDict(), os.getpid()
        if not len(timestamps):
            raise ValueError(f"No timestamps were asked of camera {self.camera!r}, episode {episode_index}.")
        if self._kind == "image":
            return self._read_images(episode_index, np.asarray(timestamps, dtype=np.float64))
        source = footage(self.dataset, self.camera, episode_index)
        times = source.times_in_file(timestamps)
        decoder = torchcodec_decoder() if self.size is None else None
        if decoder is not None:
            opened = self._kept(episode_index, lambda: _open_torchcodec(decoder, source))
            return _read_torchcodec(opened, source, times)
        return read_frames(self._kept(episode_index, lambda: VideoCursor(source, self.size)), times)

    def close(self) -> None:
        """Close every open file."""
        while self._open:
            _close(self._open.popitem()[1])

    def __getstate__(self) -> dict[str, Any]:
        """Leave decoders behind when sent to another process."""
        return self.__dict__ | {"_open": OrderedDict(), "_process": -1}

    def _kept(self, episode_index: int, opener: Any) -> Any:  # noqa: ANN401 - decoders of two libraries, and lists
        if episode_index not in self._open:
            while len(self._open) >= self.max_open:
                _close(self._open.popitem(last=False)[1])
            self._open[episode_index] = opener()
        self._open.move_to_end(episode_index)
        return self._open[episode_index]

    def _read_images(self, episode_index: int, times: Float[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
        from av.video.reformatter import VideoReformatter

        at = episode_timestamps(self.dataset, episode_index)
        nearest = np.abs(at[None, :] - times[:, None]).argmin(axis=1)
        off = np.abs(at[nearest] - times)
        if off.max() > 0.5 / self.dataset.fps:
            raise image_error(
                self.dataset, self.camera, episode_index, f"no frame lies near {times[off.argmax()]:.3f} s"
            )
        stored = self._kept(episode_index, lambda: list(_image_bytes(self.dataset, self.camera, episode_index)))
        reformatter = VideoReformatter()
        return np.stack(
            [
                _image_pixels(self.dataset, self.camera, episode_index, stored[i], self.size, reformatter)
                for i in nearest
            ]
        )


def camera_of(dataset: Dataset, camera: str) -> Camera:
    """Return the dataset's camera of that name in the run; a DatasetError lists the names it has."""
    if camera not in dataset.cameras:
        found = ", ".join(map(repr, dataset.cameras)) or "none"
        raise DatasetError(
            f"{dataset.name!r} has no camera {camera!r}; it has: {found}. File: '{dataset.path}'. Mend: name one of "
            "these with --cameras, or map its own key with `keys:` in the recipe."
        )
    return dataset.cameras[camera]


def footage(dataset: Dataset, camera: str, episode_index: int) -> Footage:
    """Return the part of a video file that holds an episode; the tolerance is half a frame interval."""
    span = dataset.video_span(camera, episode_index)
    return Footage(
        path=span.path,
        dataset=dataset.name,
        camera=camera,
        episode=int(episode_index),
        start_s=span.start_s,
        end_s=span.end_s,
        tolerance_s=0.5 / dataset.fps,
    )


def image_error(dataset: Dataset, camera: str, episode_index: int, problem: str) -> VideoError:
    """Return the error for an image stored in a dataset's parquet files."""
    return VideoError(
        f"Camera {camera!r} of episode {episode_index} in {dataset.name!r} cannot be used: {problem}. File: a data "
        f"parquet under '{dataset.path}', column {dataset.cameras[camera].key!r}. Mend: restore the dataset. Without "
        "it, `regrasp value fit` goes on with --cameras naming the other cameras, or --cameras none."
    )


def _images_in_order(
    dataset: Dataset, camera: str, episode_index: int, size: Size | None, kept: slice
) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
    from av.video.reformatter import VideoReformatter

    index = dataset.index()
    wanted = set(range(int(index.length[index.position(episode_index)]))[kept])
    reformatter = VideoReformatter()
    for row, content in enumerate(_image_bytes(dataset, camera, episode_index)):
        if row in wanted:
            yield _image_pixels(dataset, camera, episode_index, content, size, reformatter)


def _image_bytes(dataset: Dataset, camera: str, episode_index: int, chunk: int = 64) -> Iterator[bytes | None]:
    index = dataset.index()
    key = dataset.cameras[camera].key
    left = int(index.length[index.position(episode_index)])
    stream = dataset.stream([key], [episode_index])
    while left:
        rows = min(left, chunk)
        yield from stream.take(rows)[key]
        left -= rows


def _image_pixels(
    dataset: Dataset,
    camera: str,
    episode_index: int,
    content: bytes | None,
    size: Size | None,
    reformatter: "VideoReformatter",
) -> UInt8[np.ndarray, "h w 3"]:
    from av import VideoFrame
    from PIL import Image, UnidentifiedImageError

    if not content:
        raise image_error(dataset, camera, episode_index, "a row holds no image bytes")
    try:
        picture = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise image_error(dataset, camera, episode_index, f"an image cannot be decoded ({error})") from error
    if size is None or size == picture.shape[:2]:
        return picture
    return pixels(VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24"), size, reformatter)


def _open_torchcodec(decoder: Any, source: Footage) -> Any:  # noqa: ANN401 - an optional library's class
    if not source.path.is_file():
        raise source.error("there is no such file")
    try:
        return decoder(str(source.path), seek_mode="exact", dimension_order="NHWC", num_ffmpeg_threads=1)
    except (RuntimeError, ValueError) as error:
        raise source.error(f"it cannot be opened as a video ({str(error).splitlines()[0]})") from error


def _read_torchcodec(
    decoder: Any,  # noqa: ANN401 - an optional library's class
    source: Footage,
    times: Float[np.ndarray, " n"],
) -> UInt8[np.ndarray, "n h w 3"]:
    """Give the nearest frames; torchcodec gives the frame on screen at a time, so half an interval later is asked.

    The last frame at or before ``t + tolerance`` is within the tolerance of ``t`` whenever any frame is; it is not
    the nearest only where frames are closer than the interval, and then the ones before it are tried.
    """
    last = float(decoder.metadata.end_stream_seconds)
    start = float(decoder.metadata.begin_stream_seconds)
    asked = np.clip(times + source.tolerance_s, start, np.nextafter(last, start))
    try:
        batch = decoder.get_frames_played_at(asked.tolist())
        frames, at = batch.data.numpy(), batch.pts_seconds.numpy()
        for row in np.flatnonzero(at - times > CLEARLY_LATER_S):
            while at[row] > max(times[row], start):
                earlier = decoder.get_frame_played_at(max(float(np.nextafter(at[row], start)) - 1e-6, start))
                if abs(earlier.pts_seconds - times[row]) > abs(at[row] - times[row]):
                    break
                frames[row], at[row] = earlier.data.numpy(), earlier.pts_seconds
    except (RuntimeError, IndexError) as error:
        raise source.error(f"decoding fails ({str(error).splitlines()[0]})") from error
    off = np.abs(at - times)
    if off.max() > source.tolerance_s:
        row = int(off.argmax())
        raise source.error(
            f"no frame lies within {source.tolerance_s * 1e3:.1f} ms of {times[row]:.3f} s of the file; the nearest is "
            f"at {at[row]:.3f} s, and the video ends at {last:.3f} s"
        )
    return frames


def _close(opened: Any) -> None:  # noqa: ANN401 - decoders of two libraries, and lists
    if hasattr(opened, "close"):
        opened.close()
