"""A run's folder: which stages are done, known by what they depended on, so that only what changed runs again."""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from regrasp.core.provenance import digest
from regrasp.data.storage import write_json_atomic
from regrasp.recap.selection import StageResult

State = Literal["cached", "to resume", "to do", "done"]


@dataclass(frozen=True)
class Planned:
    """One stage of a run, and whether there is anything to do for it."""

    name: str
    state: State


class RunFolder:
    """The stages of a run, each skipped where it is done and resumed where it was begun.

    A stage is named, depends on JSON (its settings and the keys of its inputs), and makes files. What an earlier
    version of it made, from other settings or inputs, is moved to ``replaced/`` and never removed.
    """

    def __init__(self, folder: Path, *, dry_run: bool = False) -> None:
        """Work in ``folder``; with ``dry_run``, only find out what there is to do."""
        self.folder, self.dry_run = folder, dry_run
        self.plan: list[Planned] = []

    def stage(
        self,
        name: str,
        depends: object,
        makes: Sequence[Path],
        work: Callable[[], StageResult],
        owns: Sequence[Path] = (),
    ) -> str:
        """Do a stage unless it is done.

        Args:
            name: Of the stage, unique in the run.
            depends: Everything that decides what it makes, as JSON.
            makes: Its files and folders.
            work: Makes them; takes up what an interrupted call left. Where it refuses, it is begun again next time.
            owns: What is moved aside where the stage changed, if that is more than it makes.

        Returns:
            The stage's key, for what depends on it.
        """
        key = digest([name, depends])
        record = self.folder / "stages" / f"{name.replace(' ', '_')}.json"
        found: dict[str, Any] = json.loads(record.read_text()) if record.is_file() else {}
        same = found.get("key") == key
        if same and found["done"] and all(path.exists() for path in makes):
            self.plan.append(Planned(name, "cached"))
            return key
        if self.dry_run:
            self.plan.append(Planned(name, "to resume" if same and not found["done"] else "to do"))
            return key
        if found and not same:
            self._move_aside(name, found["key"], owns or makes)
        write_json_atomic(record, {"stage": name, "key": key, "done": False})
        say(f"== {name}")
        for line in work().lines:
            say(line)
        write_json_atomic(record, {"stage": name, "key": key, "done": True})
        self.plan.append(Planned(name, "done"))
        return key

    def _move_aside(self, name: str, key: str, makes: Sequence[Path]) -> None:
        """Move what a stage made before to ``replaced/``; unfinished recordings lie beside their datasets."""
        aside = self.folder / "replaced" / f"{name.replace(' ', '_')}-{key[:8]}"
        for path in [place for made in makes for place in (made, made.with_name(made.name + ".recording"))]:
            if path.exists():
                aside.mkdir(parents=True, exist_ok=True)
                target = aside / path.name
                if target.is_dir():
                    shutil.rmtree(target)
                path.replace(target)


def say(line: str) -> None:
    """Tell a person, on standard error, how far the run is."""
    print(line, file=sys.stderr, flush=True)
