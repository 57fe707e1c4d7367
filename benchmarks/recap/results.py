"""What the runs of `benchmarks/recap/run.py` gave, as Markdown: `python benchmarks/recap/results.py`.

Intervals are bootstrapped over seeds and, within each, over episodes (the same for all policies of a seed), so they
hold the chance in demonstrations, rollouts and training as well as in the evaluation.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Cells = dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]
"""Success and steps of each episode, by task and seed."""
REPEATS = 2000
BEGIN, END = "<!-- benchmarks/recap/results.py -->", "<!-- end -->"
"""Marks in the page."""


@dataclass(frozen=True)
class Method:
    """A policy in one setting, over all tasks and seeds."""

    name: str
    noise: float
    cells: Cells


def read(folder: Path) -> list[Method]:
    """Read every finished run's evaluations."""
    found: dict[tuple[str, float], Cells] = {}
    for summary in sorted(folder.glob("*/*/summary.json")):
        run = summary.parent
        for path in sorted((run / "evaluations").glob("*.json")):
            content = json.loads(path.read_text())
            key = content["policy"].replace(", round 1", ""), float(content["settings"]["noise_scale"])
            cell = np.array(content["outcomes"], dtype=float), np.array(content["steps"], dtype=float)
            found.setdefault(key, {})[run.parent.name, int(run.name)] = cell
    return [Method(name, noise, cells) for (name, noise), cells in found.items()]


def success(cells: Cells, task: str, draw: "Draw") -> float:
    """The mean over seeds of the share of successes."""
    return float(np.mean([cells[task, seed][0][rows].mean() for seed, rows in draw.of(task)]))


def throughput(cells: Cells, task: str, draw: "Draw") -> float:
    """The mean over seeds of successes per 1000 steps."""
    return float(np.mean([1000 * cells[task, s][0][r].sum() / cells[task, s][1][r].sum() for s, r in draw.of(task)]))


class Draw:
    """Which seeds and episodes count, task by task: all of them, or a bootstrap's."""

    def __init__(self, cells: Cells, generator: np.random.Generator | None) -> None:
        """Take everything, or draw seeds and then episodes with replacement."""
        self._of: dict[str, list[tuple[int, np.ndarray]]] = {}
        for task in sorted({task for task, _ in cells}):
            seeds = [seed for name, seed in cells if name == task]
            chosen = seeds if generator is None else generator.choice(seeds, len(seeds)).tolist()
            for seed in chosen:
                count = len(cells[task, seed][0])
                rows = np.arange(count) if generator is None else generator.integers(0, count, count)
                self._of.setdefault(task, []).append((seed, rows))

    @property
    def tasks(self) -> list[str]:
        """The tasks."""
        return list(self._of)

    def of(self, task: str) -> list[tuple[int, np.ndarray]]:
        """Seeds and rows of one task."""
        return self._of[task]


def interval(cells: Cells, measure: Callable[[Draw], float], digits: int) -> str:
    """A measure with its 95 % bootstrap interval."""
    generator = np.random.default_rng(0)
    draws = [measure(Draw(cells, generator)) for _ in range(REPEATS)]
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return f"{measure(Draw(cells, None)):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def over_tasks(ours: Cells, theirs: Cells, ratio: Callable[[str, Draw], float]) -> Callable[[Draw], float]:
    """The geometric mean over tasks of a ratio."""
    return lambda draw: float(np.exp(np.mean([np.log(max(ratio(task, draw), 1e-3)) for task in draw.tasks])))


def common(*methods: Method) -> Cells:
    """The first method's cells that all have."""
    keys = set.intersection(*(set(method.cells) for method in methods))
    return {key: cell for key, cell in sorted(methods[0].cells.items()) if key in keys}


def compare(ours: Method, theirs: Method) -> list[str]:
    """One row: throughput ratio, ratio of failures, difference of success, over tasks and seeds."""
    cells = common(ours, theirs)
    a, b = ours.cells, theirs.cells
    speed = over_tasks(a, b, lambda task, draw: throughput(a, task, draw) / throughput(b, task, draw))
    failures = over_tasks(
        a, b, lambda task, draw: max(1 - success(a, task, draw), 0.002) / max(1 - success(b, task, draw), 0.002)
    )
    gain = lambda draw: float(np.mean([success(a, t, draw) - success(b, t, draw) for t in draw.tasks]))  # noqa: E731
    return [
        ours.name,
        theirs.name,
        f"{ours.noise:g}",
        str(len(cells)),
        interval(cells, speed, 2),
        interval(cells, failures, 2),
        interval(cells, gain, 3),
    ]


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def per_task(methods: list[Method], task: str) -> str:
    """One task's table."""
    rows = []
    for method in methods:
        cells = {key: cell for key, cell in method.cells.items() if key[0] == task}
        if cells:
            rate = interval(cells, lambda draw, c=cells: success(c, task, draw), 3)
            speed = interval(cells, lambda draw, c=cells: throughput(c, task, draw), 2)
            rows.append([method.name, f"{method.noise:g}", str(len(cells)), rate, speed])
    return table(["policy", "noise", "seeds", "success", "successes per 1000 steps"], rows)


def sections(folder: Path, guidance: float) -> str:
    """The comparison over all tasks and seeds, and each task's policies."""
    methods = sorted(read(folder), key=lambda method: (method.noise, method.name))
    if not methods:
        raise SystemExit(f"There is no finished run in '{folder}'. Mend: python benchmarks/recap/run.py")
    head = ["policy", "beside", "noise", "runs", "throughput ×", "failures ×", "success +"]
    ours = [m for m in methods if m.name.startswith("RECAP") and m.name.endswith(f"β {guidance:g}")]
    rows = [
        compare(mine, other)
        for mine in ours
        for other in methods
        if other.noise == mine.noise and other is not mine and set(other.cells) & set(mine.cells)
    ]
    parts = ["### Over all tasks and seeds", table(head, rows)]
    for task in sorted({task for method in methods for task, _ in method.cells}):
        parts += [f"### {task}", per_task(methods, task)]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench/recap"))
    parser.add_argument("--guidance", type=float, default=3.0, help="the beta whose policy is compared")
    parser.add_argument("--write", type=Path, help="a page whose part between the marks is replaced")
    options = parser.parse_args()
    found = sections(options.runs, options.guidance)
    if options.write is None:
        print(found)
        return
    before, _, rest = options.write.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    options.write.write_text(f"{before}{BEGIN}\n\n{found}\n\n{END}{after}")


if __name__ == "__main__":
    main()
