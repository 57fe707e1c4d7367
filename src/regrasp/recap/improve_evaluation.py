"""What a run's policies can do: each in every setting from the same initial states, and how RECAP's compares."""

import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regrasp.core.provenance import digest
from regrasp.data.storage import write_json_atomic
from regrasp.recap.recipe import EvaluationEntry
from regrasp.recap.selection import StageResult

if TYPE_CHECKING:
    from regrasp.collect.evaluate import Comparison, Evaluation
    from regrasp.recap.improve_loop import Loop, TrainedPolicy


NAMES = {
    "sft": "SFT on demonstrations",
    "sft_all": "SFT on everything",
    "filtered_bc": "filtered BC",
    "awr": "advantage-weighted regression",
}
"""What tables call the baselines."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One policy under one way of sampling its actions."""

    policy: "TrainedPolicy"
    noise_scale: float
    guidance_scale: float = 1.0
    condition: str = "positive"

    @property
    def settings(self) -> dict[str, Any]:
        """How actions are sampled."""
        found: dict[str, Any] = {"noise_scale": self.noise_scale}
        if self.policy.conditioned:
            found |= {"guidance_scale": self.guidance_scale, "condition": self.condition}
        return found

    @property
    def title(self) -> str:
        """What tables call it; the noise scale is a column of its own."""
        if not self.policy.conditioned:
            return self.policy.title
        how = f"β {self.guidance_scale:g}" if self.condition == "positive" else f"asked for {self.condition}"
        return f"{self.policy.title}, {how}"

    @property
    def file_name(self) -> str:
        """A name of its own among the run's evaluations."""
        how = f"_b{self.guidance_scale:g}_{self.condition}" if self.policy.conditioned else ""
        return f"{self.policy.name}{how}_t{self.noise_scale:g}"


def trials_of(policy: "TrainedPolicy", wanted: EvaluationEntry) -> list[Trial]:
    """Return the settings in which a policy is run."""
    if not policy.conditioned:
        return [Trial(policy=policy, noise_scale=noise) for noise in wanted.noise_scales]
    trials = [
        Trial(policy=policy, noise_scale=noise, guidance_scale=beta)
        for noise in wanted.noise_scales
        for beta in wanted.guidance_scales
    ]
    other = [Trial(policy=policy, noise_scale=wanted.noise_scales[0], condition=word) for word in wanted.conditions]
    return trials + other


def collecting(policy: "TrainedPolicy", wanted: EvaluationEntry) -> dict[str, Any]:
    """Return how a round's own policy collects the next one's data: as it is compared."""
    if not policy.conditioned:
        return {}
    return {"guidance_scale": wanted.guidance_scales[0], "noise_scale": wanted.noise_scales[0]}


def evaluate_trial(loop: "Loop", trial: Trial, result: Path) -> StageResult:
    """Run a trial's episodes and write them to a JSON file."""
    from regrasp.collect.checkpoint_policy import CheckpointPolicy, Sampling
    from regrasp.collect.collection import episode_seeds
    from regrasp.collect.evaluate import evaluate_policy

    environment = loop.environment()
    policy = CheckpointPolicy(trial.policy.path, environment.spec, sampling=Sampling(**trial.settings))
    seeds = episode_seeds(loop.recipe.seed, loop.recipe.evaluation.episodes, "evaluate")
    found = evaluate_policy(trial.title, policy, environment, seeds)
    write_json_atomic(result, found.to_json() | {"settings": trial.settings})
    rate, speed = found.rate, found.throughput
    line = f"{trial.title}, noise {trial.noise_scale:g}: success {rate.value:.3f}, {speed.value:.2f} per 1000 steps"
    return StageResult(lines=[line], written=[result])


def read_evaluation(path: Path, title: str) -> "Evaluation":
    """Return what ``evaluate_trial`` wrote."""
    from regrasp.collect.evaluate import Evaluation

    found = json.loads(path.read_text())
    return Evaluation(
        policy=title,
        task=found["task"],
        seeds=np.array(found["seeds"]),
        success=np.array(found["outcomes"], dtype=bool),
        steps=np.array(found["steps"], dtype=np.int64),
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """RECAP beside one baseline at one noise scale."""

    noise_scale: float
    comparison: "Comparison"

    @property
    def success(self) -> str:
        """Whether it succeeds more often, by the interval of the paired difference."""
        found = self.comparison.difference
        return "higher" if found.low > 0 else "lower" if found.high < 0 else "no clear difference"

    @property
    def throughput(self) -> str:
        """Whether it is faster, by the interval of the paired ratio."""
        found = self.comparison.throughput_ratio
        return "higher" if found.low > 1 else "lower" if found.high < 1 else "no clear difference"

    @property
    def beats(self) -> bool:
        """Better in one of the two, and not worse in the other."""
        found = {self.success, self.throughput}
        return "higher" in found and "lower" not in found

    @property
    def sentence(self) -> str:
        """The verdict in words, with its intervals."""
        c, ratio, difference = self.comparison, self.comparison.throughput_ratio, self.comparison.difference
        beats = "beats" if self.beats else "does not beat"
        return (
            f"{c.first} {beats} {c.second} at noise {self.noise_scale:g}: throughput "
            f"× {ratio:.2f} ({self.throughput}), success {difference:+.3f} ({self.success})."
        )


def verdicts(loop: "Loop", results: Sequence["Evaluation"]) -> list[Verdict]:
    """Compare the last round's policy, at the first guidance scale, with every unconditioned one, noise by noise."""
    from regrasp.collect.evaluate import compare

    pairs = list(zip(loop.trials, results, strict=True))
    last = max((trial.policy.round for trial in loop.trials if trial.policy.conditioned), default=0)
    beta = loop.recipe.evaluation.guidance_scales[0]
    found: list[Verdict] = []
    for noise in loop.recipe.evaluation.noise_scales:
        at_noise = [(trial, result) for trial, result in pairs if trial.noise_scale == noise]
        ours = [
            result
            for trial, result in at_noise
            if trial.policy.conditioned
            and trial.policy.round == last
            and trial.guidance_scale == beta
            and trial.condition == "positive"
        ]
        theirs = [
            result for trial, result in at_noise if not trial.policy.conditioned and trial.policy.round in (0, last)
        ]
        found += [Verdict(noise_scale=noise, comparison=compare(ours[0], one)) for one in theirs if ours]
    return found


def summarise(loop: "Loop") -> list[str]:
    """Write ``summary.json``, ``table.md`` and the pictures, and return the table and the verdicts."""
    from regrasp.report.policy_plots import Bar, draw_policies

    results = [
        read_evaluation(loop.folder / "evaluations" / f"{trial.file_name}.json", trial.title) for trial in loop.trials
    ]
    found = verdicts(loop, results)
    table = _table(loop.trials, results)
    sentences = [verdict.sentence for verdict in found]
    write_json_atomic(loop.folder / "summary.json", _summary(loop, results, found))
    bars = [
        Bar(label=trial.title, group=f"noise {trial.noise_scale:g}", success=result.rate, throughput=result.throughput)
        for trial, result in zip(loop.trials, results, strict=True)
    ]
    draw_policies(loop.folder / "policies.png", bars)
    curves = loop.folder / "values" / f"round{loop.recipe.rounds}" / "value_curves.png"
    if curves.is_file():
        shutil.copyfile(curves, loop.folder / "value_curves.png")
    data = {trial.policy.title: trial.policy.trained_on for trial in loop.trials}
    trained = [f"{title}: trained on {what}" for title, what in data.items()]
    head = f"{loop.recipe.evaluation.episodes} episodes each, the same initial states; 95% intervals over episodes."
    lines = [table, "", head, *trained, *_value_warnings(loop), "", *sentences]
    (loop.folder / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [*lines, "", f"Wrote {loop.folder}: summary.json, table.md, policies.png", _next_step(loop)]


def _next_step(loop: "Loop") -> str:
    """How to run the last round's policy as it was compared."""
    last = [trial.policy for trial in loop.trials if trial.policy.conditioned][-1]
    sampling = collecting(last, loop.recipe.evaluation)
    assert loop.recipe.environment is not None, "only online runs are summarised"
    return (
        f"Next: regrasp rollout {shlex.quote(str(last.path))} --env {loop.recipe.environment.name} --record data/NAME "
        f"--guidance-scale {sampling['guidance_scale']:g} --noise-scale {sampling['noise_scale']:g}"
    )


def _value_records(loop: "Loop") -> dict[int, dict[str, Any]]:
    """What each round's value model says of itself."""
    return {
        number: json.loads((loop.folder / "values" / f"round{number}" / "config.json").read_text())
        for number in range(1, loop.recipe.rounds + 1)
    }


def _value_warnings(loop: "Loop") -> list[str]:
    found = {number: record["verdict"]["warning"] for number, record in _value_records(loop).items()}
    return [f"Round {number}: {warning}" for number, warning in found.items() if warning]


def _summary(loop: "Loop", results: Sequence["Evaluation"], found: list[Verdict]) -> dict[str, Any]:
    assert loop.recipe.environment is not None, "only online runs are summarised"
    policies = []
    for trial, result in zip(loop.trials, results, strict=True):
        numbers = {k: v for k, v in result.to_json().items() if k not in ("seeds", "outcomes", "steps")}
        record = json.loads((trial.policy.path / "regrasp.json").read_text())
        policies.append(
            numbers
            | {"settings": trial.settings, "round": trial.policy.round, "trained_on": record["trained_on"]}
            | {"checkpoint": f"policies/{trial.policy.name}", "held_out": record["held_out"]}
        )
    comparisons = [
        {
            "first": verdict.comparison.first,
            "second": verdict.comparison.second,
            "noise_scale": verdict.noise_scale,
            "beats": verdict.beats,
            "success": verdict.success,
            "throughput": verdict.throughput,
            "success_difference": _numbers(verdict.comparison.difference),
            "throughput_ratio": _numbers(verdict.comparison.throughput_ratio),
            "p_mcnemar": verdict.comparison.p_value,
        }
        for verdict in found
    ]
    return {
        "environment": loop.recipe.environment.model_dump(),
        "recipe": digest(loop.recipe.model_dump()),
        "values": [
            {"round": number, "held_out": record["held_out"], "verdict": record["verdict"]}
            for number, record in _value_records(loop).items()
        ],
        "policies": policies,
        "comparisons": comparisons,
    }


def _numbers(interval: Any) -> list[float | None]:  # noqa: ANN401 - an Interval
    return [float(x) if np.isfinite(x) else None for x in (interval.value, interval.low, interval.high)]


def _table(trials: Sequence[Trial], results: Sequence["Evaluation"]) -> str:
    """One row per policy and setting, noise scale by noise scale."""
    from regrasp.collect.evaluate import markdown_table

    rows = [("policy", "noise", "success [95%]", "steps per success", "successes per 1000 steps [95%]")]
    order = sorted(range(len(trials)), key=lambda i: [t.noise_scale for t in trials].index(trials[i].noise_scale))
    for i in order:
        rate, speed, steps = results[i].rate, results[i].throughput, results[i].steps_per_success
        rows.append(
            (
                trials[i].title,
                f"{trials[i].noise_scale:g}",
                f"{rate:.3f}",
                "none" if np.isnan(steps) else f"{steps:.1f}",
                f"{speed:.2f}",
            )
        )
    return markdown_table(rows)
