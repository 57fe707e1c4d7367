"""What holds for the whole code: its layers, what it costs to start, and the shape of its parts."""

import ast
import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regrasp.cli.main import COMMANDS
from tests.datasets import EpisodeSpec, write_dataset

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
BIN = Path(sys.executable).parent
TABULAR = ["inspect", "returns", "advantages", "relabel"]
HELP_CPU_S = 0.7
WATCHED = """
import sys
from regrasp.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
print("LOADED", *sorted({"torch", "lerobot", "accelerate"} & sys.modules.keys()))
sys.exit(code)
"""
"""`regrasp` with its arguments, and then which of the slow packages it has loaded."""


def run_watched(*arguments: str) -> list[str]:
    """Run `regrasp`, and give the slow packages that it loaded."""
    done = subprocess.run([sys.executable, "-c", WATCHED, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"regrasp {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()[-1].split()[1:]


def cpu_seconds(command: Sequence[str]) -> float:
    """User and system time of one run of a command that succeeds; the first may have to compile what it imports."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of a file, nested ones included."""
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def public_definitions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Public classes, public functions, and public methods of public classes."""
    nodes: list[ast.stmt] = list(ast.parse(file.read_text(), str(file)).body)
    for node in nodes:
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not named or node.name.startswith("_") or "override" in map(ast.unparse, node.decorator_list):
            continue
        yield node
        if isinstance(node, ast.ClassDef):
            nodes.extend(node.body)


def place(file: Path, node: ast.stmt) -> str:
    """Where a definition stands, for a message."""
    return f"{file.relative_to(ROOT)}:{node.lineno} {getattr(node, 'name', '')}"


@pytest.fixture(scope="module")
def labelled_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The commands of the tabular stages over one tiny dataset, in the order in which they can run."""
    dataset = tmp_path_factory.mktemp("architecture") / "pick"
    episodes = [EpisodeSpec(12), EpisodeSpec(9, success=False)]
    write_dataset(dataset, episodes=episodes, camera_kind="none")
    columns = {
        "episode_index": np.repeat(np.arange(2), [12, 9]),
        "frame_index": np.concatenate([np.arange(12), np.arange(9)]),
        "value": np.linspace(-0.9, -0.1, 21, dtype=np.float32),
    }
    pq.write_table(pa.table(columns), dataset / "meta" / "values_base.parquet")
    rollouts = ["--rollouts", str(dataset)]
    labels = ["--returns", "base", "--values", "base", "--tag", "base", "--lookahead", "5"]
    return {
        "inspect": ["inspect", str(dataset)],
        "returns": ["returns", *rollouts, "--tag", "base"],
        "advantages": ["advantages", *rollouts, *labels],
        "relabel": ["relabel", *rollouts, "--source", "base", "--tag", "half", "--positive-fraction", "0.5"],
    }


def test_imports_point_down_and_siblings_do_not_import_each_other():
    lint = [BIN / "lint-imports", "--no-cache"]
    done = subprocess.run(lint, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["", *TABULAR])
def test_help_answers_at_once(command: str):
    line = [str(BIN / "regrasp"), *command.split(), "--help"]
    tries: list[float] = []
    while len(tries) < 5 and min(tries, default=np.inf) >= HELP_CPU_S:  # a neighbour on the core makes one run dearer
        tries.append(cpu_seconds(line))
    assert min(tries) < HELP_CPU_S, f"`regrasp {command} --help` took {min(tries):.2f} s of CPU"


@pytest.mark.parametrize("command", ["", *TABULAR])
def test_help_loads_no_torch_and_no_lerobot(command: str):
    assert run_watched(*command.split(), "--help") == []


def test_tabular_stages_load_no_torch_and_no_lerobot(labelled_run: dict[str, list[str]]):
    loaded = {stage: run_watched(*arguments) for stage, arguments in labelled_run.items()}
    assert loaded == {stage: [] for stage in TABULAR}


@pytest.mark.parametrize("command", COMMANDS)
def test_settings_are_frozen_and_given_by_name(command: str):
    module, name, _ = COMMANDS[command]
    settings = getattr(importlib.import_module(module), name)
    fields = dataclasses.fields(settings)
    assert settings.__dataclass_params__.frozen
    assert [field.name for field in fields if not field.kw_only] == []


def test_functions_have_at_most_50_lines():
    nodes = [(file, node) for file in SOURCES for node in functions(file)]
    assert [place(file, node) for file, node in nodes if (node.end_lineno or 0) - node.lineno >= 50] == []
    assert len(nodes) > 100


def test_files_have_at_most_400_lines():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in SOURCES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_files_are_named_for_what_they_hold():
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
    assert [str(file) for file in SOURCES if vague & {part.removesuffix(".py") for part in file.parts}] == []


def test_public_definitions_say_what_the_caller_gets():
    nodes = [(file, node) for file in SOURCES for node in public_definitions(file)]
    assert [place(file, node) for file, node in nodes if not ast.get_docstring(node)] == []


def test_code_leaves_nothing_for_later():
    later = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    files = [*SOURCES, *sorted((ROOT / "examples").rglob("*.py"))]
    assert [str(file) for file in files if any(word in file.read_text() for word in later)] == []
