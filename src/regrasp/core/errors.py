"""Every way a run can be refused, named by the boundary that failed.

A message is one paragraph: what was needed, what was found, where, and how to mend it. Each class also
inherits the built-in exception that a caller would expect. Exit code 2 is a mistake of the user's, 1 ours.
"""

import difflib
from collections.abc import Iterable


class RegraspError(Exception):
    """The base of every error that Regrasp raises on purpose."""

    exit_code = 2

    def __str__(self) -> str:
        """The message alone, also where the built-in base would format it otherwise."""
        return str(self.args[0]) if self.args else ""


class ConfigError(RegraspError, ValueError):
    """A flag, a recipe or a combination of them cannot be used."""


class DatasetNotFound(RegraspError, FileNotFoundError):
    """There is no dataset at the path that was given."""


class DatasetError(RegraspError, ValueError):
    """A dataset's files or metadata cannot be used."""


class NonFiniteData(DatasetError):
    """A column holds NaN or infinity where numbers are needed."""


class OutcomeError(RegraspError, ValueError):
    """An episode's outcome is unknown, or was given in a way that cannot be read."""


class VideoError(RegraspError, OSError):
    """A video is missing, cannot be decoded, or ends before its episode."""


class MissingSidecar(RegraspError, FileNotFoundError):
    """A stage needs a sidecar that has not been written."""


class SidecarError(RegraspError, ValueError):
    """A sidecar does not fit its dataset, its tag or the run."""


class CheckpointError(RegraspError, ValueError):
    """A checkpoint has no weights, or was made for something else."""


class StorageError(RegraspError, OSError):
    """A file could not be written: no space, no permission, or a lock."""


class InternalError(RegraspError, RuntimeError):
    """Regrasp failed; the user did nothing wrong."""

    exit_code = 1


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def one_line(error: object, most: int | None = None) -> str:
    """Return what another library's error says, in one line of at most ``most`` characters."""
    return " ".join(str(error).split())[:most]


def listing(items: Iterable[object], limit: int = 8) -> str:
    """Return at most ``limit`` items joined by commas, with the count of those left off."""
    shown = [str(item) for item in items]
    rest = len(shown) - limit
    return ", ".join(shown[:limit]) + (f" and {rest} more" if rest > 0 else "")
