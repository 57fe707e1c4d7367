"""How many processors this process may use."""

import os


def usable_cores() -> int:
    """Return the number of cores that this process may run on; all of the machine's where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
