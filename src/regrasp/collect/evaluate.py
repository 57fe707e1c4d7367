"""Success and speed of policies, with intervals, and paired comparisons on the same initial states."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from regrasp.collect.environment import Environment
from regrasp.collect.rollout import EpisodeRecord, RolloutPolicy, run_episodes
from regrasp.core.errors import ConfigError
from regrasp.rl.statistics import (
    Interval,
    mcnemar,
    success_difference,
    throughput_interval,
    throughput_ratio,
    wilson_interval,
)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one policy did in E episodes of one task."""

    policy: str
    task: str
    """The environment's name, such as ``metaworld:pick-place-v3``."""
    seeds: np.ndarray
    """int64 [E]."""
    success: np.ndarray
    """bool [E]."""
    steps: np.ndarray
    """int64 [E]."""

    @property
    def rate(self) -> Interval:
        """The share of successes, with its Wilson interval."""
        return wilson_interval(int(self.success.sum()), len(self.success))

    @property
    def steps_per_success(self) -> float:
        """Mean steps of the successful episodes; NaN without any."""
        return float(self.steps[self.success].mean()) if self.success.any() else float("nan")

    @property
    def throughput(self) -> Interval:
        """Successes per 1000 steps, with a bootstrap interval."""
        return throughput_interval(self.success, self.steps)

    def to_json(self) -> dict[str, object]:
        """Return plain JSON with the numbers and the episodes behind them."""
        rate, speed = self.rate, self.throughput
        return {
            "policy": self.policy,
            "task": self.task,
            "episodes": len(self.success),
            "success": [rate.value, rate.low, rate.high],
            "steps_per_success": self.steps_per_success if self.success.any() else None,
            "successes_per_1000_steps": [speed.value, speed.low, speed.high],
            "seeds": self.seeds.tolist(),
            "outcomes": self.success.tolist(),
            "steps": self.steps.tolist(),
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two policies on the same initial states."""

    first: str
    second: str
    task: str
    only_first: int
    """Episodes in which only the first succeeded."""
    only_second: int
    p_value: float
    """McNemar's, for equal success."""
    difference: Interval
    """Success of the first minus success of the second."""
    throughput_ratio: Interval
    """Throughput of the first over that of the second."""


def evaluate_policy(
    name: str,
    policy: RolloutPolicy,
    environment: Environment,
    seeds: Sequence[int],
    watch: Callable[[EpisodeRecord], None] = lambda episode: None,
) -> Evaluation:
    """Run a policy on given initial states.

    Args:
        name: what the policy is called in tables.
        policy: what acts.
        environment: where.
        seeds: one per episode.
        watch: is shown each episode as it ends.
    """
    success = np.zeros(len(seeds), bool)
    steps = np.zeros(len(seeds), np.int64)
    for number, episode in enumerate(run_episodes(environment, policy, seeds)):
        success[number], steps[number] = episode.success, episode.steps
        watch(episode)
    return Evaluation(policy=name, task=environment.spec.name, seeds=np.array(seeds), success=success, steps=steps)


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Compare two policies episode by episode.

    Raises:
        ConfigError: they did not run on the same initial states of the same task.
    """
    if first.task != second.task or not np.array_equal(first.seeds, second.seeds):
        raise ConfigError(
            f"{first.policy!r} and {second.policy!r} can be compared only on the same initial states; the first ran "
            f"{len(first.seeds)} episodes of {first.task}, the second {len(second.seeds)} of {second.task}"
            f"{' from other seeds' if len(first.seeds) == len(second.seeds) else ''}. Evaluate both with equal "
            f"--episodes and --seed."
        )
    return Comparison(
        first=first.policy,
        second=second.policy,
        task=first.task,
        only_first=int((first.success & ~second.success).sum()),
        only_second=int((~first.success & second.success).sum()),
        p_value=mcnemar(first.success, second.success),
        difference=success_difference(first.success, second.success),
        throughput_ratio=throughput_ratio((first.success, first.steps), (second.success, second.steps)),
    )


def results_table(evaluations: Sequence[Evaluation]) -> str:
    """Return the results as a Markdown table, one row per policy and task."""
    rows = [("policy", "task", "episodes", "success [95%]", "steps per success", "successes per 1000 steps [95%]")]
    for one in evaluations:
        speed = "none" if not one.success.any() else f"{one.steps_per_success:.1f}"
        rows.append(
            (
                one.policy,
                one.task,
                str(len(one.success)),
                f"{one.rate:.3f}",
                speed,
                f"{one.throughput:.2f}",
            )
        )
    return markdown_table(rows)


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Return paired comparisons as a Markdown table."""
    head = ("first", "second", "task", "only first / only second", "p (McNemar)", "success +", "throughput ×")
    rows = [
        (
            one.first,
            one.second,
            one.task,
            f"{one.only_first} / {one.only_second}",
            f"{one.p_value:.2g}",
            f"{one.difference:.3f}",
            f"{one.throughput_ratio:.2f}",
        )
        for one in comparisons
    ]
    return markdown_table([head, *rows])


def compare_all(evaluations: Sequence[Evaluation], baseline: str | None = None) -> list[Comparison]:
    """Compare every policy with the baseline, task by task.

    Args:
        evaluations: of several policies, each on one or more tasks.
        baseline: a policy's name; the first one's if not given.

    Raises:
        ConfigError: no policy of that name, or the initial states differ.
    """
    by_task: dict[str, dict[str, Evaluation]] = {}
    for one in evaluations:
        by_task.setdefault(one.task, {})[one.policy] = one
    return [pair for policies in by_task.values() for pair in _with_baseline(policies, baseline)]


def _with_baseline(policies: Mapping[str, Evaluation], baseline: str | None) -> list[Comparison]:
    name = baseline if baseline is not None else next(iter(policies))
    if name not in policies:
        raise ConfigError(f"There is no policy {name!r} to compare with; evaluated were {', '.join(policies)}.")
    return [compare(one, policies[name]) for policy, one in policies.items() if policy != name]


def markdown_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as a Markdown table, the first as its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
