"""A value model on disk: weights, and everything that is needed to know what they are good for."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrasp.core.errors import CheckpointError, RegraspError, listing
from regrasp.core.provenance import VERSION
from regrasp.core.scale import ScaleSet
from regrasp.data.dataset import STATE
from regrasp.data.storage import Transaction
from regrasp.data.video import RESIZE

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ValueCheckpoint:
    """A checkpoint that was found whole.

    Attributes:
        folder: Where it lies.
        model: The model's config, as ``config_to_json`` gave it.
        scale: The return scales that its values are on.
        sha256: Of its weights.
        record: All of ``config.json``.
    """

    folder: Path
    model: dict[str, Any]
    scale: ScaleSet
    sha256: str
    record: dict[str, Any]

    @property
    def cameras(self) -> list[str]:
        """The cameras it looks at, in order."""
        return list(self.model["cameras"])

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of its images."""
        height, width = self.model["image_size"]
        return int(height), int(width)

    @property
    def state_dim(self) -> int:
        """The dimension of the state; 0 without one."""
        return len(self.model["state_mean"])

    @property
    def vectors(self) -> list[str]:
        """The vectors that make up the state, such as ``observation.state``, in order."""
        return list(self.record.get("vectors", [STATE] if self.state_dim else []))

    @property
    def warning(self) -> str | None:
        """What every use of the model should say: that it does not beat the baselines."""
        return self.record["verdict"]["warning"]


def save_value_checkpoint(
    folder: Path, *, weights: bytes, model: dict[str, Any], scale: ScaleSet, record: Mapping[str, Any]
) -> list[Path]:
    """Publish a checkpoint: both files appear together, or neither does.

    Args:
        folder: Where it goes.
        weights: The safetensors file.
        model: ``config_to_json`` of the model's config.
        scale: The return scales.
        record: Whatever else ``config.json`` holds: datasets, returns, metrics, baselines, verdict.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "scale": scale.to_json(),
        "resize": RESIZE,
        "sha256": hashlib.sha256(weights).hexdigest(),
        **record,
    }
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with Transaction() as transaction:
        transaction.create(folder / WEIGHTS).write(weights)
        transaction.create(folder / CONFIG).write(text.encode())
        return transaction.commit()


def load_value_checkpoint(folder: Path) -> ValueCheckpoint:
    """Read a checkpoint and check that it is whole; its weights are not loaded yet.

    Raises:
        CheckpointError: A file is missing or damaged, or the weights are not those that the config describes.
    """
    record = _read_record(folder)
    weights = folder / WEIGHTS
    if not weights.is_file() or weights.stat().st_size == 0:
        raise CheckpointError(
            f"'{folder}' has a {CONFIG} but no weights ({WEIGHTS}), so there is no trained model in it. Mend: finish "
            "the fit with `regrasp value fit … --resume`, or point --checkpoint at the folder of a finished one."
        )
    with weights.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != record.get("sha256"):
        raise CheckpointError(
            f"The weights in '{weights}' are not those that '{folder / CONFIG}' describes: their SHA-256 is {found}, "
            f"described is {record.get('sha256')}. Mend: restore both files of one fit, or run the fit again."
        )
    if record["resize"] != RESIZE:
        raise CheckpointError(
            f"The model in '{folder}' learnt from images resized by {record['resize']!r}; this version resizes by "
            f"{RESIZE!r}, which gives other pixels. Mend: predict with Regrasp {record['version']}, or fit again."
        )
    return ValueCheckpoint(
        folder=folder,
        model=record["model"],
        scale=ScaleSet.from_json(record["scale"]),
        sha256=found,
        record=record,
    )


def check_tasks(checkpoint: ValueCheckpoint, tasks: list[str]) -> None:
    """Refuse tasks that the checkpoint has no return scale for; a CheckpointError names them."""
    unknown = []
    for task in tasks:
        try:
            checkpoint.scale.for_task(task)
        except RegraspError:
            unknown.append(task)
    if unknown:
        raise CheckpointError(
            f"The value model in '{checkpoint.folder}' has no return scale for the task(s) "
            f"{listing(map(repr, unknown))}; it was fitted on: "
            f"{listing(map(repr, checkpoint.record['tasks']))}. Mend: fit it on returns of all datasets of the run, or "
            "leave out the datasets of other tasks."
        )


def load_value_model(checkpoint: ValueCheckpoint, device: str) -> Any:  # noqa: ANN401 - a ValueModel and torch module
    """Return the trained model on a device, ready to predict.

    Raises:
        CheckpointError: The weights do not fit the config.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from regrasp.models.registry import build_value_model

    model = build_value_model(checkpoint.model)
    try:
        model.load_state_dict(load_file(checkpoint.folder / WEIGHTS, device="cpu"), strict=True)
    except (RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"The weights in '{checkpoint.folder / WEIGHTS}' do not fit the model that {CONFIG} describes "
            f"({str(error).strip().splitlines()[-1].strip()}). Mend: restore both files of one fit, or run it again."
        ) from error
    return model.to(device).eval()


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        unfinished = (folder / "training").is_dir()
        raise CheckpointError(
            f"'{folder}' holds no value checkpoint ({CONFIG} and {WEIGHTS})"
            + (": a fit was started there and is not finished. Mend: `regrasp value fit … --resume`." if unfinished else
               ". Mend: make one with `regrasp value fit … --output DIR`.")
        )  # fmt: skip
    try:
        record = json.loads(path.read_text())
        missing = [key for key in ("model", "scale", "sha256", "resize", "verdict", "tasks") if key not in record]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"'{path}' cannot be read as JSON ({error}). Mend: restore it, or fit again.") from error
    if missing:
        raise CheckpointError(
            f"'{path}' is not a value checkpoint's: it lacks {listing(missing)}. Mend: point --checkpoint at the "
            "folder that `regrasp value fit` wrote."
        )
    return record
