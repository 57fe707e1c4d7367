"""The set-up script, with stand-ins for uv and for the Pythons of the machine: what is tested is the script itself."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = (
    "sh",
    "cat",
    "cp",
    "cut",
    "dirname",
    "flock",
    "grep",
    "head",
    "ln",
    "mkdir",
    "mv",
    "paste",
    "perl",
    "rm",
    "sed",
)
TOOLS += ("sleep", "sort", "tr")

PYTHON = """#!/bin/sh
case "$*" in
    *implementation*) echo "{version} {path}" ;;
    *"sys.exit"*) exit {too_old} ;;
    *sha256*) echo "key of {version}"; cat pyproject.toml ;;
    *-m\\ venv*) exit 1 ;;
    *--target*) {pip} ;;
    *--version*) echo "Python {version}.0" ;;
esac
"""
"""Answers what the script asks of a Python: its version, whether it is new enough, the key of .venv, and pip."""

UV = """#!/bin/sh
echo "$*" >>"$UV_LOG"
case "$*" in
    "pip install --help") echo "--group GROUP" ;;
    "pip install"*) sleep "${UV_SLEEP:-0}"; exit "${UV_INSTALL_EXIT:-0}" ;;
    "venv --quiet --python 3.12 "*)
        [ -n "${UV_FETCHED:-}" ] || { echo "uv: no download is possible" >&2; exit 2; }
        mkdir -p .venv/bin; cp "$UV_FETCHED" .venv/bin/python ;;
    venv*) mkdir -p .venv/bin; ln -s "$4" .venv/bin/python ;;
esac
"""
"""Writes down what it was asked to do; makes a .venv whose Python is the one it was given."""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Machine:
    """A project folder with a space in its name, and a PATH and a home that hold nothing but what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.project, self.bin, self.home = folder / "my project", folder / "bin", folder / "home"
        for place in (self.project / "scripts", self.bin, self.home):
            place.mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup.sh", self.project / "scripts")
        (self.project / "pyproject.toml").write_text("[project]\n")
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        self.log = folder / "uv.log"
        self.environment = {"PATH": str(self.bin), "HOME": str(self.home), "UV_LOG": str(self.log)}

    def python(self, path: Path, version: str, pip: str = "exit 1") -> Path:
        too_old = int(tuple(map(int, version.split("."))) < (3, 12))
        return executable(path, PYTHON.format(version=version, path=path, too_old=too_old, pip=pip))

    def uv(self, path: Path | None = None) -> Path:
        return executable(path or self.bin / "uv", UV)

    def start(self, **environment: str) -> subprocess.Popen[str]:
        command = ["sh", "scripts/setup.sh"]
        environment = self.environment | environment
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.project, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def setup(self, **environment: str) -> tuple[int, str]:
        """Exit code, and what was said."""
        process = self.start(**environment)
        out, error = process.communicate(timeout=60)
        return process.returncode, out + error

    def asked(self) -> list[str]:
        """What uv was asked to make and to install, in order."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if "--help" not in line]

    @property
    def chosen(self) -> Path:
        return (self.project / ".venv/bin/python").readlink()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("variable", ["PYENV_ROOT", "HOME"])
def test_a_python_hidden_in_pyenvs_versions_folder_is_found(machine: Machine, variable: str):
    machine.uv()
    machine.python(machine.bin / "python3", "3.10")
    executable(machine.bin / "python3.12", "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    pyenv = machine.home / ".pyenv" if variable == "HOME" else machine.home / "elsewhere"
    machine.python(pyenv / "versions/3.9.18/bin/python3", "3.9")
    hidden = machine.python(pyenv / "versions/3.12.1/bin/python3", "3.12")
    machine.python(pyenv / "versions/3.13.0/bin/python3", "3.13")
    code, said = machine.setup(**({"PYENV_ROOT": str(pyenv)} if variable == "PYENV_ROOT" else {}))
    assert code == 0, said
    assert machine.chosen == hidden
    install = machine.asked()[-1]
    assert "--constraint constraints.txt" in install
    assert "--editable .[metaworld,pusht,judge,ray]" in install


def test_the_path_comes_before_pyenv_and_312_before_313(machine: Machine):
    machine.uv()
    machine.python(machine.bin / "python3", "3.13")
    first = machine.python(machine.bin / "python3.12", "3.12")
    machine.python(machine.home / ".pyenv/versions/3.12.1/bin/python3", "3.12")
    assert machine.setup()[0] == 0
    assert machine.chosen == first


def test_without_a_new_enough_python_uv_fetches_one(machine: Machine, tmp_path: Path):
    machine.uv()
    machine.python(machine.bin / "python3", "3.11")
    fetched = machine.python(tmp_path / "fetched", "3.12")
    code, said = machine.setup(UV_FETCHED=str(fetched))
    assert code == 0, said
    assert machine.asked()[0].startswith("venv --quiet --python 3.12 ")


def test_where_no_python_can_be_had_one_paragraph_says_what_to_install(machine: Machine):
    machine.uv()
    machine.python(machine.bin / "python3", "3.11")
    machine.python(machine.home / ".pyenv/versions/3.8.2/bin/python3", "3.8")
    code, said = machine.setup()
    assert code == 2
    assert "no download is possible" in said
    paragraph = said.splitlines()[-1]
    for words in ("needs Python 3.12 or newer", "3.11 3.8", "apt install python3.12", "brew install", "pyenv install"):
        assert words in paragraph
    assert not (machine.project / ".venv").exists()


def test_an_environment_that_is_up_to_date_is_left_alone(machine: Machine):
    machine.uv()
    machine.python(machine.bin / "python3.12", "3.12")
    assert machine.setup()[0] == 0
    before = machine.asked()
    assert machine.setup() == (0, "")
    assert machine.asked() == before


def test_a_changed_pyproject_is_installed_into_the_same_environment(machine: Machine):
    machine.uv()
    machine.python(machine.bin / "python3.12", "3.12")
    machine.setup()
    (machine.project / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert machine.setup()[0] == 0
    assert [line.split()[0] for line in machine.asked()] == ["venv", "pip", "pip"]


def test_a_set_up_that_failed_or_was_killed_is_made_anew(machine: Machine):
    machine.uv()
    machine.python(machine.bin / "python3.12", "3.12")
    code, said = machine.setup(UV_INSTALL_EXIT="1")
    assert code == 2
    assert "could not be installed" in said
    killed = machine.start(UV_SLEEP="30")
    while len(machine.asked()) < 4:
        time.sleep(0.02)
    os.killpg(killed.pid, 9)
    killed.communicate()
    assert machine.setup()[0] == 0
    assert [line.split()[0] for line in machine.asked()] == ["venv", "pip"] * 3


def test_an_environment_whose_python_is_gone_is_made_anew(machine: Machine):
    machine.uv()
    python = machine.python(machine.bin / "python3.12", "3.12")
    machine.setup()
    python.unlink()
    other = machine.python(machine.bin / "python3.13", "3.13")
    assert machine.setup()[0] == 0
    assert machine.chosen == other


def test_two_set_ups_at_once_take_turns(machine: Machine):
    if not (shutil.which("flock") or shutil.which("perl")):
        pytest.skip("this machine has neither flock nor perl")
    machine.uv()
    machine.python(machine.bin / "python3.12", "3.12")
    both = [machine.start(UV_SLEEP="0.5") for _ in range(2)]
    for process in both:
        process.communicate(timeout=60)
    assert [process.returncode for process in both] == [0, 0]
    assert [line.split()[0] for line in machine.asked()] == ["venv", "pip"]


def test_uv_is_found_in_the_home_folder_and_a_broken_one_is_passed_over(machine: Machine):
    executable(machine.bin / "uv", "#!/bin/sh\nexit 127\n")
    machine.uv(machine.home / ".local/bin/uv")
    machine.python(machine.bin / "python3.12", "3.12")
    assert machine.setup()[0] == 0
    assert len(machine.asked()) == 2


def test_uv_is_installed_into_the_project_by_pip_where_venv_is_missing(machine: Machine, tmp_path: Path):
    source = machine.uv(tmp_path / "uv-from-pip")
    machine.python(machine.bin / "python3", "3.8")
    machine.python(machine.home / ".pyenv/versions/3.13.0/bin/python3", "3.13", pip="exit 1")
    machine.python(
        machine.home / ".pyenv/versions/3.12.0/bin/python3", "3.12", pip=f'mkdir -p .uv/bin; cp "{source}" .uv/bin/uv'
    )
    code, said = machine.setup()
    assert code == 0, said
    assert (machine.project / ".uv/bin/uv").exists()


def test_where_uv_cannot_be_had_the_message_says_how_to_get_it(machine: Machine):
    machine.python(machine.bin / "python3", "3.12")
    code, said = machine.setup()
    assert code == 2
    assert "pip install uv" in said.splitlines()[-1]


def test_constraints_hold_names_and_versions_only():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][A-Za-z0-9.]*", line)] == []
    assert lines == sorted(lines)
