"""What is left of a stage that is killed, runs out of space, or is not alone: the old file or the new one, whole."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.datasets import EpisodeSpec, write_dataset
from tests.stage_runs import TASKS, snapshot, succeeds, write_values

FRAMES = 200_000
STAGES = ("returns", "advantages", "relabel")


@dataclass(frozen=True)
class Workplace:
    """Two datasets, kept apart from their sidecars, which can be put back to how they were."""

    datasets: tuple[Path, Path]
    before: Path
    """Sidecars of each stage under the tag ``x``, made with one config."""
    after: Path
    """The same made with another."""

    def command(self, stage: str, beside: Path, *, new: bool) -> list[str]:
        """The command that writes the tag ``x`` of a stage into ``beside``, with the one config or the other."""
        words: dict[str, list[object]] = {
            "returns": ["--tag", "x", "--gamma", 0.99 if new else 1],
            "advantages": ["--returns", "base", "--values", "base", "--tag", "x", "--lookahead", 20 if new else 50],
            "relabel": ["--source", "base", "--tag", "x", "--lookahead", 10 if new else 30],
        }
        flags = ["--rollouts", *self.datasets, "--sidecars", beside, "--overwrite"]
        return [str(word) for word in [sys.executable, "-m", "regrasp", stage, *words[stage], *flags]]

    def fresh(self, folder: Path, stage: str) -> Path:
        """A copy of the sidecars as they are before ``stage`` is run with the other config."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.before / stage, folder)
        return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return build(tmp_path_factory.mktemp("faults"), {"large": 98, "small": 2}, length=2000)


def build(root: Path, counts: dict[str, int], *, length: int) -> Workplace:
    datasets = []
    for name, count in counts.items():
        specs = [
            EpisodeSpec(length, task=TASKS[n % 2], success=n % 3 > 0, interventions=((5, 9),)) for n in range(count)
        ]
        datasets.append(write_dataset(root / name, episodes=specs, state_dim=2, stats=False))
        write_values(datasets[-1], "base", seed=count)
    place = Workplace((datasets[0], datasets[1]), root / "before", root / "after")
    base = root / "base"
    for dataset in datasets:
        (base / dataset.name).mkdir(parents=True)
        (dataset / "meta/values_base.parquet").rename(base / dataset.name / "values_base.parquet")
    flags = ["--rollouts", *datasets, "--sidecars", base]
    succeeds("returns", *flags, "--tag", "base")
    succeeds("advantages", *flags, "--returns", "base", "--values", "base", "--tag", "base")
    for stage in STAGES:
        for kind, new in ((place.before, False), (place.after, True)):
            shutil.copytree(base if kind is place.before else place.before / stage, kind / stage)
            succeeds(*place.command(stage, kind / stage, new=new)[3:])
    return place


def names_and_bytes(folder: Path) -> dict[str, bytes]:
    return {str(Path(path).relative_to(folder)): content for path, content in snapshot(folder).items()}


def check_old_or_new(place: Workplace, stage: str, beside: Path) -> int:
    """Every file is the previous or the new one, and there is no other; how many are new."""
    found = names_and_bytes(beside)
    old, new = names_and_bytes(place.before / stage), names_and_bytes(place.after / stage)
    assert found.keys() == new.keys() == old.keys()
    mixed = [name for name in found if found[name] not in (old[name], new[name])]
    assert not mixed
    return sum(found[name] != old[name] for name in found)


def check_rerun_gives_the_same(place: Workplace, stage: str, beside: Path) -> None:
    subprocess.run(place.command(stage, beside, new=True), check=True, stdout=subprocess.DEVNULL)
    assert names_and_bytes(beside) == names_and_bytes(place.after / stage)


def killed_after(seconds: float, command: list[str]) -> int:
    """Run a command and kill it; 137, or 0 where it was over before.

    A shell counts the time: this process, large from other tests, may itself take longer to start one than it lives.
    """
    script = f'"$@" & sleep {seconds:.3f}; kill -9 $! 2>/dev/null; wait $!'
    return subprocess.run(["sh", "-c", script, "sh", *command], check=False, stdout=subprocess.DEVNULL).returncode


def kill_at_random(place: Workplace, stage: str, beside: Path, kills: int) -> None:
    """Kill the command again and again at any moment of its life, most often while it works and writes."""
    chance = random.Random(stage)
    place.fresh(beside, stage)
    lives = []
    for _ in range(2):  # the first may have to compile what the second finds compiled
        place.fresh(beside, stage)
        start = time.monotonic()
        check_rerun_gives_the_same(place, stage, beside)
        lives.append(time.monotonic() - start)
    life, codes = min(lives), []
    for kill in range(kills):
        place.fresh(beside, stage)
        moment = life * (chance.uniform(0.3, 1.05) if kill else 0.2)  # the first while it surely lives
        codes.append(killed_after(moment, place.command(stage, beside, new=True)))
        check_old_or_new(place, stage, beside)
    assert 128 + signal.SIGKILL in codes, (lives, codes)
    check_rerun_gives_the_same(place, stage, beside)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_killed_at_any_moment_leaves_old_or_new_files_alone(
    place: Workplace, stage: str, tmp_path: Path
) -> None:
    kill_at_random(place, stage, tmp_path / "beside", kills=4)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_killed_a_hundred_times_leaves_old_or_new_files_alone(
    place: Workplace, stage: str, tmp_path: Path
) -> None:
    kill_at_random(place, stage, tmp_path / "beside", kills=100)


KILLED_AT_A_CALL = """
import json, os, signal, sys, tyro
import regrasp.recap.advantages
from regrasp.cli.main import main
def deadly(name):
    real = getattr(os, name)
    def call(*arguments, **named):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    setattr(os, name, call)
for name in ("link", "replace", "fsync", "unlink"):
    deadly(name)
codes = []
for left, words in json.load(sys.stdin):
    child = os.fork()
    if not child:
        os.dup2(2, 1)
        os._exit(main(words))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""
"""Run ``regrasp`` for each (N, words): killed just before its N-th call that names, renames or flushes a file."""


def run_killed_at(commands: Sequence[tuple[int, list[str]]]) -> list[int]:
    """The exit codes of commands, each killed before the call of its number; 0 kills none."""
    words = [sys.executable, "-c", KILLED_AT_A_CALL]
    done = subprocess.run(words, input=json.dumps(commands), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_stage_killed_between_any_two_steps_of_publishing_is_mended_by_running_it_again(tmp_path: Path) -> None:
    place = build(tmp_path / "place", {"one": 4, "two": 2}, length=60)
    steps = range(1, 41)
    besides = [place.fresh(tmp_path / f"{step}", "advantages") for step in steps]
    commands = [place.command("advantages", beside, new=True)[3:] for beside in besides]
    codes = run_killed_at(list(zip(steps, commands, strict=True)))
    calls = codes.index(0)
    assert codes == [-signal.SIGKILL] * calls + [0] * (len(codes) - calls)
    assert calls > 12  # four files: each is flushed, named twice and renamed at least
    seen = []
    for beside in besides:
        # the new file takes the old one's place through a second name: between the two there are both
        second_names = list(beside.rglob(".*.publish"))
        assert len(second_names) <= 1
        for path in second_names:
            path.rename(tmp_path / path.name)
        seen.append(check_old_or_new(place, "advantages", beside))
        for path in second_names:
            (tmp_path / path.name).rename(path)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 4)  # labels and the mixture file of two datasets
    assert run_killed_at([(0, words) for words in commands]) == [0] * len(commands)
    assert all(names_and_bytes(beside) == names_and_bytes(place.after / "advantages") for beside in besides)


def run_all(commands: Sequence[list[str]], preexec: Callable[[], None] | None = None) -> list[tuple[int, str]]:
    """Run commands at once; their exit codes and what they said on standard error."""
    children = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=preexec)
        for command in commands
    ]
    said = [child.communicate()[1] for child in children]
    return [(child.returncode, text) for child, text in zip(children, said, strict=True)]


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_with_one_config_write_one_tag(place: Workplace, stage: str, tmp_path: Path) -> None:
    beside = place.fresh(tmp_path / "beside", stage)
    done = run_all([place.command(stage, beside, new=True)] * 2)
    assert done == [(0, ""), (0, "")]
    assert names_and_bytes(beside) == names_and_bytes(place.after / stage)


@pytest.mark.parametrize("stage", STAGES)
def test_of_two_processes_with_different_configs_one_is_refused(place: Workplace, stage: str, tmp_path: Path) -> None:
    beside = place.fresh(tmp_path / "beside", stage)
    for path in beside.glob(f"*/{'returns' if stage == 'returns' else 'advantages'}_x.parquet"):
        path.unlink()
    without = [word for word in place.command(stage, beside, new=True) if word != "--overwrite"]
    other = [word for word in place.command(stage, beside, new=False) if word != "--overwrite"]
    done = run_all([without, other])
    assert sorted(code for code, _ in done) == [0, 2]
    refusal = next(said for code, said in done if code == 2)
    assert refusal.startswith("SidecarError: ")
    assert "--overwrite" in refusal
    winner = place.after if done[0][0] == 0 else place.before
    found, expected = names_and_bytes(beside), names_and_bytes(winner / stage)
    assert found.keys() == expected.keys()
    assert all(found[name] == expected[name] for name in found if name.endswith(".parquet"))


def test_two_processes_that_overwrite_do_not_mix_their_files(place: Workplace, tmp_path: Path) -> None:
    beside = place.fresh(tmp_path / "beside", "advantages")
    done = run_all([place.command("advantages", beside, new=new) for new in (True, False)])
    assert [code for code, _ in done] == [0, 0]
    assert check_old_or_new(place, "advantages", beside) in (0, 4)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("room", [1, 20_000, 700_000])
def test_a_full_disk_is_said_and_leaves_everything_as_it_was(
    place: Workplace, stage: str, room: int, tmp_path: Path
) -> None:
    beside = place.fresh(tmp_path / "beside", stage)
    largest = max(path.stat().st_size for path in (place.after / stage).rglob("*_x.parquet"))
    limit = min(room, largest - 1)

    def no_more() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    before = names_and_bytes(beside)
    [(code, said)] = run_all([place.command(stage, beside, new=True)], no_more)
    assert code == 2
    assert said.startswith("StorageError: No space is left")
    assert said.count("\n") == 1
    assert names_and_bytes(beside) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_small_file_system_that_is_full_is_said(place: Workplace, tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        (mounted / "filler").write_bytes(bytes((1 << 20) - 8192))
        [(code, said)] = run_all([place.command("returns", mounted, new=True)])
        assert code == 2
        assert "No space is left" in said
        assert [path.name for path in mounted.rglob("*")] == ["filler"]
        subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
        [(code, said)] = run_all([place.command("returns", mounted, new=True)])
        assert code == 2
        assert "cannot be written" in said
        assert "--sidecars" in said
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_a_dataset_that_cannot_be_written_keeps_its_sidecars_elsewhere(place: Workplace, tmp_path: Path) -> None:
    before = snapshot(*place.datasets)
    beside = place.fresh(tmp_path / "beside", "returns")
    check_rerun_gives_the_same(place, "returns", beside)
    rows = pq.read_metadata(beside / "large/returns_x.parquet").num_rows
    assert rows + pq.read_metadata(beside / "small/returns_x.parquet").num_rows == FRAMES
    assert snapshot(*place.datasets) == before
