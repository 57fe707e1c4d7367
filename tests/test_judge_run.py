"""Judging many jobs: bounded, overlapped, resumed after any end, and never paid twice."""

import asyncio
import json
import os
import resource
import signal as signals
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from regrasp.core.errors import ConfigError, StorageError
from regrasp.rewards.bench import LocalBench
from regrasp.rewards.dense import DenseSignal
from regrasp.rewards.engine import EngineError, EngineUnavailable, MissingCapability, Reply, Request, RequestTooLong
from regrasp.rewards.jobs import Job
from regrasp.rewards.judging import Signal
from regrasp.rewards.profiles import read_profile
from regrasp.rewards.rows import RowFile, read_rows
from regrasp.rewards.run import RunReport, judge_on
from regrasp.rewards.terminal import TerminalSignal
from tests.judge_engine import ABLE, ScriptedEngine, bright_is_good, write_gray

PROFILE = read_profile("generic")
TERMINAL = TerminalSignal(ask=PROFILE.ask("terminal"))


def write_jobs(folder: Path, count: int) -> list[Job]:
    """Jobs of eight short videos in turn, from dark to bright."""
    videos = [write_gray(folder / f"{n}.mp4", [30 * n + 20] * 4) for n in range(min(count, 8))]
    return [Job(id=f"job {n}", task="shine", videos=(videos[n % 8],)) for n in range(count)]


def judge(
    jobs: list[Job], path: Path, engine: ScriptedEngine, signal: Signal = TERMINAL, concurrency: int = 4
) -> RunReport:
    with RowFile(path) as rows:
        return asyncio.run(judge_on(LocalBench(signal, engine, PROFILE, concurrency), jobs, rows))


def lines(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines())


def test_every_job_gets_one_row_that_says_who_judged_it(tmp_path: Path):
    jobs = write_jobs(tmp_path, 6)
    report = judge(jobs, tmp_path / "rows.jsonl", ScriptedEngine())
    rows = {row["id"]: row for row in read_rows(tmp_path / "rows.jsonl")}
    assert sorted(rows) == [job.id for job in jobs]
    assert (report.judged, report.repeated, report.failed) == (6, 0, {})
    row = rows["job 5"]
    assert (row["engine"], row["model"], row["engine_version"]) == ("scripted", "bright", "1")
    assert (row["profile"], row["profile_digest"]) == ("generic@1", PROFILE.digest)
    assert (row["frames"], row["calls"], row["invalid"], row["flags"]) == ([[4]], 1, False, [])
    assert [rows[f"job {n}"]["expected_score"] for n in range(6)] == sorted(r["expected_score"] for r in rows.values())


def test_calls_are_bounded_and_run_together(tmp_path: Path):
    engine = ScriptedEngine(delay_s=0.02)
    judge(write_jobs(tmp_path, 20), tmp_path / "rows.jsonl", engine, concurrency=3)
    assert engine.most_at_once == 3
    one = ScriptedEngine()
    judge(write_jobs(tmp_path, 4), tmp_path / "one.jsonl", one, concurrency=1)
    assert one.most_at_once == 1


def test_windows_of_one_job_run_together_too(tmp_path: Path):
    job = Job(id="long", task="shine", videos=(write_gray(tmp_path / "long.mp4", [200] * 400, fps=5),))  # 80 s
    engine = ScriptedEngine(delay_s=0.02)
    judge([job], tmp_path / "rows.jsonl", engine, DenseSignal(ask=PROFILE.ask("dense")), concurrency=3)
    assert (len(engine.asked), engine.most_at_once) == (8, 3)


def test_frames_are_prepared_while_the_engine_answers(tmp_path: Path):
    engine = ScriptedEngine(delay_s=0.1)
    report = judge(write_jobs(tmp_path, 12), tmp_path / "rows.jsonl", engine, concurrency=2)
    assert report.wall_s >= 0.6  # 12 calls, two at a time
    assert report.idle_s < 0.5 * report.wall_s


def test_a_second_run_asks_nothing_and_changes_nothing(tmp_path: Path):
    jobs, path = write_jobs(tmp_path, 5), tmp_path / "rows.jsonl"
    judge(jobs[:3], path, ScriptedEngine())
    judge(jobs, path, engine := ScriptedEngine())
    assert sorted(request.id for request in engine.asked) == ["job 3", "job 4"]
    before = path.read_bytes()
    report = judge(jobs, path, again := ScriptedEngine())
    assert (again.asked, report.repeated, path.read_bytes()) == ([], 5, before)


def test_other_settings_another_model_and_another_task_are_judged_anew(tmp_path: Path):
    jobs, path = write_jobs(tmp_path, 2), tmp_path / "rows.jsonl"
    judge(jobs, path, ScriptedEngine())
    assert judge(jobs, path, ScriptedEngine(), replace(TERMINAL, with_rationale=True)).judged == 2
    assert judge(jobs, path, ScriptedEngine(model="other")).judged == 2
    assert judge([replace(jobs[0], task="glow")], path, ScriptedEngine()).judged == 1
    assert len(lines(path)) == 7


@pytest.mark.parametrize(("cut", "again"), [(1, 0), (2, 1), (30, 1), (200, 1)])
def test_a_torn_last_line_is_dropped_and_judged_again(tmp_path: Path, cut: int, again: int):
    jobs, path = write_jobs(tmp_path, 4), tmp_path / "rows.jsonl"
    judge(jobs, path, ScriptedEngine(), concurrency=1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert judge(jobs, path, ScriptedEngine(), concurrency=1).judged == again
    assert path.read_bytes() == whole


@pytest.mark.parametrize("left", [1, 7, 60])
def test_a_torn_first_line_is_dropped_too(tmp_path: Path, left: int):
    jobs, path = write_jobs(tmp_path, 1), tmp_path / "rows.jsonl"
    judge(jobs, path, ScriptedEngine())
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    assert judge(jobs, path, ScriptedEngine()).judged == 1
    assert path.read_bytes() == whole


def test_two_processes_do_not_write_one_file(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    with RowFile(path), pytest.raises(StorageError, match="Another process"), RowFile(path):
        pass
    assert not path.exists()  # nothing was judged


@pytest.mark.parametrize(
    "content",
    [b"dear diary\n", b"dear diary", b"\x00\n\x00 ftyp", b'{"id": "a", "task": "t"}', b'{"id": "a"}\n{"id": "b"}'],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes):
    (tmp_path / "notes.txt").write_bytes(content)
    with pytest.raises(ConfigError, match="line 1, is no row"), RowFile(tmp_path / "notes.txt"):
        pass
    assert (tmp_path / "notes.txt").read_bytes() == content


def test_rows_go_to_a_regular_file_only(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        with pytest.raises(StorageError, match="no regular file"), RowFile(place):
            pass
        assert place.exists()


def test_a_full_disk_ends_the_run_and_leaves_whole_rows(tmp_path: Path):
    jobs, path = write_jobs(tmp_path, 4), tmp_path / "rows.jsonl"
    judge(jobs, path, ScriptedEngine(), concurrency=1)
    whole = path.read_bytes()
    path.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) * 5 // 8, before[1]))  # in the third of four rows
    try:
        with pytest.raises(StorageError, match="failed: File too large; the rows before are kept"):
            judge(jobs, path, ScriptedEngine(), concurrency=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = path.read_bytes().splitlines(keepends=True)
    assert len(kept) == 2
    assert set(kept) < set(whole.splitlines(keepends=True))
    assert judge(jobs, path, ScriptedEngine(), concurrency=1).judged == 2
    assert set(path.read_bytes().splitlines()) == set(whole.splitlines())


def test_rows_for_a_file_that_was_removed_are_not_asked_for(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    engine = ScriptedEngine(lambda request: (path.unlink(missing_ok=True), bright_is_good(request))[1])
    with pytest.raises(StorageError, match="was removed while"):
        judge(write_jobs(tmp_path, 20), path, engine, concurrency=1)
    assert len(engine.asked) < 5


def test_a_bad_video_costs_one_job(tmp_path: Path):
    jobs = write_jobs(tmp_path, 3)
    jobs.insert(1, Job(id="bad", task="shine", videos=(tmp_path / "gone.mp4",)))
    report = judge(jobs, tmp_path / "rows.jsonl", ScriptedEngine())
    assert report.judged == 3
    assert list(report.failed) == ["bad"]
    assert "gone.mp4" in report.failed["bad"]
    assert len(lines(tmp_path / "rows.jsonl")) == 3


def failing(error: Exception, at: set[str]):
    def answer(request: Request) -> Reply:
        if request.id in at:
            raise error
        return bright_is_good(request)

    return answer


def failing_from(asked: int, error: Exception) -> ScriptedEngine:
    """An engine that answers so many requests, whichever jobs are prepared first, and fails from then on."""
    engine = ScriptedEngine()

    def answer(request: Request) -> Reply:
        if len(engine.asked) > asked:
            raise error
        return bright_is_good(request)

    engine.answer = answer
    return engine


def test_a_request_that_is_too_long_costs_one_job_and_a_server_that_is_gone_ends_the_run(tmp_path: Path):
    jobs = write_jobs(tmp_path, 8)
    long = ScriptedEngine(failing(RequestTooLong("too long"), {job.id for job in jobs[:7]}))
    report = judge(jobs, tmp_path / "a.jsonl", long)
    assert (report.judged, len(report.failed)) == (1, 7)
    gone = failing_from(6, EngineUnavailable("gone"))
    with pytest.raises(EngineUnavailable, match="gone"):
        judge(jobs, tmp_path / "b.jsonl", gone, concurrency=1)
    assert len(lines(tmp_path / "b.jsonl")) == 6
    assert judge(jobs, tmp_path / "b.jsonl", ScriptedEngine()).judged == 2


def test_an_engine_that_fails_again_and_again_ends_the_run(tmp_path: Path):
    jobs = write_jobs(tmp_path, 20)
    sick = failing_from(3, EngineError("no answer"))
    with pytest.raises(EngineError, match="no answer"):
        judge(jobs, tmp_path / "rows.jsonl", sick, concurrency=1)
    assert len(sick.asked) == 3 + 5
    lame = ScriptedEngine(failing(EngineError("no answer"), {job.id for job in jobs[::2]}))
    assert len(judge(jobs, tmp_path / "other.jsonl", lame, concurrency=1).failed) == 10


def test_a_failing_window_fails_its_job_alone(tmp_path: Path):
    long = Job(id="long", task="shine", videos=(write_gray(tmp_path / "long.mp4", [200] * 100, fps=5),))
    engine = ScriptedEngine(failing(RequestTooLong("too long"), {"long 4.0-20.0 s"}))
    jobs = [long, *write_jobs(tmp_path, 1)]
    report = judge(jobs, tmp_path / "rows.jsonl", engine, DenseSignal(ask=PROFILE.ask("dense")))
    assert (report.judged, report.failed) == (1, {"long": "too long"})


def test_an_engine_that_lacks_something_is_refused_before_anything_is_asked(tmp_path: Path):
    engine = ScriptedEngine(capabilities=replace(ABLE, logprobs=False))
    with pytest.raises(MissingCapability):
        judge(write_jobs(tmp_path, 2), tmp_path / "rows.jsonl", engine)
    assert engine.asked == []


def test_an_invalid_reply_is_kept_with_its_text_and_counted(tmp_path: Path):
    engine = ScriptedEngine(lambda request: Reply(texts=("hm",), flags=("non-finite log-probabilities",)))
    report = judge(write_jobs(tmp_path, 1), tmp_path / "rows.jsonl", engine)
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert (report.invalid, report.flagged) == (1, 1)
    assert (row["invalid"], row["raw"], row["flags"]) == (True, "hm", ["non-finite log-probabilities"])


KILLED = """
import sys
from pathlib import Path
from tests import test_judge_run as t
from tests.judge_engine import ScriptedEngine, bright_is_good
folder, count = Path(sys.argv[1]), int(sys.argv[2])
def answer(request):
    with (folder / "paid.txt").open("a") as file:
        file.write(request.id + "\\n")
    return bright_is_good(request)
jobs = [t.Job(id=f"job {n}", task="shine", videos=(folder / f"{n % 8}.mp4",)) for n in range(count)]
t.judge(jobs, folder / "rows.jsonl", ScriptedEngine(answer, delay_s=0.01))
"""


def test_a_killed_run_goes_on_where_it_was_and_pays_for_no_row_twice(tmp_path: Path):
    jobs = write_jobs(tmp_path, 200)
    judge(jobs, tmp_path / "undisturbed.jsonl", ScriptedEngine(), concurrency=8)
    command = [sys.executable, "-c", KILLED, str(tmp_path), "200"]
    root = Path(__file__).parent.parent
    child = subprocess.Popen(command, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = tmp_path / "rows.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not rows.is_file() or rows.read_bytes().count(b"\n") < 40):
        time.sleep(0.005)
    child.send_signal(signals.SIGKILL)
    child.wait()
    kept = [json.loads(line)["id"] for line in rows.read_bytes().splitlines()[:-1]]
    assert 39 <= len(kept) < 200
    judge(jobs, rows, engine := ScriptedEngine(), concurrency=8)
    assert lines(rows) == lines(tmp_path / "undisturbed.jsonl")
    again = {request.id for request in engine.asked}
    assert again.isdisjoint(kept)
    paid = (tmp_path / "paid.txt").read_text().split("\n")[:-1]
    assert len(set(paid) & again) <= 4 + 1  # the calls that were under way when the process was killed
