"""What video files say of themselves, without decoding them."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from av.container import InputContainer


@dataclass(frozen=True, kw_only=True)
class VideoFacts:
    """A video's header.

    Attributes:
        codec: Such as ``av1``.
        height: In pixels.
        width: In pixels.
        frames: How many the file holds; 0 where it does not say.
        trouble: Why the file cannot be used, or None.
    """

    codec: str | None = None
    height: int | None = None
    width: int | None = None
    frames: int = 0
    trouble: str | None = None


def probe(path: Path) -> VideoFacts:
    """Read a video's header. Says what is wrong instead of raising: the caller reports every file."""
    if not path.is_file():
        return VideoFacts(trouble="is missing")
    if path.stat().st_size == 0:
        return VideoFacts(trouble="is empty (0 bytes)")
    import av
    from av.error import FFmpegError

    try:
        with contextlib.closing(av.open(str(path))) as container:
            return _facts(container)
    except (FFmpegError, OSError) as error:
        return VideoFacts(trouble=f"cannot be opened as a video ({error.strerror or error})")


def _facts(container: "InputContainer") -> VideoFacts:
    if not container.streams.video:
        return VideoFacts(trouble="holds no video stream")
    stream = container.streams.video[0]
    return VideoFacts(
        codec=stream.codec_context.codec.canonical_name,
        height=stream.codec_context.height,
        width=stream.codec_context.width,
        frames=stream.frames,
    )
