"""What `results.py` and `judged_results.py` share: intervals, and a part of a page that a command writes."""

import argparse
from pathlib import Path

import numpy as np

from regrasp.rl.statistics import Interval

END = "<!-- end -->"


def interval(value: np.ndarray, drawn: np.ndarray) -> Interval:
    """A value (one number), and the middle 95 % of what resampling gave where it is defined."""
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Interval(np.asarray(value).item(), float(low), float(high))


def add_write(parser: argparse.ArgumentParser) -> None:
    """Give a command the flag that ``publish`` takes."""
    parser.add_argument("--write", type=Path, help="a page whose part between the marks is replaced")


def publish(found: str, page: Path | None, script: str) -> None:
    """Print what was found, or put it in a page between the mark of its script and the next end."""
    if page is None:
        print(found)
        return
    begin = f"<!-- benchmarks/recap/{script} -->"
    before, mark, rest = page.read_text().partition(begin)
    if not mark:
        raise SystemExit(f"'{page}' has no part for this: no line {begin!r}.")
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{begin}\n\n{found}\n\n{END}{after}")
