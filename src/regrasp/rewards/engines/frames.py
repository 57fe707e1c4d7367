"""Frames as models and servers take them: pairs, JPEG, clock ticks, or images with their times in words."""

import base64
import io
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import UInt8

from regrasp.rewards.engine import VideoInput

TICKS_PER_S = 1000
"""Times become whole ticks of this clock, the "frame rate" that a processor is told: exact to a millisecond."""


def in_pairs(video: VideoInput) -> VideoInput:
    """Return a video of an even number of frames, at least two, by repeating the last one with its time.

    Qwen's vision tower takes frames by twos. Its processors refuse a single frame, and differ in how they fill an odd
    count.
    """
    if len(video.frames) % 2 == 0:
        return video
    return replace(
        video,
        frames=np.concatenate([video.frames, video.frames[-1:]]),
        timestamps_s=np.concatenate([video.timestamps_s, video.timestamps_s[-1:]]),
    )


def probe_clip() -> VideoInput:
    """Return four frames of a moving bar, ten seconds into an episode of twenty: what engines are tried with."""
    frames = np.zeros((4, 64, 64, 3), dtype=np.uint8)
    for number in range(4):
        frames[number, :, : 16 * (number + 1)] = 200
    return VideoInput(frames=frames, timestamps_s=10 + 0.25 * np.arange(4), duration_s=20.0)


def ticks(video: VideoInput) -> list[int]:
    """Return every frame's absolute time, in ticks of the clock."""
    return [round(float(time) * TICKS_PER_S) for time in video.timestamps_s]


def duration_ticks(video: VideoInput) -> int:
    """Return the episode's length in ticks: more than the last frame's, as the count of a video's frames is."""
    return max(round(video.duration_s * TICKS_PER_S), ticks(video)[-1] + 1)


def expected_stamps(video: VideoInput) -> list[str]:
    """Return what a Qwen3-VL processor writes before each pair: the middle of its two times, in tenths of a second."""
    times = [tick / TICKS_PER_S for tick in ticks(in_pairs(video))]
    return [f"<{(first + last) / 2:.1f} seconds>" for first, last in zip(times[::2], times[1::2], strict=True)]


def time_label(time_s: float) -> str:
    """Return a frame's time in words, for models that take images only."""
    return f"<{time_s:.1f} seconds>"


def encode_jpeg(frame: UInt8[np.ndarray, "h w 3"], quality: int) -> str:
    """Return one frame as base64 of a JPEG, with full colour resolution."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="JPEG", quality=quality, subsampling=0)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def as_video_parts(videos: Sequence[VideoInput], quality: int) -> list[dict]:
    """Return one chat part per video: a list of JPEG frames in one data URL, as vLLM and SGLang take it."""
    parts = []
    for video in map(in_pairs, videos):
        frames = ",".join(encode_jpeg(frame, quality) for frame in video.frames)
        parts.append({"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}})
    return parts


def as_image_parts(videos: Sequence[VideoInput], quality: int) -> list[dict]:
    """Return chat parts for servers that take images: every frame after its time, every video after its number."""
    parts: list[dict] = []
    for number, video in enumerate(videos, start=1):
        if len(videos) > 1:
            parts.append({"type": "text", "text": f"Video {number}:"})
        for frame, time in zip(video.frames, video.timestamps_s, strict=True):
            parts.append({"type": "text", "text": time_label(float(time))})
            url = f"data:image/jpeg;base64,{encode_jpeg(frame, quality)}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def media_kwargs(videos: Sequence[VideoInput]) -> dict:
    """Return vLLM's ``media_io_kwargs`` that make it keep every frame at its own absolute time.

    They hold for all videos of a request, so the videos must share their times; an ``AssertionError`` where they do
    not. Without them vLLM keeps 32 frames and calls them one second apart.
    """
    first = in_pairs(videos[0])
    assert all(ticks(in_pairs(video)) == ticks(first) for video in videos), "videos of one request share their times"
    return {
        "video": {
            "num_frames": -1,
            "fps": TICKS_PER_S,
            "frames_indices": ticks(first),
            "total_num_frames": duration_ticks(first),
            "duration": first.duration_s,
        }
    }
