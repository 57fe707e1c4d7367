"""Pictures of how a value model does on episodes it has not seen."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

BLUE, ORANGE, GREY = "#2a6fbb", "#d9772b", "#8a8a8a"
MOST_CURVES = 12
"""Episodes that are drawn, at most."""
MOST_POINTS = 20_000
"""Frames that are drawn as points, at most."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One held-out episode: V and G over its frames, in the unit."""

    title: str
    success: bool
    frame: Int[np.ndarray, " T"]
    value: Float[np.ndarray, " T"]
    target: Float[np.ndarray, " T"]


def draw_value_curves(path: Path, curves: Sequence[Curve]) -> None:
    """Draw V and G of held-out episodes, failures and successes in turn, at most twelve of them."""
    from matplotlib.figure import Figure

    shown = _both_kinds(curves)[:MOST_CURVES]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(1 + 4.2 * columns, 0.9 + 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    for axis, curve in zip(axes.flat, shown, strict=False):
        axis.plot(curve.frame, curve.target, color=GREY, linewidth=2, linestyle="--", label="return G")
        axis.plot(curve.frame, curve.value, color=BLUE if curve.success else ORANGE, linewidth=1.6, label="value V")
        axis.set_title(f"{curve.title}: {'success' if curve.success else 'failure'}", fontsize=10)
        axis.set_xlim(curve.frame[0], max(curve.frame[-1], curve.frame[0] + 1))
        axis.set_ylim(-1.04, 0.04)
        _plain(axis)
    for row in range(rows):
        axes[row, 0].set_ylabel("unit of the return")
    for column in range(columns):
        last = [axis for axis in axes[:, column] if axis.figure is not None]
        last[-1].set_xlabel("frame")
    axes[0, 0].legend(frameon=False, fontsize=9, loc="lower right")
    rest = f", {len(shown)} of {len(curves)} shown" if len(curves) > len(shown) else ""
    figure.suptitle(f"Held-out episodes{rest}", fontsize=12)
    figure.savefig(path, dpi=120)


def draw_calibration(path: Path, value: Float[np.ndarray, " n"], target: Float[np.ndarray, " n"]) -> None:
    """Draw G against V over held-out frames, and the mean G of each tenth of them by V, which lies on the diagonal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 5.2), layout="constrained")
    axis = figure.subplots()
    step = -(-len(value) // MOST_POINTS)
    axis.plot([-1, 0], [-1, 0], color=GREY, linewidth=1, linestyle="--", label="V = G")
    axis.scatter(value[::step], target[::step], s=4, alpha=0.25, color=BLUE, linewidths=0, label="frames")
    tenths = [part for part in np.array_split(np.argsort(value, kind="stable"), 10) if len(part)]
    middle = [float(value[part].mean()) for part in tenths]
    mean = [float(target[part].mean()) for part in tenths]
    axis.plot(middle, mean, color=ORANGE, marker="o", markersize=5, linewidth=1.6, label="mean G of each tenth by V")
    axis.set(xlim=(-1.03, 0.03), ylim=(-1.03, 0.03), xlabel="value V (unit)", ylabel="return G (unit)")
    axis.set_aspect("equal")
    axis.set_title("Held-out frames", fontsize=12)
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    _plain(axis)
    figure.savefig(path, dpi=120)


def _both_kinds(curves: Sequence[Curve]) -> list[Curve]:
    kinds = [[c for c in curves if c.success is wanted] for wanted in (False, True)]
    longest = max(map(len, kinds), default=0)
    return [kind[place] for place in range(longest) for kind in kinds if place < len(kind)]


def _plain(axis: object) -> None:
    axis.spines[["top", "right"]].set_visible(False)  # type: ignore[attr-defined] - matplotlib's Axes, loaded lazily
    axis.grid(color="#e6e6e6", linewidth=0.6)  # type: ignore[attr-defined]
    axis.set_axisbelow(True)  # type: ignore[attr-defined]
