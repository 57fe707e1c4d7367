"""What the runs of `run.py` gave, as Markdown: `python benchmarks/recap/results.py --write docs/results.md`.

Intervals are bootstrapped over seeds and, within each, over episodes (the same ones for all policies of a seed), so
they hold the chance in demonstrations, rollouts and training as well as in the evaluation. Tasks are fixed: nothing is
said of other tasks. With five seeds a bootstrap's intervals are somewhat too narrow.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from page import add_write, interval, publish

from regrasp.collect.evaluate import markdown_table
from regrasp.rl.statistics import Interval

Cells = dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]
"""Success and steps of each episode, by task and seed."""
REPEATS = 2000


@dataclass(frozen=True)
class Method:
    """A policy in one setting, over all tasks and seeds."""

    name: str
    noise: float
    round: int
    cells: Cells

    @property
    def tasks(self) -> list[str]:
        """Those that it ran."""
        return sorted({task for task, _ in self.cells})


def read(folder: Path) -> list[Method]:
    """Read every finished run's evaluations."""
    found: dict[tuple[str, float, int], Cells] = {}
    states: dict[Path, list[int]] = {}
    for summary in sorted(folder.glob("*/*/summary.json")):
        run = summary.parent
        for path in sorted((run / "evaluations").glob("*.json")):
            content = json.loads(path.read_text())
            assert states.setdefault(run, content["seeds"]) == content["seeds"], f"{path}: other initial states"
            said = re.search(r", round (\d+)", content["policy"])
            number = int(said.group(1)) if said else 0 if content["policy"] == "SFT on demonstrations" else 1
            name = content["policy"].replace(", round 1", "")
            cell = np.array(content["outcomes"], dtype=float), np.array(content["steps"], dtype=float)
            noise = float(content["settings"]["noise_scale"])
            found.setdefault((name, noise, number), {})[run.parent.name, int(run.name)] = cell
    methods = [Method(name, noise, number, cells) for (name, noise, number), cells in found.items()]
    return sorted(methods, key=lambda method: (method.noise, method.round, method.name))


@lru_cache
def draws(task: str, seeds: int, episodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of seeds [R + 1, S], and how often each episode counts [R + 1, S, E]; row 0 takes everything once."""
    generator = np.random.default_rng([len(task), *task.encode()])
    place = generator.integers(0, seeds, (REPEATS + 1, seeds))
    counts = generator.multinomial(episodes, np.full(episodes, 1 / episodes), (REPEATS + 1, seeds)).astype(np.float32)
    place[0], counts[0] = np.arange(seeds), 1
    return place, counts


def resampled(cells: Cells, task: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean over seeds of success, and of successes per 1000 steps, each [R + 1]."""
    mine = [cells[key] for key in sorted(cells) if key[0] == task]
    success, steps = (np.stack([cell[part] for cell in mine]).astype(np.float32) for part in (0, 1))
    place, counts = draws(task, len(mine), success.shape[1])
    won, walked = ((counts * values[place]).sum(axis=2) for values in (success, steps))
    return (won / counts.sum(axis=2)).mean(axis=1), (1000 * won / walked).mean(axis=1)


def sure(values: np.ndarray) -> Interval:
    """The plain value, and the interval of the resampled ones after it."""
    return interval(values[0], values[1:])


def compare(ours: Method, theirs: Method, only: str | None = None) -> tuple[str, ...]:
    """One row: ratio of throughputs, ratio of failures, difference of success, over tasks (or one) and seeds."""
    keys = {key for key in set(ours.cells) & set(theirs.cells) if only in (None, key[0])}
    tasks = sorted({task for task, _ in keys})
    a, b = ({key: method.cells[key] for key in keys} for method in (ours, theirs))
    pairs = [(resampled(a, task), resampled(b, task)) for task in tasks]
    mean: Callable[[int, int], np.ndarray] = lambda side, part: np.mean([pair[side][part] for pair in pairs], axis=0)  # noqa: E731
    speed = np.exp(np.mean([np.log(one[1] / other[1]) for one, other in pairs], axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):  # no failure at all in a draw
        failures = (1 - mean(0, 0)) / (1 - mean(1, 0))
    cells = f"{sure(speed):.2f}", f"{sure(failures):.2f}", f"{sure(mean(0, 0) - mean(1, 0)):+.3f}"
    return ours.name, theirs.name, f"{ours.noise:g}", str(len(keys)), *cells


def comparable(ours: Method, theirs: Method) -> bool:
    """Whether a row says something: baselines on the same data or on demonstrations alone, and conditions at beta 1."""
    if theirs is ours or theirs.noise != ours.noise or not set(theirs.cells) & set(ours.cells):
        return False
    if not theirs.name.startswith("RECAP"):
        return theirs.round in (0, ours.round)
    if "asked for" in theirs.name:
        return theirs.round == ours.round and ours.name.endswith("β 1")
    return theirs.round < ours.round and theirs.name.split("β")[-1] == ours.name.split("β")[-1]


def recap_at(methods: list[Method], beta: float) -> list[Method]:
    """RECAP at one beta, in every round and at every noise scale."""
    return [method for method in methods if method.name.startswith("RECAP") and method.name.endswith(f"β {beta:g}")]


def tasks_of(methods: list[Method]) -> list[str]:
    """The tasks that any of the methods ran."""
    return sorted({task for method in methods for task in method.tasks})


def by_task(methods: list[Method], beta: float) -> str:
    """RECAP at one beta and the least noise beside every baseline, task by task."""
    noise = min(method.noise for method in methods)
    rows = [("task", "policy", "beside", "seeds", "throughput ×", "failures ×", "success +")]
    for task in tasks_of(methods):
        here = [method for method in methods if method.noise == noise and task in method.tasks]
        pairs = [(mine, other) for mine in recap_at(here, beta) for other in here if comparable(mine, other)]
        for mine, other in pairs:
            first, second, _, seeds, *cells = compare(mine, other, task)
            rows.append((task, first, second, seeds, *cells))
    return markdown_table(rows)


def per_task(methods: list[Method], task: str) -> str:
    """One task's policies, a row each, with both noise scales."""
    here = [method for method in methods if task in method.tasks]
    noises = sorted({method.noise for method in here})
    titles = [f"{what}, noise {noise:g}" for noise in noises for what in ("success", "per 1000 steps")]
    rows: list[tuple[str, ...]] = [("policy", "seeds", *titles)]
    for name in dict.fromkeys(method.name for method in sorted(here, key=lambda method: (method.round, method.name))):
        found = {method.noise: method.cells for method in here if method.name == name}
        cells: list[str] = []
        for noise in noises:
            if noise not in found:
                cells += ["", ""]
                continue
            rate, speed = (sure(values) for values in resampled(found[noise], task))
            cells += [f"{rate:.3f}", f"{speed:.2f}"]
        seeds = {seed for of in found.values() for one, seed in of if one == task}
        rows.append((name, str(len(seeds)), *cells))
    return markdown_table(rows)


def sections(folder: Path, guidance: list[float]) -> str:
    """The comparison over all tasks and seeds, task by task, and each task's policies."""
    methods = read(folder)
    if not methods:
        raise SystemExit(f"There is no finished run in '{folder}'. Mend: python benchmarks/recap/run.py")
    rows = [("policy", "beside", "noise", "runs", "throughput ×", "failures ×", "success +")]
    ours = [method for beta in guidance for method in recap_at(methods, beta)]
    rows += [compare(mine, other) for mine in ours for other in methods if comparable(mine, other)]
    parts = ["### Over all tasks and seeds", markdown_table(rows)]
    parts += [f"### RECAP at β {guidance[0]:g} beside the others, task by task", by_task(methods, guidance[0])]
    for task in tasks_of(methods):
        parts += [f"### {task}", per_task(methods, task)]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench/recap"))
    parser.add_argument("--guidance", type=float, nargs="+", default=[3.0, 1.0], help="the betas that are compared")
    add_write(parser)
    options = parser.parse_args()
    publish(sections(options.runs, options.guidance), options.write, Path(__file__).name)


if __name__ == "__main__":
    main()
