"""What is wrong with a dataset, and how to mend it."""

from dataclasses import dataclass
from typing import Literal

from regrasp.core.errors import DatasetError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that a dataset's files or metadata get wrong.

    Attributes:
        level: An ``error`` stops the stages; a ``warning`` does not.
        text: What is wrong, where, with the figures.
        mend: What the user can do.
        blocks: The stages that cannot use the dataset because of it; empty for a warning.
    """

    level: Literal["error", "warning"]
    text: str
    mend: str
    blocks: tuple[str, ...] = ()

    def raise_for(self, where: object) -> None:
        """Raise this problem as the error of the dataset at ``where``."""
        message = f"'{where}': {self.text}. Mend: {self.mend}."
        raise DatasetError(message)


EVERY_STAGE = ("returns", "value fit", "value predict", "advantages", "relabel")


def error(text: str, mend: str, blocks: tuple[str, ...] = EVERY_STAGE) -> Problem:
    """Return a problem that stops the stages in ``blocks``."""
    return Problem(level="error", text=text, mend=mend, blocks=blocks)


def warning(text: str, mend: str) -> Problem:
    """Return a problem that stops nothing."""
    return Problem(level="warning", text=text, mend=mend)
