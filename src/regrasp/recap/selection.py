"""Which datasets a stage works on."""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regrasp.core.errors import ConfigError
from regrasp.core.outcome import Source
from regrasp.data.dataset import Dataset, open_dataset

if TYPE_CHECKING:
    from regrasp.recap.recipe import DatasetEntry


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The datasets of a run; the base of every stage's settings."""

    demos: tuple[Path, ...] = ()
    """Datasets of demonstrations, which are successes."""
    rollouts: tuple[Path, ...] = ()
    """Datasets of a policy's rollouts."""
    config: Path | None = None
    """A recipe.yaml with train_data_paths and settings; flags go before it."""
    sidecars: Path | None = None
    """Keep sidecars in DIR/<dataset name>/ instead of the datasets' meta/ folders."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a stage did: lines for a person, and the files that it wrote (none if they were there already)."""

    lines: list[str]
    written: list[Path]


_TAGS = ("tag", "returns", "values", "source", "outcomes_tag")
"""The settings that become part of a file's name."""
_NOT_IN_A_NAME = re.compile(r"[/\\\x00-\x1f]")
_LONGEST_TAG = 200


def _check_tags(selection: Selection) -> None:
    for name in _TAGS:
        value = getattr(selection, name, None)
        if value is not None and (_NOT_IN_A_NAME.search(value) or len(os.fsencode(value)) > _LONGEST_TAG):
            message = (
                f"--{name.replace('_', '-')} becomes part of a file's name; found {value!r}. "
                f"Mend: leave out slashes and control characters, and keep it within {_LONGEST_TAG} bytes."
            )
            raise ConfigError(message)


def open_datasets(selection: Selection, *, flags: bool = False) -> list[Dataset]:
    """Open the datasets of the flags, or of the recipe where no flag names one, and read their episodes.

    Args:
        selection: What the user named.
        flags: Whether the stage needs the recorded success flags.

    Raises:
        ConfigError: There are none, one is given twice, or two have the same name; or a tag cannot name a file.
    """
    _check_tags(selection)
    opened = [
        open_dataset(path, source=source, sidecars=selection.sidecars)
        for source, paths in ((Source.DEMO, selection.demos), (Source.ROLLOUT, selection.rollouts))
        for path in paths
    ]
    if selection.config is not None:
        from regrasp.recap.recipe import read_recipe  # and with it pydantic and yaml

        folder, listed = selection.config.parent, read_recipe(selection.config).train_data_paths
        if opened and listed:
            tell(f"--demos and --rollouts go before the datasets of '{selection.config}': {len(listed)} are left out")
        opened = opened or [open_entry(entry, folder, sidecars=selection.sidecars) for entry in listed]
    if not opened:
        message = (
            "No dataset was named. Mend: give --demos DIR… and/or --rollouts DIR…, or --config recipe.yaml with "
            "train_data_paths."
        )
        raise ConfigError(message)
    _refuse_doubles(opened)
    _tell_warnings(opened, flags=flags)
    return opened


def open_entry(entry: "DatasetEntry", folder: Path, *, sidecars: Path | None = None) -> Dataset:
    """Open a dataset that a recipe in ``folder`` lists."""
    return open_dataset(
        folder / Path(entry.dataset_path).expanduser(),
        name=entry.name,
        source=Source.parse(entry.type),
        keys=entry.keys,
        weight=entry.weight,
        sidecars=sidecars,
    )


def _refuse_doubles(datasets: list[Dataset]) -> None:
    """Labels are kept by the dataset's name, and in its folder: neither may be shared."""
    folders: dict[Path, Dataset] = {}
    names: dict[str, Dataset] = {}
    for dataset in datasets:
        same = folders.setdefault(dataset.path.resolve(), dataset)
        if same is not dataset:
            message = (
                f"One dataset is given twice: '{same.path}' and '{dataset.path}' are one folder. Mend: give it once."
            )
            raise ConfigError(message)
        namesake = names.setdefault(dataset.name, dataset)
        if namesake is not dataset:
            message = (
                f"Two datasets are called {dataset.name!r}: '{namesake.path}' and '{dataset.path}'. Labels are kept by "
                "name. Mend: rename a folder, or give each a `name:` in the recipe."
            )
            raise ConfigError(message)


def _tell_warnings(datasets: list[Dataset], *, flags: bool) -> None:
    for dataset in datasets:
        index = dataset.index(flags=flags)
        warnings = [problem for problem in index.problems if problem.level == "warning"]
        if warnings:
            more = f" (and {len(warnings) - 1} more; see `regrasp inspect`)" if len(warnings) > 1 else ""
            tell(f"{dataset.name}: {warnings[0].text}{more}")


def tell(text: str) -> None:
    """Show a warning on standard error."""
    print(f"warning: {text}", file=sys.stderr)


def next_command(command: str, datasets: list[Dataset], selection: Selection, flags: str) -> str:
    """The command that a person would run next, with the datasets of this run, ready for a shell.

    Args:
        command: Its name.
        datasets: The datasets of this run.
        selection: How they were named.
        flags: What is to follow, quoted for a shell; left out where the recipe has the command's settings.
    """
    parts = []
    if selection.config is not None:
        from regrasp.recap.recipe import read_recipe

        parts += ["--config", str(selection.config)]
        flags = "" if read_recipe(selection.config).section(command) else flags
    if selection.demos or selection.rollouts:
        for flag, source in (("--demos", Source.DEMO), ("--rollouts", Source.ROLLOUT)):
            paths = [str(dataset.path) for dataset in datasets if dataset.source is source]
            parts += [flag, *paths] if paths else []
    parts += ["--sidecars", str(selection.sidecars)] if selection.sidecars else []
    return f"regrasp {command} {shlex.join(parts)} {flags}".strip()
