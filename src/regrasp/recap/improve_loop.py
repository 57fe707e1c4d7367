"""The steps of the loop as stages of a run's folder: each knows what it depends on, and where its files are."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from regrasp.core.errors import ConfigError, listing
from regrasp.core.outcome import Source
from regrasp.core.provenance import digest
from regrasp.data.outcomes import read_outcomes
from regrasp.data.storage import write_bytes_atomic, write_json_atomic
from regrasp.recap.improve_evaluation import NAMES, Trial, collecting, evaluate_trial, trials_of
from regrasp.recap.recipe import DatasetEntry, EnvironmentEntry, Recipe, read_recipe
from regrasp.recap.recipe_settings import settings_of
from regrasp.recap.run_folder import RunFolder
from regrasp.recap.selection import StageResult, open_entry

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from regrasp.collect.environment import Environment

_DECIDED = {
    "demos",
    "rollouts",
    "config",
    "sidecars",
    "output",
    "tag",
    "returns",
    "values",
    "labels",
    "checkpoint",
    "record",
    "policy",
    "env",
    "max_episode_steps",
    "copies",
    "overwrite",
    "resume",
    "dry_run",
}
"""Settings of stages that follow from the loop."""
_DECIDED_OF_POLICIES = {"episodes", "weighting"}
_OF_THE_MACHINE = {"workers", "threads", "device", "debug", "tracker", "image_cache_gib"}
"""Settings that say how a stage runs and not what it makes."""


@dataclass(frozen=True)
class Part:
    """One dataset of the run: its entry in a recipe, and a key of its content."""

    entry: DatasetEntry
    key: str


@dataclass(frozen=True, kw_only=True)
class TrainedPolicy:
    """A policy of the run.

    Attributes:
        name: Of its folder.
        title: In tables.
        path: Its checkpoint.
        key: Of what it depends on.
        conditioned: Whether it hears a condition.
        round: After which data it was trained; 0 for demonstrations alone.
    """

    name: str
    title: str
    path: Path
    key: str
    conditioned: bool
    round: int

    @property
    def trained_on(self) -> str:
        """What it was trained on, in words."""
        return json.loads((self.path / "regrasp.json").read_text())["trained_on"]


def open_loop(recipe: Path, output: Path | None, *, workers: int | None, dry_run: bool) -> "Loop":
    """Read a recipe, and open its run's folder."""
    content = read_recipe(recipe)
    folder = output if output is not None else Path("runs") / recipe.stem
    if content.environment is None and content.demos is not None:
        raise ConfigError(f"The recipe '{recipe}' has `demos:` and no `environment:` to record them in.")
    if not dry_run:
        folder.mkdir(parents=True, exist_ok=True)
    return Loop(path=recipe, recipe=content, folder=folder, run=RunFolder(folder, dry_run=dry_run), workers=workers)


@dataclass(kw_only=True)
class Loop:
    """A run that goes on: its recipe, its folder, and the policies and evaluations so far."""

    path: Path
    recipe: Recipe
    folder: Path
    run: RunFolder
    workers: int | None
    policies: list[TrainedPolicy] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    _environment: "Environment | None" = None

    # --- data

    @cached_property
    def given(self) -> list[Part]:
        """The datasets that the recipe names, demonstrations first."""
        parts = [self._given(entry) for entry in self.recipe.train_data_paths]
        return sorted(parts, key=lambda part: part.entry.type)

    def _given(self, entry: DatasetEntry) -> Part:
        dataset = open_entry(entry, self.path.parent)
        outcomes = read_outcomes(dataset).by_episode
        settled = entry.model_copy(update={"name": dataset.name, "type": dataset.source.value})
        beside = os.path.relpath(dataset.path, self.folder / "rounds")
        key = digest([dataset.index().fingerprint, list(outcomes.items()), entry.weight, entry.keys, dataset.name])
        return Part(settled.model_copy(update={"dataset_path": beside}), key)

    def demonstrations(self) -> list[Part]:
        """The recipe's demonstrations, and those of the environment's experts where it asks for some."""
        found = [part for part in self.given if part.entry.type == Source.DEMO]
        if self.recipe.demos is None:
            return found
        from regrasp.recap.collect_stages import DemosConfig, record_demos

        environment = self._required_environment()
        record = self.folder / "data" / "demos"
        settings: dict[str, Any] = {"seed": self.recipe.seed} | self.settings("demos", self.recipe.demos, DemosConfig)
        running: dict[str, Any] = {
            "env": environment.name,
            "record": record,
            **self._stepping(),
            "workers": self.workers,
        }
        config = DemosConfig(**running | settings)
        key = self.run.stage(
            "demos",
            [environment.model_dump(), _choices(config)],
            [record],
            lambda: record_demos(config),
        )
        return [*found, self._recorded("demos", "demo", key)]

    def rounds(self) -> Sequence[int]:
        """The numbers of the rounds to run.

        Offline, one: the last, or the next where the recipe lists datasets that the last did not have.
        """
        if self.recipe.environment is not None:
            return range(1, self.recipe.rounds + 1)
        rollouts = sorted(str(part.entry.name) for part in self.given if part.entry.type == Source.ROLLOUT)
        if not rollouts:
            return range(0)
        record = self.folder / "rounds.json"
        known: list[list[str]] = json.loads(record.read_text()) if record.is_file() else []
        if not known or set(known[-1]) < set(rollouts):
            known.append(rollouts)
        known[-1] = rollouts
        if not self.run.dry_run:
            write_json_atomic(record, known)
        return range(len(known), len(known) + 1)

    def experience(self, policy: TrainedPolicy | None, number: int) -> list[Part]:
        """The rollouts that the recipe names, in the first round; and what the last policy does in the environment."""
        found = [part for part in self.given if part.entry.type == Source.ROLLOUT] if self._first(number) else []
        if self.recipe.environment is None:
            return found
        from regrasp.recap.collect_stages import RolloutConfig, record_rollouts

        if policy is None:
            raise ConfigError(f"The recipe '{self.path}' has no demonstrations, so there is no policy to collect with.")
        record, name = self.folder / "data" / f"round{number}", f"round{number}"
        settings: dict[str, Any] = {"seed": self.recipe.seed * 100 + number}
        settings |= self.settings("rollout", self.recipe.rollout, RolloutConfig)
        sampling = collecting(policy, self.recipe.evaluation)
        running: dict[str, Any] = {"policy": str(policy.path), "env": self.recipe.environment.name, "record": record}
        running |= self._stepping() | {"workers": self.workers}
        config = RolloutConfig(**running | sampling | settings)
        depends = [policy.key, self.recipe.environment.model_dump(), _choices(config)]
        key = self.run.stage(f"rollout round{number}", depends, [record], lambda: record_rollouts(config))
        return [*found, self._recorded(name, "rollout", key)]

    def _first(self, number: int) -> bool:
        return number == 1 or self.recipe.environment is None

    def _recorded(self, name: str, kind: str, key: str) -> Part:
        return Part(DatasetEntry(dataset_path=f"../data/{name}", type=kind, name=name), key)

    # --- values and labels

    def returns(self, data: list[Part], number: int) -> str:
        """Give every frame a return."""
        from regrasp.recap.returns import ReturnsConfig, run

        tag = f"round{number}"
        settings = self.settings("returns", self.recipe.returns, ReturnsConfig)
        config = ReturnsConfig(**self._selection(data, tag) | {"tag": tag, "overwrite": True} | settings)

        def work() -> StageResult:
            self._carry_outcomes()
            return run(config)

        return self._stage(f"returns {tag}", data, _choices(config), [], self._sidecars("returns", tag, data), work)

    def values(self, data: list[Part], returns: str, number: int) -> str:
        """Fit a value model from fresh weights, and give every frame a value."""
        from regrasp.recap import value_fit, value_predict

        tag, output = f"round{number}", self.folder / "values" / f"round{number}"
        selection, sections = self._selection(data, tag), self.recipe.value
        settings = self.settings("value fit", sections.fit, value_fit.ValueFitConfig)
        fixed = {"returns": tag, "output": output, "seed": self.recipe.seed, "workers": self._decoders, "resume": True}
        fit = value_fit.ValueFitConfig(**selection | fixed | settings)
        made = [output / "config.json", output / "model.safetensors"]
        fitted = self._stage(
            f"value fit {tag}", data, _choices(fit), [returns], made, lambda: value_fit.run(fit), [output]
        )
        settings = self.settings("value predict", sections.predict, value_predict.ValuePredictConfig)
        fixed = {"checkpoint": output, "tag": tag, "workers": self._decoders, "overwrite": True}
        predict = value_predict.ValuePredictConfig(**selection | fixed | settings)
        made = self._sidecars("values", tag, data)
        work = lambda: value_predict.run(predict)  # noqa: E731 - as short as the others
        return self._stage(f"value predict {tag}", data, _choices(predict), [fitted], made, work)

    def labels(self, data: list[Part], values: str, number: int) -> str:
        """Label every frame by its advantage."""
        from regrasp.recap.advantages import AdvantagesConfig, run

        tag = f"round{number}"
        settings = self.settings("advantages", self.recipe.advantages, AdvantagesConfig)
        fixed = {"returns": tag, "values": tag, "tag": tag, "overwrite": True}
        config = AdvantagesConfig(**self._selection(data, tag) | fixed | settings)
        made = self._sidecars("advantages", tag, data)
        return self._stage(f"advantages {tag}", data, _choices(config), [values], made, lambda: run(config))

    # --- policies

    def imitate(self, name: str, data: list[Part]) -> TrainedPolicy | None:
        """Train on demonstrations alone; None where there are none."""
        if not data:
            return None
        return self._fit(name, NAMES["sft"], data, None, {}, 0)

    def improve(self, name: str, data: list[Part], labels: str) -> TrainedPolicy:
        """Train a policy from fresh weights, conditioned on the labels."""
        number = int(name.removeprefix("recap_round"))
        title = "RECAP" if self.recipe.environment is None or self.recipe.rounds == 1 else f"RECAP, round {number}"
        return self._fit(name, title, data, labels, {"labels": f"round{number}"}, number)

    def baseline(self, name: str, data: list[Part], labels: str, number: int) -> TrainedPolicy | None:
        """Train a baseline on the same data; SFT on demonstrations is there already."""
        if name == "sft":
            return None
        tag = f"round{number}"
        settings: dict[str, dict[str, Any]] = {
            "sft_all": {},
            "filtered_bc": {"episodes": "success"},
            "awr": {"labels": tag, "weighting": "advantage"},
        }
        title = NAMES[name] if self.recipe.rounds == 1 else f"{NAMES[name]}, round {number}"
        return self._fit(f"{name}_{tag}", title, data, labels if name == "awr" else None, settings[name], number)

    def _fit(
        self, name: str, title: str, data: list[Part], labels: str | None, fixed: dict[str, Any], number: int
    ) -> TrainedPolicy:
        from regrasp.recap.policy_fit import PolicyFitConfig, run

        output = self.folder / "policies" / name
        settings = self.settings("policy fit", self.recipe.policy.fit, PolicyFitConfig)
        always = {"output": output, "seed": self.recipe.seed, "workers": self._decoders, "resume": True}
        config = PolicyFitConfig(**self._selection(data, name) | always | settings | fixed)
        made = [output / "regrasp.json", output / "model.safetensors"]
        key = self._stage(
            f"policy fit {name}", data, [_choices(config), fixed], [labels], made, lambda: run(config), [output]
        )
        conditioned = "labels" in fixed and "weighting" not in fixed
        policy = TrainedPolicy(name=name, title=title, path=output, key=key, conditioned=conditioned, round=number)
        self.policies.append(policy)
        return policy

    # --- evaluation

    def evaluate(self) -> None:
        """Run every policy from the same initial states, at every noise scale."""
        if self.recipe.environment is None:
            return
        for policy in self.policies:
            for trial in trials_of(policy, self.recipe.evaluation):
                result = self.folder / "evaluations" / f"{trial.file_name}.json"
                depends = [policy.key, self.recipe.environment.model_dump(), trial.settings, self.recipe.seed]
                depends.append(self.recipe.evaluation.episodes)
                self.run.stage(
                    f"evaluate {trial.file_name}",
                    depends,
                    [result],
                    lambda t=trial, r=result: evaluate_trial(self, t, r),
                )
                self.trials.append(trial)

    def environment(self) -> "Environment":
        """The environment, started when it is first needed."""
        from regrasp.collect.checkpoint_policy import checkpoint_cameras
        from regrasp.collect.environments import describe_environment, start_environment

        if self._environment is None:
            entry = self._required_environment()
            cameras = checkpoint_cameras(self.policies[0].path)
            spec = describe_environment(entry.name, max_episode_steps=entry.max_episode_steps, cameras=cameras)
            self._environment = start_environment(spec, copies=entry.copies, workers=self.workers)
        return self._environment

    def close(self) -> None:
        """Stop the environment."""
        if self._environment is not None:
            self._environment.close()

    def plan_lines(self) -> list[str]:
        """Say of each stage whether there is anything to do."""
        width = max((len(planned.name) for planned in self.run.plan), default=0)
        return [f"{planned.name:<{width}}  {planned.state}" for planned in self.run.plan]

    # --- what stages share

    def _stage(
        self,
        name: str,
        data: list[Part],
        choices: object,
        inputs: list[str | None],
        makes: list[Path],
        work: Callable[[], StageResult],
        owns: Sequence[Path] = (),
    ) -> str:
        depends = [[part.key for part in data], choices, inputs, self.recipe.seed]
        return self.run.stage(name, depends, makes, work, owns)

    def settings(self, command: str, section: dict[str, Any], config_type: type) -> dict[str, Any]:
        """A section's settings, without those that the loop decides."""
        decided = _DECIDED | (_DECIDED_OF_POLICIES if command == "policy fit" else set())
        found = sorted(decided & {key.replace("-", "_") for key in section})
        if found:
            raise ConfigError(
                f"The recipe '{self.path}' sets {listing(found)} of `{command}`, which `regrasp improve` decides. "
                "Mend: leave it out, or keep a recipe of its own for the single stages."
            )
        return settings_of(self.path, command, section, config_type)

    def _selection(self, data: list[Part], name: str) -> dict[str, Any]:
        """The datasets of a stage, as a recipe of their own beside the run."""
        path = self.folder / "rounds" / f"{name}.yaml"
        entries = [part.entry.model_dump(exclude_defaults=True) for part in data]
        if not self.run.dry_run:
            content = yaml.safe_dump({"train_data_paths": entries}, sort_keys=False).encode()
            if not path.is_file() or path.read_bytes() != content:
                write_bytes_atomic(path, content)
        return {"config": path, "sidecars": self.folder / "sidecars"}

    def _sidecars(self, kind: str, tag: str, data: list[Part]) -> list[Path]:
        return [self.folder / "sidecars" / str(part.entry.name) / f"{kind}_{tag}.parquet" for part in data]

    def _carry_outcomes(self) -> None:
        """Copy outcomes that lie beside the given datasets to where this run's stages look for them."""
        for part in self.given:
            meta = self.folder / "rounds" / part.entry.dataset_path / "meta"
            for found in sorted(meta.glob("outcomes*.parquet")):
                write_bytes_atomic(self.folder / "sidecars" / str(part.entry.name) / found.name, found.read_bytes())

    def _required_environment(self) -> EnvironmentEntry:
        if self.recipe.environment is None:
            raise ConfigError(f"The recipe '{self.path}' has no `environment:`.")
        return self.recipe.environment

    @property
    def _decoders(self) -> int | None:
        """Processes that read frames, at least one; environments can do with none beside this one."""
        return None if self.workers is None else max(self.workers, 1)

    def _stepping(self) -> dict[str, Any]:
        environment = self._required_environment()
        return {"max_episode_steps": environment.max_episode_steps, "copies": environment.copies}


def _choices(config: "DataclassInstance") -> dict[str, Any]:
    """A stage's settings, defaults among them, as far as they decide what it makes and do not follow from the loop."""
    found = asdict(config)
    kept = {name: value for name, value in found.items() if name not in _DECIDED | _OF_THE_MACHINE}
    return json.loads(json.dumps(kept, default=str))
