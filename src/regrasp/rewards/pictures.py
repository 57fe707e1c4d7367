"""What a judge sees, as words and pictures for a person."""

import re
from pathlib import Path

from regrasp.core.errors import StorageError
from regrasp.core.provenance import digest
from regrasp.rewards.engine import Request
from regrasp.rewards.jobs import Job
from regrasp.rewards.judging import Signal
from regrasp.rewards.views import Views

_NOT_IN_A_NAME = re.compile(r"[^\w.-]+")
_MOST_CHARACTERS = 60
"""Of a folder's name, each of which takes up to 4 of its 255 bytes."""


def save_pictures(folder: Path, job: Job, request: Request) -> Path:
    """Write every frame of a request as a PNG file, named by video, place and time, and the prompt beside them.

    Returns:
        The job's own folder within ``folder``.

    Raises:
        StorageError: It cannot be written.
    """
    from PIL import Image

    name = _NOT_IN_A_NAME.sub("_", job.id).lstrip(".")[:_MOST_CHARACTERS]
    own = folder / (name if name == job.id else f"{name}-{digest(job.id)[:6]}")
    try:
        own.mkdir(parents=True, exist_ok=True)
        for number, video in enumerate(request.videos, 1):
            for place, (picture, time_s) in enumerate(zip(video.frames, video.timestamps_s, strict=True)):
                Image.fromarray(picture).save(own / f"video{number}_{place:03d}_{time_s:.3f}s.png", compress_level=1)
        text = "\n\n".join(part for part in (request.system, request.prompt, request.prefill) if part)
        (own / "prompt.txt").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        message = f"'{own}' cannot be written ({error.strerror}). Mend: choose another --save-prompt-images."
        raise StorageError(message) from error
    return own


def preview(signal: Signal, job: Job, folder: Path | None, *, with_prompt: bool) -> list[str]:
    """Return what would be shown of a job, in lines: frames, sizes, windows, and where it is wanted the first prompt.

    Args:
        signal: What would be asked.
        job: The job.
        folder: Where the pictures are written; None for nowhere.
        with_prompt: Whether the prompt is among the lines.

    Raises:
        VideoError: A video cannot be used.
        StorageError: The pictures cannot be written.
    """
    views = Views(job)
    sizes = ", ".join(f"{name} {w}x{h}" for name, (h, w) in zip(views.names, views.sizes, strict=True))
    count = f"{len(views.timestamps)} frames at {views.fps:.3g} per second, {views.duration_s:.2f} s"
    lines = [f"{job.id}: {count} ({sizes})", f"  {signal.describe(job, views)}"]
    if folder is None and not with_prompt:
        return lines
    request = signal.first_request(job, views)
    if folder is not None:
        lines.append(f"  wrote what the model would see to '{save_pictures(folder, job, request)}'")
    if with_prompt:
        lines += [f"  | {line}" for line in (request.system or "").splitlines()]
        lines += [f"  | {line}" for line in request.prompt.splitlines()]
        lines.append(f"  | -> {request.prefill or ''}")
    return lines
