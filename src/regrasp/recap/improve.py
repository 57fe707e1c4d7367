"""The loop: collect, value, label, and learn, again and again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from regrasp.core.errors import ConfigError
from regrasp.recap.improve_check import check_recipe
from regrasp.recap.improve_evaluation import summarise
from regrasp.recap.improve_loop import Loop, open_loop
from regrasp.recap.selection import StageResult


@dataclass(frozen=True, kw_only=True)
class ImproveConfig:
    """Improve a policy by its own experience, as a recipe says; what is done already is not done again."""

    recipe: Annotated[Path, tyro.conf.Positional]
    """A recipe.yaml: datasets and/or an environment, settings of the stages, rounds, evaluation, baselines."""
    output: Path | None = None
    """The run's folder, with every artefact; runs/<the recipe's name> where it is left out."""
    workers: int | None = None
    """Processes for environments and decoding; as many as there are cores where it is left out."""
    dry_run: bool = False
    """Print the stages and what is done already, and do nothing."""
    debug: bool = False
    """Show the traceback of an error."""


def run(config: ImproveConfig) -> StageResult:
    """Run the recipe's rounds, and compare what they gave.

    Raises:
        ConfigError: The recipe cannot be used.
        RegraspError: Whatever a stage raises.
    """
    loop = open_loop(config.recipe, config.output, workers=config.workers, dry_run=config.dry_run)
    try:
        check_recipe(loop)
        _improve(loop)
        lines = loop.plan_lines() if config.dry_run else _conclude(loop)
    finally:
        loop.close()
    return StageResult(lines=lines, written=[] if config.dry_run else [loop.folder])


def _improve(loop: Loop) -> None:
    """RECAP, arXiv:2511.14759, algorithm 1: value and policy start afresh each round, and data accumulate."""
    data = loop.demonstrations()
    policy = loop.imitate("sft", data)
    for number in loop.rounds():
        data = data + loop.experience(policy, number)
        returns = loop.returns(data, number)
        values = loop.values(data, returns, number)
        labels = loop.labels(data, values, number)
        policy = loop.improve(f"recap_round{number}", data, labels)
        for name in loop.recipe.baselines:
            loop.baseline(name, data, labels, number)
    loop.evaluate()


def _conclude(loop: Loop) -> list[str]:
    """The table of an online run; the next step of an offline one."""
    if not loop.policies:
        raise ConfigError(f"The recipe '{loop.path}' names neither datasets nor an environment with demos.")
    if loop.recipe.environment is None:
        last = loop.policies[-1]
        return [
            *loop.plan_lines(),
            f"The policy is in '{last.path}', trained on {last.trained_on}.",
            f"Next: collect with it, `regrasp rollout {last.path} --env ENVIRONMENT --record data/NAME`, or on the "
            f"robot by lerobot-rollout; add the dataset to train_data_paths in '{loop.path}', and run this again.",
        ]
    return summarise(loop)
