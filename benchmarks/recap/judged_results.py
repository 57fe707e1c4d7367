"""What `judged.py` measured, as Markdown: `python benchmarks/recap/judged_results.py`."""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from page import add_write, interval, publish

from regrasp.collect.evaluate import markdown_table
from regrasp.core.outcome import Outcome
from regrasp.data.dataset import open_dataset
from regrasp.data.outcomes import read_outcomes
from regrasp.rl.statistics import Interval

RESAMPLES = 10_000
AGAIN = "true_again"
"""The tag of labels from the true outcomes and a value model of another seed."""
TAGS = ("true", "judged", AGAIN)
MEASURES = ("accuracy", "auroc", "ece_held_out", "ece_held_out_after_isotonic")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table's lines."""
    return markdown_table([tuple(head), *map(tuple, rows)]).splitlines()


def check_lines(folder: Path) -> list[str]:
    """What `annotate check` found."""
    found = json.loads((folder / "check.json").read_text())
    names = [name for name in found if name in MEASURES or name.startswith("preferred_to_")]
    rows = [[f"`{name}`", f"{Interval(**found[name]):.3f}"] for name in names if isinstance(found[name], dict)]
    usable = "usable" if found["usable"] else f"not shown to be usable: {'; '.join(found['reasons'])}"
    return [*table(["measure of `annotate check`", "value [95 %]"], rows), "", f"It says that the judge is {usable}."]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Episodes that are told apart in tables."""

    name: str
    dataset: dict[str, str]
    """Its name in each arm."""
    episodes: np.ndarray


def groups(folder: Path) -> Iterator[Group]:
    """Demonstrations, and rollouts by what happened and what the judge said."""
    truth = read_outcomes(open_dataset(folder / "data/rollouts")).by_episode
    said = pq.read_table(folder / "sidecars/judged/unlabelled/outcomes_learned.parquet").to_pydict()
    judged = dict(zip(said["episode_index"], map(Outcome, said["outcome"]), strict=True))
    demos = open_dataset(folder / "data/demos").index().episode_index
    yield Group(name="demonstrations", dataset={"true": "demos", "judged": "demos"}, episodes=demos)
    for happened in (Outcome.SUCCESS, Outcome.FAILURE):
        for word in (Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN):
            chosen = [number for number in truth if (truth[number], judged[number]) == (happened, word)]
            name = f"{happened.value}, judged {word.value}"
            yield Group(name=name, dataset={"true": "rollouts", "judged": "unlabelled"}, episodes=np.array(chosen))


def labels(folder: Path, tag: str, group: Group) -> np.ndarray:
    """The labels of a group's frames, of one tag, in canonical order."""
    arm = "judged" if tag == "judged" else "true"
    path = folder / f"sidecars/{arm}/{group.dataset[arm]}/advantages_{tag}.parquet"
    columns = pq.read_table(path, columns=["episode_index", "advantage"])
    return columns["advantage"].to_numpy()[np.isin(columns["episode_index"].to_numpy(), group.episodes)]


def label_lines(folder: Path) -> list[str]:
    """Labels from judged outcomes beside those from the true ones."""
    rows, whole = [], {tag: np.empty(0, dtype=bool) for tag in TAGS}
    found = [group for group in groups(folder) if len(group.episodes)]
    for group in found:
        one = {tag: labels(folder, tag, group) for tag in TAGS}
        rows.append([group.name, str(len(group.episodes)), *_row(one)])
        whole = {tag: np.concatenate([whole[tag], one[tag]]) for tag in TAGS}
    rows.append(["all", str(sum(len(group.episodes) for group in found)), *_row(whole)])
    head = ["episodes", "number", "frames", "positive, true outcomes", "positive, judged", "equal labels"]
    return table([*head, "equal labels of two value models, true outcomes"], rows)


def _row(one: dict[str, np.ndarray]) -> list[str]:
    true, judged, again = (one[tag] for tag in TAGS)
    shares = (true.mean(), judged.mean(), (true == judged).mean(), (true == again).mean())
    return [str(len(true)), *(f"{share:.3f}" for share in shares)]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """One method's evaluations: S trainings, each from the same E initial states."""

    seeds: np.ndarray
    """[E], what the states follow from."""
    success: np.ndarray
    """[S, E]."""
    steps: np.ndarray
    """[S, E]."""

    def sums(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return success and successes per 1000 steps where each state counts as often as said: counts [R, E]."""
        won, steps = counts @ self.success.mean(0), counts @ self.steps.mean(0)
        return won / counts.sum(1), 1000 * won / steps


def evaluations(folder: Path) -> dict[str, Runs]:
    """Every method's evaluations; policies that differ in the seed of training alone are one method."""
    found: dict[str, list[dict]] = {}
    for path in sorted((folder / "evaluations").glob("*.json")):
        (one,) = json.loads(path.read_text())
        found.setdefault(re.sub(r"_\d+$", "", path.stem), []).append(one)
    return {
        name: Runs(
            seeds=np.array(runs[0]["seeds"]),
            success=np.array([one["outcomes"] for one in runs], dtype=float),
            steps=np.array([one["steps"] for one in runs], dtype=float),
        )
        for name, runs in found.items()
    }


NAMES = {
    "sft": "SFT, which collected",
    "sft_long": "SFT, trained as long as the others",
    "filtered_bc_true": "filtered BC, true outcomes",
    "filtered_bc_judged": "filtered BC, judged",
    "recap_true_b1.5": "RECAP β 1.5, true outcomes",
    "recap_judged_b1.5": "RECAP β 1.5, judged",
    "recap_true_b3": "RECAP β 3, true outcomes",
    "recap_judged_b3": "RECAP β 3, judged",
}
PAIRS = (
    ("recap_judged_b1.5", "recap_true_b1.5"),
    ("recap_judged_b3", "recap_true_b3"),
    ("filtered_bc_judged", "filtered_bc_true"),
    ("recap_judged_b1.5", "sft"),
    ("recap_judged_b1.5", "sft_long"),
    ("recap_true_b1.5", "sft_long"),
    ("recap_judged_b1.5", "filtered_bc_judged"),
    ("recap_true_b1.5", "filtered_bc_true"),
)


def policy_lines(folder: Path) -> list[str]:
    """What the policies do, and pairs of them, with bootstraps over the initial states, which all share."""
    found = evaluations(folder)
    names, states = [name for name in NAMES if name in found], found["sft"].seeds
    assert all(np.array_equal(one.seeds, states) for one in found.values())
    whole, generator = np.ones((1, len(states))), np.random.default_rng(0)
    drawn = generator.multinomial(len(states), np.full(len(states), 1 / len(states)), size=RESAMPLES)
    of = {name: [*zip(found[name].sums(whole), found[name].sums(drawn), strict=True)] for name in names}
    rows = [
        [NAMES[n], str(len(found[n].success)), f"{interval(*of[n][0]):.3f}", f"{interval(*of[n][1]):.2f}"]
        for n in names
    ]
    lines = table(["policy", "trainings", "success [95 %]", "successes per 1000 steps [95 %]"], rows)
    rows = []
    for first, second in (pair for pair in PAIRS if set(pair) <= set(names)):
        (rate, speed), (other_rate, other_speed) = of[first], of[second]
        gain = interval(rate[0] - other_rate[0], rate[1] - other_rate[1])
        ratio = interval(speed[0] / other_speed[0], speed[1] / other_speed[1])
        rows.append([NAMES[first], NAMES[second], f"{gain:+.3f}", f"{ratio:.2f}"])
    return [*lines, "", *table(["policy", "beside", "success + [95 %]", "throughput × [95 %]"], rows)]


def section(folder: Path) -> str:
    """Everything."""
    parts = ["### The judge", *check_lines(folder), "### Labels", *label_lines(folder), "### Policies"]
    lines = []
    for part in [*parts, *policy_lines(folder)]:
        lines += ["", part, ""] if part.startswith("#") else [part]
    return "\n".join(lines).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/bench/judged"))
    add_write(parser)
    options = parser.parse_args()
    publish(section(options.folder), options.write, Path(__file__).name)


if __name__ == "__main__":
    main()
