"""Where a run's metrics go beside ``metrics.jsonl``: any tracker of accelerate's, by its name."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrasp.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from accelerate import Accelerator

    from regrasp.learn.loop import TrainConfig

NONE = "none"
PROJECT = "regrasp"
"""What a tracker calls the project; TensorBoard's files go to a folder of this name."""


def check_tracker(name: str) -> list[Any]:  # names, in the type that accelerate asks for
    """Return what accelerate is to log with.

    Raises:
        ConfigError: There is no such tracker, or its package is not installed.
    """
    if name == NONE:
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = [NONE, *sorted(str(one) for one in LOGGER_TYPE_TO_CLASS)]
    if name not in known:
        raise ConfigError(f"There is no tracker {name!r}.{nearest(name, known)} Known are: {', '.join(known)}.")
    if name not in [str(getattr(one, "value", one)) for one in get_available_trackers()]:
        raise ConfigError(
            f"The tracker {name!r} needs a package of its own, which is not installed. Mend: install it, or say "
            f"--tracker {NONE}; metrics go to metrics.jsonl in any case."
        )
    return [name]


def start_trackers(accelerator: "Accelerator", config: "TrainConfig", folder: Path) -> None:
    """Start the trackers that an accelerator was given, with the run's settings; W&B's run is named for the folder."""
    if not accelerator.log_with:
        return
    settings = {name: value for name, value in asdict(config).items() if isinstance(value, bool | int | float | str)}
    accelerator.init_trackers(PROJECT, settings, {"wandb": {"name": folder.name, "dir": str(folder)}})
