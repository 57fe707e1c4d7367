"""The processes that one training runs in, as ``accelerate launch`` or ``torchrun`` started them."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Processes:
    """This process's number among those of the run."""

    number: int
    count: int

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and speaks to the user."""
        return self.number == 0


def launched() -> Processes:
    """Return what the launcher said in the environment; one process where there is no launcher."""
    return Processes(number=int(os.environ.get("RANK", "0")), count=int(os.environ.get("WORLD_SIZE", "1")))


@contextlib.contextmanager
def first_before_others(*, cpu: bool) -> Iterator[None]:
    """Let the first process do a piece of work before the others do it, which then find what it made.

    Args:
        cpu: Stay on the CPU where there is a GPU.
    """
    if launched().count == 1:
        yield
        return
    from accelerate import PartialState

    with PartialState(cpu=cpu).main_process_first():
        yield
