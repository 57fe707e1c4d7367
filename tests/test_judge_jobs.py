"""Jobs: what is understood, and what is refused in one clear sentence."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from regrasp.core.errors import ConfigError
from regrasp.core.outcome import Source
from regrasp.data.dataset import open_dataset
from regrasp.rewards.jobs import Job, episode_jobs, read_jobs, read_rubric
from tests.datasets import EpisodeSpec, write_dataset

GRADES = [{"label": "no", "points": 0}, {"label": "yes", "points": 0.5}]
RUBRIC = [{"action": "grasp", "grading": GRADES}, {"action": "lift", "grading": GRADES}]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def job(**changes: Any) -> dict[str, Any]:
    fields = {"id": "a", "task": "lift it", "videos": ["left.mp4", "right.mp4"]} | changes
    return {name: value for name, value in fields.items() if value is not None}


def test_video_paths_start_from_the_jobs_file(tmp_path: Path):
    (found,) = read_jobs(write(tmp_path / "jobs.jsonl", job(videos=["sub/left.mp4", "/abs/right.mp4"]), ""))
    assert found.videos == (tmp_path / "sub/left.mp4", Path("/abs/right.mp4"))
    assert (found.id, found.task) == ("a", "lift it")


def test_a_rubric_job_holds_its_steps_and_cameras(tmp_path: Path):
    row = job(robot="one arm", cameras=["from the left", "on the wrist"], rubric=RUBRIC)
    (found,) = read_jobs(write(tmp_path / "jobs.jsonl", row), rubric=True)
    assert [step.action for step in found.rubric] == ["grasp", "lift"]
    assert [grade.points for grade in found.rubric[0].grading] == [0.0, 0.5]
    assert (found.robot, found.cameras) == ("one arm", ("from the left", "on the wrist"))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([job(), job()], ["line 2", "'a'", "line 1"]),
        ([job(vidoes=["x.mp4"])], ["unknown field 'vidoes'", "Did you mean 'videos'?"]),
        ([job(rubric=RUBRIC)], ["unknown field 'rubric'", "annotate rubric"]),
        ([job(task=None)], ["'task'", "found nothing"]),
        ([job(task=" ")], ["'task'", "nothing is assumed"]),
        ([job(id=7)], ["'id'", "found 7"]),
        ([job(videos=[])], ["'videos'", "at least one"]),
        ([job(videos="left.mp4")], ["'videos'", "list"]),
        (["{"], ["line 1", "not JSON"]),
        (["[1]"], ["holds a list"]),
        (['{"id": "\\ud800", "task": "t", "videos": ["a"]}'], ["line 1", "'\\ud800' is no character"]),
        (['{"id": "a", "task": "\\ud83d", "videos": ["a"]}'], ["line 1", "no character"]),
        (['{"id": "a", "task": "t", "videos": ["\\udcff.mp4"]}'], ["line 1", "no character"]),
        (['{"id": "a", "task": "t", "id": "b", "videos": ["a"]}'], ["line 1", "'id' is given 2 times"]),
        ([job(videos=["left.mp4", "top.mp4", "left.mp4"])], ["'a' shows", "left.mp4' 2 times"]),
        (['{"id": ' + "9" * 5000 + "}"], ["line 1", "too many digits"]),
        ([""], ["holds no job"]),
    ],
)
def test_a_job_that_cannot_be_understood_is_refused(tmp_path: Path, rows: list[Any], words: list[str]):
    with pytest.raises(ConfigError) as refused:
        read_jobs(write(tmp_path / "jobs.jsonl", *rows))
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rubric": None}, ["'rubric'", "list of steps"]),
        ({"rubric": RUBRIC[:1]}, ["sum to 1", "0.5 = 0.5"]),
        ({"rubric": [*RUBRIC, RUBRIC[0]]}, ["0.5 + 0.5 + 0.5 = 1.5"]),
        ({"rubric": [{"action": "x", "grading": GRADES[:1]}]}, ["step 1", "at least two"]),
        ({"rubric": [{"acton": "x", "grading": GRADES}]}, ["'acton'", "Did you mean 'action'?"]),
        ({"rubric": [{"action": "x", "grading": [*GRADES, GRADES[0]]}]}, ["same points"]),
        ({"rubric": [{"action": "x", "grading": [{"label": "a", "points": 2}, GRADES[0]]}]}, ["from 0 to 1", "2"]),
        ({"rubric": [{"action": "x", "grading": [{"label": "a", "points": True}, GRADES[0]]}]}, ["'points'"]),
        ({"cameras": ["one"]}, ["1 cameras are described", "2 videos"]),
        ({"robot": ""}, ["'robot'"]),
    ],
)
def test_a_rubric_that_cannot_be_marked_is_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as refused:
        read_jobs(write(tmp_path / "jobs.jsonl", job(**({"rubric": RUBRIC} | changes))), rubric=True)
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize("rubric", [False, True])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, rubric: bool):
    (tmp_path / "jobs.jsonl").write_bytes('{"id": "é"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"no text in UTF-8 \(its byte 8"):
        (read_rubric if rubric else read_jobs)(tmp_path / "jobs.jsonl")


def test_a_jobs_text_may_hold_any_character(tmp_path: Path):
    rows = [job(task="näh\u2028袋"), job(id="b", videos=["~nobody-of-this-name/a.mp4"])]
    (tmp_path / "jobs.jsonl").write_text("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    first, second = read_jobs(tmp_path / "jobs.jsonl")
    assert first.task == "näh\u2028袋"
    assert second.videos == (tmp_path / "~nobody-of-this-name/a.mp4",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"rubric": [\n]', "line 2, column 2"),
        ("[]", "holds a list; a rubric file is one JSON object"),
        ('{"rubric": [], "task": "x"}', "unknown field 'task'"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_rubric_file_that_is_none_is_refused(tmp_path: Path, text: str, words: str):
    (tmp_path / "rubric.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_rubric(tmp_path / "rubric.json")


def test_a_missing_jobs_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no jobs file .*nowhere"):
        read_jobs(tmp_path / "nowhere.jsonl")


def test_episodes_become_jobs_with_the_cameras_in_the_order_named(tmp_path: Path):
    cameras = {"observation.images.a": (48, 72), "observation.images.b": (48, 72)}
    path = write_dataset(tmp_path / "d", cameras=cameras, episodes=[EpisodeSpec(4), EpisodeSpec(5, index=7, task="t7")])
    dataset = open_dataset(path, source=Source.ROLLOUT)
    order = ["observation.images.b", "observation.images.a"]
    jobs = episode_jobs(dataset, order, None)
    assert [(job.id, job.task) for job in jobs] == [("d/0", "put the cube in the box"), ("d/7", "t7")]
    assert jobs[1].episode is not None
    assert list(jobs[1].episode.cameras) == order
    assert [job.id for job in episode_jobs(dataset, order, [7])] == ["d/7"]
    with pytest.raises(ConfigError, match="Name the cameras"):
        episode_jobs(dataset, [], None)
    with pytest.raises(ConfigError, match=r"no camera 'observation\.images\.c'.*Did you mean"):
        episode_jobs(dataset, ["observation.images.c"], None)
    with pytest.raises(ConfigError, match=r"shows 'observation\.images\.a' 2 times"):
        episode_jobs(dataset, ["observation.images.a"] * 2, None)
    with pytest.raises(ConfigError, match="no episodes 3"):
        episode_jobs(dataset, order, [3])


def test_another_task_or_another_file_is_another_job(tmp_path: Path):
    (tmp_path / "left.mp4").write_bytes(b"1")
    (one,) = read_jobs(write(tmp_path / "jobs.jsonl", job()))
    first = one.digest
    (same,) = read_jobs(write(tmp_path / "again.jsonl", job()))
    assert same.digest == first
    (other,) = read_jobs(write(tmp_path / "jobs.jsonl", job(task="drop it")))
    assert other.digest != first
    (tmp_path / "left.mp4").write_bytes(b"12")
    assert same.digest != first
    (tmp_path / "left.mp4").write_bytes(b"2")  # of the size that it had
    assert same.digest != first
    (tmp_path / "left.mp4").write_bytes(b"1")
    assert same.digest == first


def test_a_name_that_is_no_text_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is no text in Unicode"):
        Job(id="a", task="t", videos=(tmp_path / os.fsdecode(b"caf\xe9.mp4"),))
