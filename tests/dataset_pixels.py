"""Camera frames for test datasets, from which a test can read back what frame it was given.

A frame is a grid of 4 x 6 dark or bright blocks, one bit each: 2 bits of camera, 8 of episode and 14 of
frame number. The blocks survive a lossy codec, and any resize that leaves a few pixels a block.
"""

import io
import os
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

GRID = (4, 6)
CAMERA_BITS, EPISODE_BITS, FRAME_BITS = 2, 8, 14
DARK, BRIGHT = 40, 215
CLOCK = 90_000
ENCODERS = {
    "h264": ("libx264", {"preset": "ultrafast", "crf": "23"}),
    "av1": ("libsvtav1", {"preset": "8", "crf": "30"}),  # faster presets leave some blocks undrawn
}


def frame_pixels(episode: int, frame: int, height: int, width: int, camera: int = 0) -> np.ndarray:
    """The picture of one frame: uint8 [height, width, 3]."""
    code = (camera << (EPISODE_BITS + FRAME_BITS)) | (episode << FRAME_BITS) | frame
    if not 0 <= code < 1 << (CAMERA_BITS + EPISODE_BITS + FRAME_BITS):
        raise ValueError(f"camera {camera}, episode {episode}, frame {frame} do not fit in the blocks of a test frame")
    bits = (code >> np.arange(GRID[0] * GRID[1])) & 1
    levels = np.where(bits, BRIGHT, DARK).astype(np.uint8).reshape(GRID)
    rows = np.arange(height) * GRID[0] // height
    columns = np.arange(width) * GRID[1] // width
    return np.repeat(levels[rows][:, columns, None], 3, axis=2)


def read_pixels(picture: np.ndarray) -> tuple[int, int, int]:
    """(camera, episode, frame) of a decoded picture, [height, width, 3], 0-255 or 0-1, resized or not."""
    height, width = picture.shape[:2]
    rows = (np.arange(GRID[0]) * height + height // 2) // GRID[0]
    columns = (np.arange(GRID[1]) * width + width // 2) // GRID[1]
    levels = picture[rows][:, columns].astype(np.float64).mean(axis=2)
    middle = 0.5 if picture.dtype.kind == "f" and picture.max() <= 1 else 127.5
    code = int(((levels.reshape(-1) > middle).astype(np.int64) << np.arange(levels.size)).sum())
    episode = (code >> FRAME_BITS) & ((1 << EPISODE_BITS) - 1)
    return code >> (EPISODE_BITS + FRAME_BITS), episode, code & ((1 << FRAME_BITS) - 1)


def png_bytes(picture: np.ndarray) -> bytes:
    """The PNG file of a picture."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def encode_video(
    path: Path,
    frames: Iterable[tuple[float, np.ndarray]],
    *,
    fps: float,
    height: int,
    width: int,
    codec: str = "h264",
    gop: int = 2,
) -> None:
    """Write an mp4 of (time in seconds, picture) pairs; each frame is presented at its own time."""
    encoder, options = ENCODERS[codec]
    os.environ.setdefault("SVT_LOG", "1")  # the AV1 encoder prints its settings otherwise
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(encoder, rate=Fraction(fps).limit_denominator(1001), options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = gop
        stream.codec_context.time_base = Fraction(1, CLOCK)
        stream.codec_context.thread_count = 1
        for time_s, picture in frames:
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = round(time_s * CLOCK), Fraction(1, CLOCK)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
