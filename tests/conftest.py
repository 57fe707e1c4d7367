"""What all tests share: hypothesis has no deadline, since test machines are busy, and no test is real-time."""

import os

import pytest
from hypothesis import settings

settings.register_profile("regrasp", deadline=None)
settings.load_profile("regrasp")


@pytest.fixture(autouse=True)
def no_real_time() -> None:
    """Give a test the ordinary scheduling that the one before it may have lost.

    SVT-AV1, where it runs as root, makes the process that encodes a real-time one (SCHED_FIFO); its children then keep
    a core until they end, and nothing that another process does to them in the meantime happens.
    """
    if hasattr(os, "sched_setscheduler") and os.sched_getscheduler(0) != os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
