"""Dense judging's arithmetic of time: overlapping windows, and one score for each half second of an episode.

A window covers 16 s, shown as 64 frames at 4 per second; every two frames make a half second, which gets one score. A
new window starts every 10 s, and the last one ends exactly at the episode's end, so that it may start off that grid.
An episode of at most 16 s is one window, as long as the episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

WINDOW_S = 16.0
STRIDE_S = 10.0
TAIL_S = 4.0
"""What is dropped at the end of every window but the last: the model has not seen what came of it."""
STEP_S = 0.5
FRAMES_PER_STEP = 2
_ROUNDING_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class Window:
    """One window, in seconds of the episode.

    Attributes:
        start_s: Its start.
        end_s: Its end, at most the episode's.
        steps: How many half seconds it is scored in; the last may be cut by the episode's end.
    """

    start_s: float
    end_s: float
    steps: int

    def frame_times(self) -> Float[np.ndarray, " n"]:
        """Return the times at which frames are wanted, 4 per second from the start, two for each half second."""
        return self.start_s + np.arange(FRAMES_PER_STEP * self.steps) * (STEP_S / FRAMES_PER_STEP)


def count_steps(duration_s: float) -> int:
    """Return how many half seconds ``duration_s`` has, counting a part as one; at least 1."""
    return max(1, int(np.ceil((duration_s - _ROUNDING_S) / STEP_S)))


def plan_windows(duration_s: float) -> tuple[Window, ...]:
    """Return the windows of an episode, in order.

    Args:
        duration_s: The episode's length in seconds, above 0.
    """
    if duration_s <= WINDOW_S + _ROUNDING_S:
        return (Window(start_s=0.0, end_s=duration_s, steps=count_steps(duration_s)),)
    last = duration_s - WINDOW_S
    starts = [*np.arange(0.0, last - _ROUNDING_S, STRIDE_S).tolist(), last]
    return tuple(Window(start_s=s, end_s=s + WINDOW_S, steps=round(WINDOW_S / STEP_S)) for s in starts)


def stitch(duration_s: float, windows: Sequence[Window]) -> Int[np.ndarray, "h 2"]:
    """Assign each half second of an episode to one step of one window.

    The last 4 s of every window but the last are dropped. Of the steps that are left, a half second takes the one
    whose middle is nearest to its own; of equally near ones, the one from the window whose kept part has its middle
    nearest, where the model saw most on both sides; then the earlier window.

    Args:
        duration_s: The episode's length in seconds.
        windows: What ``plan_windows`` gave for it.

    Returns:
        For each half second, the number of the window and of the step in it.
    """
    owners, steps, middles, kept_middles = [], [], [], []
    for number, window in enumerate(windows):
        tail = 0.0 if number == len(windows) - 1 else TAIL_S
        kept = window.steps - round(tail / STEP_S)
        owners += [number] * kept
        steps += range(kept)
        middles += [window.start_s + (step + 0.5) * STEP_S for step in range(kept)]
        kept_middles += [(window.start_s + window.end_s - tail) / 2] * kept
    middle, kept_middle = np.array(middles), np.array(kept_middles)
    order = np.argsort(middle, kind="stable")
    chosen = np.empty((count_steps(duration_s), 2), dtype=np.int64)
    for half in range(len(chosen)):
        at = (half + 0.5) * STEP_S
        place = int(np.searchsorted(middle[order], at))
        near = order[max(0, place - 4) : place + 4]
        ranks = np.lexsort(
            [near, np.abs(kept_middle[near] - at).round(6), np.abs(middle[near] - at).round(6)],
        )
        best = near[ranks[0]]
        chosen[half] = owners[best], steps[best]
    return chosen
