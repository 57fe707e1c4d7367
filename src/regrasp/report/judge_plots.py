"""A picture of how far a judge's progress can be taken as a probability of success."""

import io
from typing import Any

import numpy as np

from regrasp.report.value_plots import BLUE, GREY, ORANGE
from regrasp.rewards.check import HeldOut, calibration_error, reliability

_BINS = 10


def draw_reliability(held_out: HeldOut) -> bytes:
    """Draw the share of successes against what was said, raw and through the calibration, and how many said what.

    Args:
        held_out: Attempts that the calibration was not fitted on.

    Returns:
        A PNG file's content.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 6.6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(4, 1), sharex=True)
    above.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="perfectly calibrated")
    edges = np.linspace(0, 1, _BINS + 1)
    for said, colour, label, marker in (
        (held_out.raw, BLUE, "progress as it is", "o"),
        (held_out.mapped, ORANGE, "through the isotonic map", "s"),
    ):
        _draw_bins(above, said, held_out, colour, label, marker)
        below.hist(said, bins=edges.tolist(), color=colour, alpha=0.55)
    count = f"{len(held_out.truth)} attempts, {int(held_out.truth.sum())} successes"
    above.set_title(f"Held-out half: {count}", fontsize=12)
    above.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), ylabel="share of successes, 95 % interval")
    above.legend(frameon=False, fontsize=9, loc="upper left")
    below.set(xlabel="probability of success that was said", ylabel="attempts")
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e6e6e6", linewidth=0.6)
        axis.set_axisbelow(True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    return drawn.getvalue()


def _draw_bins(axis: Any, said: np.ndarray, held_out: HeldOut, colour: str, label: str, marker: str) -> None:  # noqa: ANN401
    bins = reliability(said, held_out.truth, bins=_BINS)
    share = np.array([one.share.value for one in bins])
    apart = [share - [one.share.low for one in bins], np.array([one.share.high for one in bins]) - share]
    place = [one.probability for one in bins]
    error = calibration_error(said, held_out.truth, bins=_BINS)
    name = f"{label} (ECE {error:.3f})"
    axis.errorbar(place, share, yerr=np.clip(apart, 0, None), fmt=marker, color=colour, capsize=3, label=name)
