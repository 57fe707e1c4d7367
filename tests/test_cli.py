"""The command line: exit codes, where words go, and flags that would be misunderstood."""

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from regrasp.cli import main as cli
from tests.datasets import EpisodeSpec, write_dataset
from tests.stage_runs import Run, make_labels, refused, regrasp, sidecar, snapshot, succeeds, write_run


def test_help_lists_every_command_in_order() -> None:
    for words in ([], ["-h"], ["--help"]):
        out = succeeds(*words)
        places = [out.index(f"  {name} ") for name in cli.COMMANDS]
        assert places == sorted(places)


@pytest.mark.parametrize("command", ["inspect", "returns", "advantages", "relabel"])
def test_every_stage_explains_its_flags(command: str) -> None:
    out = succeeds(*command.split(), "--help")
    assert f"usage: regrasp {command}" in out


def test_the_version_is_said() -> None:
    assert succeeds("--version").startswith("regrasp ")


def test_an_unknown_command_is_named_with_the_nearest() -> None:
    assert "Did you mean 'returns'?" in refused("retruns")
    assert "fit, predict" in refused("value")
    assert "fit, predict" in refused("value", "fti")


@pytest.mark.parametrize(
    "words",
    [
        ("returns", "--tag"),
        ("returns", "--gama", "1"),
        ("returns", "--rollouts", "x"),
        ("returns", "--tag", "x", "--gamma", "much"),
        ("returns", "--tag", "x", "--failure-penalty", "often"),
        ("advantages", "--tag", "x", "--returns", "a", "--values", "b", "--pool", "most"),
        ("relabel", "--tag", "x", "--source", "a", "--lookahead", "2.5"),
    ],
)
def test_a_wrong_flag_exits_with_2_and_speaks_on_stderr(words: tuple[str, ...]) -> None:
    done = regrasp(*words)
    assert done.code == 2
    assert done.err.strip()
    assert not done.out.strip()
    assert "Traceback" not in done.err


def test_a_flag_given_twice_is_refused_since_the_parser_would_drop_one(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    one, other = run.rollouts
    before = snapshot(tmp_path)
    said = refused("returns", "--rollouts", one, "--rollouts", other, "--tag", "x")
    assert "--rollouts is given 2 times" in said
    assert "--tag is given 2 times" in refused("returns", "--rollouts", one, "--tag", "x", "--tag=y")
    assert "2 times" in refused("returns", "--rollouts", one, "--tag", "x", "--dry_run", "--dry-run")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("tag", ["a/b", "../../x", "a\\b", "a\nb", "a\0b", "x" * 201, "ü" * 101])
def test_a_tag_that_cannot_name_a_file_is_refused(tmp_path: Path, tag: str) -> None:
    run = write_run(tmp_path)
    before = snapshot(tmp_path)
    assert "file's name" in refused("returns", *run.flags, "--tag", tag)
    assert "file's name" in refused("advantages", *run.flags, "--returns", tag, "--values", "base", "--tag", "x")
    assert "file's name" in refused("relabel", *run.flags, "--source", tag, "--tag", "x")
    assert "file's name" in refused("returns", *run.flags, "--tag", "x", "--outcomes-tag", tag)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("tag", ["with space", "näh 袋", "N50.q30", "-x", "100%", "it's"])
def test_other_tags_are_kept_as_they_are(tmp_path: Path, tag: str) -> None:
    run = write_run(tmp_path)
    out = succeeds("returns", *run.flags, f"--tag={tag}")
    assert (run.rollouts[0] / f"meta/returns_{tag}.parquet").is_file()
    following = next(line for line in out.splitlines() if line.startswith("Next: "))
    words = shlex.split(following.removeprefix("Next: "))
    assert words[words.index("--returns") + 1] == tag
    assert str(run.rollouts[1]) in words  # a path with a space in it
    succeeds("advantages", *run.flags, f"--returns={tag}", "--values", "base", f"--tag={tag}")
    succeeds("relabel", *run.flags, f"--source={tag}", f"--tag={tag}2", "--positive-fraction", 0.2)


def test_the_empty_tag_is_rlinfs_untagged_file(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    succeeds("returns", *run.flags, "--tag", "")
    assert (run.demos[0] / "meta/returns.parquet").is_file()
    succeeds("advantages", *run.flags, "--returns", "", "--values", "base", "--tag", "")
    succeeds("relabel", *run.flags, "--source", "", "--tag", "x", "--lookahead", 2)
    assert (run.demos[0] / "meta/advantages.parquet").is_file()


def test_a_switch_of_relabel_is_turned_on_and_off_like_any_other(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    make_labels(run)
    both = ["relabel", *run.flags, "--source", "labels", "--dry-run", "--tag", "x"]
    assert "by rule: corrections;" in succeeds(*both, "--no-demos-positive")
    assert "by rule: demonstrations and corrections;" in succeeds(*both, "--demos-positive")
    assert "by rule: demonstrations;" in succeeds(*both, "--corrections-positive", "False")
    assert "2 times" in refused(*both, "--demos-positive", "--no-demos-positive")


def test_symbolic_links_and_relative_paths_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = write_dataset(tmp_path / "data", episodes=[EpisodeSpec(3)])
    (tmp_path / "link").symlink_to(dataset)
    succeeds("returns", "--rollouts", tmp_path / "link", "--tag", "linked")
    monkeypatch.chdir(dataset)
    succeeds("returns", "--rollouts", ".", "--tag", "here")
    assert (
        sidecar(dataset, "returns", "linked")["return"].tolist()
        == sidecar(dataset, "returns", "here")["return"].tolist()
    )


@pytest.mark.parametrize("source", ["--demos", "--rollouts"])
def test_one_dataset_is_not_given_twice(tmp_path: Path, source: str) -> None:
    dataset = write_dataset(tmp_path / "data")
    (tmp_path / "link").symlink_to(dataset)
    for again in (dataset, tmp_path / "data/../data", tmp_path / "link"):
        words = ["--rollouts", dataset, again] if source == "--rollouts" else ["--rollouts", dataset, "--demos", again]
        assert "one folder" in refused("returns", *words, "--tag", "x")


def test_the_next_command_names_the_sidecars_too(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", episodes=[EpisodeSpec(3)])
    beside = tmp_path / "kept here"
    out = succeeds("returns", "--rollouts", dataset, "--tag", "x", "--sidecars", beside)
    assert str(beside) in shlex.split(out.splitlines()[-1])
    assert (beside / "data/returns_x.parquet").is_file()


def test_a_failure_of_ours_exits_with_1_and_debug_shows_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = write_dataset(tmp_path / "data")

    def broken(config: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("regrasp.recap.returns.run", broken)
    done = regrasp("returns", "--rollouts", dataset, "--tag", "x")
    assert done.code == 1
    assert done.err.startswith("InternalError: ZeroDivisionError")
    with pytest.raises(ZeroDivisionError):
        regrasp("returns", "--rollouts", dataset, "--tag", "x", "--debug")


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.ENAMETOOLONG])
def test_what_the_machine_refuses_is_no_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(config: object) -> None:
        raise OSError(number, os.strerror(number), "some/file")

    monkeypatch.setattr("regrasp.recap.returns.run", refused)
    done = regrasp("returns", "--rollouts", tmp_path, "--tag", "x")
    assert done.code == 2
    assert done.err.startswith(f"StorageError: 'some/file' cannot be used ({os.strerror(number)}). Mend: ")


def test_an_interrupt_leaves_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("regrasp.recap.returns.run", interrupted)
    assert regrasp("returns", "--rollouts", tmp_path, "--tag", "x").code == 130


def test_a_closed_pipe_is_no_failure(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data")
    command = [sys.executable, "-m", "regrasp", "returns", "--rollouts", str(dataset), "--tag", "x"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 0
    assert not done.stderr
    assert (dataset / "meta/returns_x.parquet").is_file()


def test_demos_alone_and_rollouts_alone_go_through(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for part in (Run(run.demos, ()), Run((), run.rollouts)):
        make_labels(part, "--overwrite", returns=("--failure-penalty", 10))
        succeeds("relabel", *part.flags, "--source", "labels", "--tag", "x", "--positive-fraction", 0.1)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_without_words_says_what_it_needs(command: str) -> None:
    done = regrasp(*command.split(" "))
    assert done.code == 2
    assert "defect of Regrasp" not in done.err


def test_a_family_of_commands_shows_its_own() -> None:
    done = regrasp("value", "--help")
    assert done.code == 0
    assert "value fit" in done.out
    assert "returns" not in done.out.replace("train a value model on returns", "")


def test_debug_may_stand_before_the_command() -> None:
    assert regrasp("--debug", "returns", "--help").code == 0
