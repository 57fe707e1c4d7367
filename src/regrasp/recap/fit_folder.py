"""The output folder of a fit: whose it is, whether it can be gone on with, and that a refused fit leaves nothing."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from regrasp.core.errors import ConfigError, RegraspError
from regrasp.data.storage import storage_error, write_json_atomic
from regrasp.learn.processes import launched
from regrasp.recap.selection import Selection

TRAINING = "training"
"""The folder, in the output folder, of states, metrics and caches."""
BEFORE = "training.before"
"""Where ``--overwrite`` keeps the earlier fit's ``training`` until the new fit has saved its first state."""
RUN = "run.json"
_LOCK = "lock"
_NOT_DECIDING = frozenset(
    {"demos", "rollouts", "config", "sidecars", "debug", "output", "workers", "resume", "overwrite", "device"}
)


def deciding(config: Selection, *, apart: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of a fit that decide what is learnt: all but places, means and ``apart``."""
    left_out = _NOT_DECIDING.union(apart)
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name not in left_out}


@contextlib.contextmanager
def exclusive(folder: Path, refusal: str) -> Iterator[None]:
    """Keep other processes out of a folder; the lock goes with the process, also when it is killed."""
    descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(refusal) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(output: Path, settings: dict[str, Any], *, what: str, resume: bool, overwrite: bool) -> Iterator[Path]:
    """Hold an output folder for a fit, ready for it, with what decides the fit written down.

    A fit that is refused before its first state was saved leaves the folder as it was: nothing new, nothing lost.

    Args:
        output: The folder.
        settings: Everything that decides what is learnt, as JSON.
        what: ``value fit`` or ``policy fit``, for messages.
        resume: Go on with the fit in the folder, if there is one.
        overwrite: Start anew whatever fit it holds.

    Yields:
        Its ``training`` folder.

    Raises:
        ConfigError: It is a dataset or holds something else than a fit, it holds a fit and neither was asked for,
            another process is at work in it, or ``resume`` would go on with other settings or data.
        StorageError: It cannot be made or written.
    """
    if not launched().first:
        raise ConfigError(f"A {what} runs in one process. Mend: start it without torchrun or accelerate launch.")
    settings = json.loads(json.dumps(settings))
    training, before = output / TRAINING, output / BEFORE
    _check_folder(output, settings, what=what, resume=resume, overwrite=overwrite)
    missing = [folder for folder in (training, output, *output.parents) if not folder.exists()]
    try:
        training.mkdir(parents=True, exist_ok=True)
        busy = f"Another process is fitting in '{output}'. Mend: wait for it, or give another --output."
        with exclusive(training, busy):
            if before.is_dir() and not _begun(training):
                _restore(training, before)  # of a process that was killed while it replaced the fit
            if not resume and _begun(training):
                _set_aside(training, before)
            elif not resume:
                _empty(training)
            write_json_atomic(training / RUN, settings)
            try:
                yield training
            except (RegraspError, OSError):
                if not _begun(training):
                    _undo(training, before, missing)
                raise
            shutil.rmtree(before, ignore_errors=True)
    except OSError as error:
        if isinstance(error, RegraspError):
            raise
        raise storage_error(error, output) from error


def _check_folder(output: Path, settings: dict[str, Any], *, what: str, resume: bool, overwrite: bool) -> None:
    training, before = output / TRAINING, output / BEFORE
    record = (before if before.is_dir() and not _begun(training) else training) / RUN
    if (output / "meta" / "info.json").is_file():
        raise ConfigError(f"'{output}' is a dataset, and nothing is written into those. Mend: give another --output.")
    begun = _begun(training) or before.is_dir()
    if (
        training.is_dir()
        and not begun
        and not record.is_file()
        and {entry.name for entry in training.iterdir()} - {_LOCK}
    ):
        raise ConfigError(
            f"'{training}' holds something that no fit of Regrasp's put there, and a fit would need the folder. "
            "Mend: give another --output."
        )
    if (begun or (output / "config.json").is_file()) and not (resume or overwrite):
        raise ConfigError(
            f"'{output}' holds a {what} already. Mend: --resume goes on with it, --overwrite replaces it, or give "
            "another --output."
        )
    if resume and begun and record.is_file():
        old = json.loads(record.read_text())
        changed = [name for name in settings if old.get(name) != settings[name]]
        if changed:
            found = "; ".join(f"{name} was {old.get(name)!r} and is now {settings[name]!r}" for name in changed[:3])
            raise ConfigError(
                f"--resume goes on exactly with the {what} in '{output}', but {found}. Mend: give the settings and "
                "datasets that it was started with, or --overwrite to start anew."
            )


def _begun(training: Path) -> bool:
    return any((training / "states").glob("step_*"))


def _empty(training: Path) -> None:
    """Remove what an earlier fit left, but for the lock that is held."""
    for entry in training.iterdir():
        if entry.name == _LOCK:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _set_aside(training: Path, before: Path) -> None:
    """Move an earlier fit out of the way."""
    shutil.rmtree(before, ignore_errors=True)
    before.mkdir()
    for entry in training.iterdir():
        if entry.name != _LOCK:
            entry.rename(before / entry.name)


def _restore(training: Path, before: Path) -> None:
    """Put an earlier fit back where it was."""
    if (before / "states").is_dir():  # else its move had hardly begun, and what is left of it is still in place
        _empty(training)
    for entry in before.iterdir():
        entry.rename(training / entry.name)
    before.rmdir()


def _undo(training: Path, before: Path, made: list[Path]) -> None:
    """Put an earlier fit back; without one, remove the training folder and the folders above it that this fit made."""
    if before.is_dir():
        _restore(training, before)
        return
    shutil.rmtree(training, ignore_errors=True)
    for folder in made[1:] if made[:1] == [training] else made:
        with contextlib.suppress(OSError):
            folder.rmdir()
