"""``recipe.yaml``: the datasets of a run, and the settings of its stages."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from regrasp.core.errors import ConfigError, listing, nearest


class DatasetEntry(BaseModel):
    """One dataset of a recipe.

    Attributes:
        dataset_path: The folder; relative to the recipe's own folder.
        type: ``demo`` (or ``sft``) or ``rollout``.
        weight: Its share of a training mixture, relative to its frames.
        keys: Its columns → the run's names, for cameras, state and task.
        name: What the run calls it; the folder's name where it is left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset_path: str
    type: str
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    keys: dict[str, str] = Field(default_factory=dict)
    name: str | None = Field(default=None, pattern=r"^[^/\\\x00-\x1f]+$")


class ValueSections(BaseModel):
    """The settings of the two steps of the value model, under ``value:``.

    Attributes:
        fit, predict: Settings, named as the flags with underscores.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fit: dict[str, Any] = Field(default_factory=dict)
    predict: dict[str, Any] = Field(default_factory=dict)


class AnnotateSections(BaseModel):
    """The settings of judges, under ``annotate:``.

    Attributes:
        judge: Settings that all signals share, such as engine, model, dataset and cameras.
        terminal, dense, rubric, check: Settings of one command, named as its flags with underscores.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    judge: dict[str, Any] = Field(default_factory=dict)
    terminal: dict[str, Any] = Field(default_factory=dict)
    dense: dict[str, Any] = Field(default_factory=dict)
    rubric: dict[str, Any] = Field(default_factory=dict)
    check: dict[str, Any] = Field(default_factory=dict)


class PolicySections(BaseModel):
    """The settings of the policy, under ``policy:``.

    Attributes:
        fit: Settings of ``policy fit``, named as its flags with underscores; for every policy of a run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fit: dict[str, Any] = Field(default_factory=dict)


class EnvironmentEntry(BaseModel):
    """Where policies collect data and are evaluated.

    Attributes:
        name: Such as ``metaworld:pick-place-v3``.
        max_episode_steps: Where episodes are cut off; the environment's own limit where it is left out.
        copies: Episodes that run together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    max_episode_steps: int | None = Field(default=None, ge=1)
    copies: int = Field(default=32, ge=1)


class EvaluationEntry(BaseModel):
    """How the policies of a run are compared, all from the same initial states.

    Attributes:
        episodes: Of each policy and setting.
        noise_scales: Scales of the starting noise; every policy is run at each.
        guidance_scales: beta, for conditioned policies; the first is the one that baselines are compared with.
        conditions: What conditioned policies are asked for besides ``positive``, at beta 1 and the first noise scale.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    episodes: int = Field(default=200, ge=1)
    noise_scales: list[float] = Field(default=[1.0], min_length=1)
    guidance_scales: list[float] = Field(default=[1.0], min_length=1)
    conditions: list[Literal["negative", "none"]] = Field(default_factory=list)


Baseline = Literal["sft", "sft_all", "filtered_bc", "awr"]
"""Imitation of the demonstrations, of everything, of the successes, and of everything weighted by advantage."""


class Recipe(BaseModel):
    """A recipe: datasets as RLinf users write them, one section of settings for each stage, and how the loop runs.

    Attributes:
        train_data_paths: The datasets.
        annotate: The settings of judges.
        outcomes, returns, advantages, relabel: Settings, named as the stages' flags with underscores.
        value: The settings of ``value fit`` and ``value predict``, in two sections.
        policy: The settings of ``policy fit``.
        environment: Where ``regrasp improve`` collects and evaluates; without one it works offline.
        demos: Settings of ``regrasp demos``, where the environment's experts are to give the demonstrations.
        rollout: Settings of ``regrasp rollout``, for the data of each round.
        rounds: Times that data are collected, valued and learnt from.
        evaluation: How policies are compared.
        baselines: What else is trained on the same data.
        seed: Of everything random that has no seed of its own in its section.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    train_data_paths: list[DatasetEntry] = Field(default_factory=list)
    annotate: AnnotateSections = Field(default_factory=AnnotateSections)
    outcomes: dict[str, Any] = Field(default_factory=dict)
    returns: dict[str, Any] = Field(default_factory=dict)
    value: ValueSections = Field(default_factory=ValueSections)
    advantages: dict[str, Any] = Field(default_factory=dict)
    relabel: dict[str, Any] = Field(default_factory=dict)
    policy: PolicySections = Field(default_factory=PolicySections)
    environment: EnvironmentEntry | None = None
    demos: dict[str, Any] | None = None
    rollout: dict[str, Any] = Field(default_factory=dict)
    rounds: int = Field(default=1, ge=1)
    evaluation: EvaluationEntry = Field(default_factory=EvaluationEntry)
    baselines: list[Baseline] = Field(default_factory=list)
    seed: int = Field(default=0, ge=0)

    def section(self, command: str) -> dict[str, Any]:
        """The settings of a command such as ``returns`` or ``value fit``.

        Those that run episodes also get the environment, and the seed and number of episodes that the loop would take.
        """
        found: Any = self
        for name in command.split(" "):
            found = getattr(found, name, {})
        if command.startswith("annotate "):
            found = self.annotate.judge | found
        return self._episodes_of(command) | (found or {})

    def _episodes_of(self, command: str) -> dict[str, Any]:
        if command not in ("demos", "rollout", "evaluate"):
            return {}
        settings: dict[str, Any] = {"seed": self.seed}
        if command == "evaluate":
            settings["episodes"] = self.evaluation.episodes
        if self.environment is not None:
            settings |= self.environment.model_dump(exclude={"name"}, exclude_none=True)
            settings["env"] = [self.environment.name] if command == "evaluate" else self.environment.name
        return settings


def read_recipe(path: Path) -> Recipe:
    """Read a recipe.

    Raises:
        ConfigError: It is missing, is not YAML, or has a key (the nearest known one is named) or value that is not
            understood.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"The recipe '{path}' cannot be read: {error.strerror}."
        raise ConfigError(message) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = f"The recipe '{path}' is not YAML: {' '.join(str(error).split())}."
        raise ConfigError(message) from None
    if not isinstance(content, dict):
        message = f"The recipe '{path}' needs keys such as train_data_paths; found {type(content).__name__}."
        raise ConfigError(message)
    if "data" in content:  # RLinf nests the datasets one level deeper
        content = _unnested(path, content)
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise ConfigError(_explain(path, error)) from None


RLINF_SETTINGS = {
    "gamma": "`regrasp returns --gamma` (or `returns: {gamma: …}`), one for the run",
    "failure_reward": "`regrasp returns --failure-penalty 300` for -300 (or `returns: {failure_penalty: 300}`)",
    "tag": "each stage's --tag",
    "output_path": "nothing: datasets are neither copied nor rewritten, and sidecars can be kept apart with --sidecars",
    "dataset_type": "each dataset's `type`",
    "num_workers": "nothing: one thread reads at the disk's speed",
}
"""Settings of RLinf's first stage that stand elsewhere here, and where."""


def _unnested(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Take the datasets out of RLinf's ``data:``, with their ``data_root``."""
    data = content.pop("data")
    if not isinstance(data, dict) or not isinstance(data.get("train_data_paths"), list):
        message = f"Under `data:`, the recipe '{path}' needs a list train_data_paths; found {_found(data)}."
        raise ConfigError(message)
    if "train_data_paths" in content:
        message = f"The recipe '{path}' has train_data_paths twice, once of them under `data:`. Mend: keep one."
        raise ConfigError(message)
    entries, root = data.pop("train_data_paths"), data.pop("data_root", None)
    if data:
        key = next(iter(data))
        instead = RLINF_SETTINGS.get(key, "the stages' sections `returns:`, `value:` and `advantages:`")
        message = (
            f"Under `data:`, the recipe '{path}' has {key!r}. Mend: leave it out; in its place there is {instead}."
        )
        raise ConfigError(message)
    if root is not None:
        entries = [
            entry | {"dataset_path": str(Path(str(root)) / str(entry.get("dataset_path")))}
            if isinstance(entry, dict) and "dataset_path" in entry
            else entry
            for entry in entries
        ]
    return content | {"train_data_paths": entries}


def _explain(path: Path, error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        key, known = str(first["loc"][-1]), _siblings(first)
        if first["loc"][0] == "train_data_paths" and key in RLINF_SETTINGS:
            return (
                f"The recipe '{path}' has {place!r}. Mend: leave it out; in its place there is {RLINF_SETTINGS[key]}."
            )
        return (
            f"The recipe '{path}' has the unknown key {place!r}.{nearest(key, known)} Known are: {listing(known, 12)}."
        )
    return f"The recipe '{path}', at {place!r}: {first['msg']}; found {_found(first['input'])}."


def _siblings(unknown: ErrorDetails) -> list[str]:
    """The keys that are known where an unknown one stands."""
    holders: dict[str | int, type[BaseModel]] = {
        "train_data_paths": DatasetEntry,
        "annotate": AnnotateSections,
        "value": ValueSections,
        "policy": PolicySections,
        "environment": EnvironmentEntry,
        "evaluation": EvaluationEntry,
    }
    return list(holders.get(unknown["loc"][0] if len(unknown["loc"]) > 1 else "", Recipe).model_fields)


def _found(value: object) -> str:
    if isinstance(value, dict):
        return listing(map(str, value)) or "nothing"
    return "nothing" if value is None else repr(value)
