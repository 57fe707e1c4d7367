"""A picture of how policies compare: success and speed, with their intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from regrasp.report.value_plots import BLUE, GREY, ORANGE
from regrasp.rl.statistics import Interval

_COLOURS = (BLUE, ORANGE, GREY, "#4b8f5a", "#8a5fa8")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One policy in one setting.

    Attributes:
        label: The policy; one row of the picture.
        group: The setting; one colour.
        success: The share of successes.
        throughput: Successes per 1000 steps.
    """

    label: str
    group: str
    success: Interval
    throughput: Interval


def draw_policies(path: Path, bars: Sequence[Bar]) -> None:
    """Draw success and successes per 1000 steps of every policy, with intervals."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(bar.label for bar in bars))
    groups = list(dict.fromkeys(bar.group for bar in bars))
    figure = Figure(figsize=(11, 1.2 + 0.5 * len(labels)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, name, words in ((axes[0], "success", "success"), (axes[1], "throughput", "successes per 1000 steps")):
        for number, group in enumerate(groups):
            chosen = [bar for bar in bars if bar.group == group]
            shift = 0.14 * (number - (len(groups) - 1) / 2)
            found = [getattr(bar, name) for bar in chosen]
            values = [one.value for one in found]
            ends = [[v - one.low for v, one in zip(values, found, strict=True)]]
            ends.append([one.high - v for v, one in zip(values, found, strict=True)])
            places = [labels.index(bar.label) + shift for bar in chosen]
            colour = _COLOURS[number % len(_COLOURS)]
            axis.errorbar(values, places, xerr=ends, fmt="o", color=colour, capsize=3, label=group)
        axis.set_xlabel(f"{words}, 95% interval")
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].invert_yaxis()
    axes[0].set_xlim(0, 1.02)
    axes[1].set_xlim(left=0)
    axes[1].legend(frameon=False, loc="best")
    figure.savefig(path, dpi=130, metadata={"Software": None})
