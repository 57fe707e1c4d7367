"""Running stages as a user does, on small runs of a demonstration dataset and two rollout datasets."""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from regrasp.cli.main import main
from tests.datasets import EpisodeSpec, write_dataset

TASKS = ("fold the towel", "open the drawer", "näh 袋 🧵")


@dataclass(frozen=True)
class Done:
    """What a command left."""

    code: int
    out: str
    err: str


def regrasp(*words: object) -> Done:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return Done(code, out.getvalue(), err.getvalue())


def succeeds(*words: object) -> str:
    """Run a command that has to succeed; what it printed."""
    done = regrasp(*words)
    assert done.code == 0, done.err
    return done.out


def refused(*words: object) -> str:
    """Run a command that has to be refused as a user's mistake, in one paragraph; the paragraph."""
    done = regrasp(*words)
    assert done.code == 2, (done.code, done.out, done.err)
    paragraphs = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    assert len(paragraphs) == 1, done.err
    assert "Traceback" not in done.err
    return paragraphs[0]


@dataclass(frozen=True)
class Run:
    """The datasets of a run."""

    demos: tuple[Path, ...]
    rollouts: tuple[Path, ...]

    @property
    def datasets(self) -> tuple[Path, ...]:
        """All of them."""
        return (*self.demos, *self.rollouts)

    @property
    def flags(self) -> list[object]:
        """How a command names them."""
        demos = ["--demos", *self.demos] if self.demos else []
        return [*demos, *(["--rollouts", *self.rollouts] if self.rollouts else [])]


def episodes(count: int, seed: int, *, tasks: Sequence[str] = TASKS, corrections: bool = True) -> list[EpisodeSpec]:
    """Episodes of 1 to 30 frames, the tasks in turn, half of them failures; every fourth has a correction."""
    random = np.random.default_rng(seed)
    return [
        EpisodeSpec(
            int(random.integers(1, 31)),
            task=tasks[number % len(tasks)],
            success=bool(random.random() < 0.5),
            interventions=((2, 6),) if corrections and number % 4 == 1 else (),
        )
        for number in range(count)
    ]


def write_run(root: Path, **options: Any) -> Run:
    """Write a demonstration dataset and two rollout datasets, with values tagged ``base``."""
    plain = {name: value for name, value in options.items() if name != "success_column"}
    demo = write_dataset(root / "demo", episodes=episodes(6, 1, corrections=False), success_column=None, **plain)
    first = write_dataset(root / "first", episodes=episodes(12, 2), **options)
    second = write_dataset(root / "second rollouts", episodes=episodes(9, 3), **options)
    for seed, dataset in enumerate((demo, first, second)):
        write_values(dataset, "base", seed=seed)
    return Run((demo,), (first, second))


def keys(dataset: Path) -> dict[str, np.ndarray]:
    """The (episode_index, frame_index) rows of a dataset, sorted."""
    names = ["episode_index", "frame_index"]
    table = pa.concat_tables([pq.read_table(file, columns=names) for file in sorted(dataset.glob("data/*/*.parquet"))])
    table = table.sort_by([(name, "ascending") for name in names])
    return {name: table[name].to_numpy().astype(np.int64) for name in names}


def write_values(dataset: Path, tag: str, *, seed: int = 0, choices: Sequence[float] | None = None) -> None:
    """Write made-up values as another tool would, without provenance; only ``choices`` make ties."""
    rows, random = keys(dataset), np.random.default_rng(seed)
    count = len(rows["episode_index"])
    value = -random.random(count) if choices is None else random.choice(choices, count)
    table = pa.table({**rows, "value": value.astype(np.float32)})
    pq.write_table(table, dataset / f"meta/values_{tag}.parquet")


def sidecar(dataset: Path, kind: str, tag: str) -> dict[str, np.ndarray]:
    """The columns of a sidecar."""
    folder = dataset / "meta" if (dataset / "meta").is_dir() else dataset
    table = pq.read_table(folder / f"{kind}_{tag}.parquet")
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def snapshot(*folders: Path) -> dict[str, bytes]:
    """Every file and folder under some folders, with the files' contents."""
    found = sorted(path for folder in folders for path in folder.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else b"folder" for path in found}


def make_labels(run: Run, *flags: object, returns: Sequence[object] = (), tag: str = "labels") -> str:
    """Make returns and labels; what ``advantages`` printed."""
    succeeds("returns", *run.flags, "--tag", "base", "--overwrite", *returns)
    return succeeds("advantages", *run.flags, "--returns", "base", "--values", "base", "--tag", tag, *flags)
