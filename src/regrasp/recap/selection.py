"""Which datasets a stage works on."""

import sys
from dataclasses import dataclass
from pathlib import Path

from regrasp.core.errors import ConfigError, listing
from regrasp.core.outcome import Source
from regrasp.data.dataset import Dataset, open_dataset
from regrasp.recap.recipe import read_recipe


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


def open_datasets(selection: Selection, *, flags: bool = False) -> list[Dataset]:
    """Open the datasets of the flags, or of the recipe where no flag names one, and read their episodes.

    Args:
        selection: What the user named.
        flags: Whether the stage needs the recorded success flags.

    Raises:
        ConfigError: There are none, or two have the same name.
    """
    opened = [
        open_dataset(path, source=source, sidecars=selection.sidecars)
        for source, paths in ((Source.DEMO, selection.demos), (Source.ROLLOUT, selection.rollouts))
        for path in paths
    ]
    if not opened and selection.config is not None:
        folder = selection.config.parent
        opened = [
            open_dataset(
                folder / entry.dataset_path,
                name=entry.name,
                source=Source.parse(entry.type),
                keys=entry.keys,
                weight=entry.weight,
                sidecars=selection.sidecars,
            )
            for entry in read_recipe(selection.config).train_data_paths
        ]
    if not opened:
        message = "No dataset was named. Mend: give --demos DIR… and/or --rollouts DIR…, or --config recipe.yaml with train_data_paths."
        raise ConfigError(message)
    names = [dataset.name for dataset in opened]
    twice = [dataset for dataset in opened if names.count(dataset.name) > 1]
    if twice:
        message = (
            f"Two datasets are called {twice[0].name!r}: {listing(f"'{d.path}'" for d in twice if d.name == twice[0].name)}. "
            "Labels are kept by name. Mend: rename a folder, or give each a `name:` in the recipe."
        )
        raise ConfigError(message)
    _tell_warnings(opened, flags=flags)
    return opened


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
    """The command that a person would run next, with the datasets of this run."""
    if not (selection.demos or selection.rollouts):
        return f"regrasp {command} --config {selection.config} {flags}"
    parts = [f"regrasp {command}"]
    for flag, source in (("--demos", Source.DEMO), ("--rollouts", Source.ROLLOUT)):
        paths = [str(dataset.path) for dataset in datasets if dataset.source is source]
        parts += [flag, *paths] if paths else []
    parts += ["--sidecars", str(selection.sidecars)] if selection.sidecars else []
    return " ".join([*parts, flags])
