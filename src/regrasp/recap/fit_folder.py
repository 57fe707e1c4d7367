"""The output folder of a fit: whose it is, and whether it can be gone on with."""

import json
import shutil
from pathlib import Path
from typing import Any

from regrasp.core.errors import ConfigError
from regrasp.data.storage import write_json_atomic

TRAINING = "training"
"""The folder, in the output folder, of states, metrics and caches."""
RUN = "run.json"


def claim_folder(output: Path, settings: dict[str, Any], *, what: str, resume: bool, overwrite: bool) -> Path:
    """Make an output folder ready for a fit, and write down what decides it before anything is learnt.

    Args:
        output: The folder.
        settings: Everything that decides what is learnt, as JSON.
        what: ``policy fit``, for messages.
        resume: Go on with the fit in the folder, if there is one.
        overwrite: Start anew whatever it holds.

    Returns:
        Its ``training`` folder.

    Raises:
        ConfigError: It holds a fit and neither was asked for, or ``resume`` would go on with other settings or data.
    """
    settings = json.loads(json.dumps(settings))
    training, record = output / TRAINING, output / TRAINING / RUN
    begun = any((training / "states").glob("step_*"))
    taken = begun or (output / "config.json").is_file()
    if taken and not (resume or overwrite):
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
    if overwrite or not resume:
        shutil.rmtree(training, ignore_errors=True)
    training.mkdir(parents=True, exist_ok=True)
    write_json_atomic(record, settings)
    return training
