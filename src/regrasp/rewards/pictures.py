"""What a judge sees, as pictures for a person."""

import re
from pathlib import Path

from regrasp.core.errors import StorageError
from regrasp.core.provenance import digest
from regrasp.rewards.engine import Request
from regrasp.rewards.jobs import Job

_NOT_IN_A_NAME = re.compile(r"[^\w.-]+")


def save_pictures(folder: Path, job: Job, request: Request) -> Path:
    """Write every frame of a request as a PNG file, named by video, place and time, and the prompt beside them.

    Returns:
        The job's own folder within ``folder``.

    Raises:
        StorageError: It cannot be written.
    """
    from PIL import Image

    name = _NOT_IN_A_NAME.sub("_", job.id)[:80]
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
