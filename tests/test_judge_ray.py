"""Judging over Ray gives the rows of a run on one machine, whatever becomes of the workers.

The tests that start Ray are slow ones; what needs no cluster is tested in test_judge_ray_worker.
"""

import asyncio
import os
import re
import shutil
import signal as signals
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from regrasp.rewards.engine import JudgeEngine, Reply, Request
from regrasp.rewards.jobs import Job
from regrasp.rewards.ray_bench import RayBench
from regrasp.rewards.rows import RowFile
from regrasp.rewards.run import RunReport, judge_on
from tests.datasets import EpisodeSpec, write_dataset
from tests.judge_engine import ScriptedEngine
from tests.stage_runs import succeeds
from tests.test_judge_run import PROFILE, TERMINAL, judge, lines, write_jobs
from tests.tiny_judge import write_tiny_judge

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


def leftovers() -> set[str]:
    """Ray's processes and the folders of clusters that were started here."""
    ray = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if any(word in _text(path) for word in (b"raylet", b"gcs_server", b"ray::"))
    ]
    return set(ray) | {path.name for path in Path(tempfile.gettempdir()).glob("regrasp-ray-*")}


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture(autouse=True)
def nothing_left() -> object:
    """Every test ends without a process or folder of Ray's that was not there before.

    Those of a run that was killed end by themselves, the last after most of a minute.
    """
    before = leftovers()
    yield
    deadline = time.monotonic() + 90
    while leftovers() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert leftovers() - before == set()
    assert not (Path.home() / ".ray").exists()


@dataclass
class NotedEngine(ScriptedEngine):
    """A scripted judge that notes what it answered in a file, and may kill its process on the way."""

    notes: Path = field(default=Path())
    kills: str = ""
    """The id of the request over which it dies, as long as there is no file of this name beside the notes."""
    always: bool = False

    async def judge(self, request: Request) -> Reply:
        reply = await super().judge(request)
        mark = self.notes.with_name("killed")
        if request.id == self.kills and (self.always or not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signals.SIGKILL)
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()} {request.id}\n")
        return reply


def noted(folder: Path) -> list[list[str]]:
    """The process and the request of each answer."""
    return [line.split(" ", 1) for line in (folder / "notes.txt").read_text().splitlines()]


def judge_over_ray(
    jobs: list[Job], path: Path, make: Callable[[], JudgeEngine], *, workers: int = 1, address: str = "local"
) -> RunReport:
    bench = RayBench(TERMINAL, PROFILE, make, "scripted", "bright", address=address, workers=workers, concurrency=4)
    with RowFile(path) as rows:
        return asyncio.run(judge_on(bench, jobs, rows))


def test_rows_are_those_of_one_machine_and_a_lost_workers_jobs_are_judged_again(tmp_path: Path):
    jobs = write_jobs(tmp_path, 12)
    alone = judge(jobs, tmp_path / "alone.jsonl", ScriptedEngine())
    make = partial(NotedEngine, delay_s=0.01, notes=tmp_path / "notes.txt", kills="job 6")
    report = judge_over_ray(jobs, tmp_path / "ray.jsonl", make)
    assert lines(tmp_path / "ray.jsonl") == lines(tmp_path / "alone.jsonl")
    assert (report.judged, report.failed, report.prompt_tokens) == (12, {}, alone.prompt_tokens)
    assert len({process for process, _ in noted(tmp_path)}) == 2
    assert os.getpid() not in {int(process) for process, _ in noted(tmp_path)}
    assert 0 <= report.idle_s <= report.wall_s


def test_a_job_that_no_worker_survives_fails_alone(tmp_path: Path):
    jobs = write_jobs(tmp_path, 6)
    make = partial(NotedEngine, notes=tmp_path / "notes.txt", kills="job 2", always=True)
    report = judge_over_ray(jobs, tmp_path / "rows.jsonl", make)
    assert list(report.failed) == ["job 2"]
    assert "3 workers of the Ray cluster were lost, one after another, over this job" in report.failed["job 2"]
    assert len(lines(tmp_path / "rows.jsonl")) == 5


KILLED = """
import sys
from functools import partial
from pathlib import Path
from tests import test_judge_ray as t
folder = Path(sys.argv[1])
jobs = [t.Job(id=f"job {n}", task="shine", videos=(folder / f"{n % 8}.mp4",)) for n in range(60)]
t.judge_over_ray(jobs, folder / "rows.jsonl", partial(t.NotedEngine, delay_s=0.1, notes=folder / "notes.txt"))
"""


def test_a_run_that_is_killed_leaves_no_process_and_is_resumed_with_or_without_ray(tmp_path: Path):
    jobs = write_jobs(tmp_path, 60)
    judge(jobs, tmp_path / "undisturbed.jsonl", ScriptedEngine())
    rows = tmp_path / "rows.jsonl"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not rows.is_file() or rows.read_bytes().count(b"\n") < 10):
        time.sleep(0.01)
    child.kill()
    child.wait()
    kept = rows.read_bytes().count(b"\n")
    assert 10 <= kept < 60
    judge_over_ray(jobs[:40], rows, partial(NotedEngine, notes=tmp_path / "notes.txt"))
    judge(jobs, rows, again := ScriptedEngine())
    assert lines(rows) == lines(tmp_path / "undisturbed.jsonl")
    assert len(again.asked) <= 20
    asked = [request for _, request in noted(tmp_path)]
    assert len(asked) - len(set(asked)) <= 2 * (4 + 2)  # those under way when it was killed, and a moment later


MACHINES = """
import sys
from ray.cluster_utils import Cluster
small = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=small)
cluster.add_node(**small)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def cluster_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of two machines, as far as Ray can tell."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", os.environ.get("RAY_AUTH_TOKEN", "0" * 64))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    folder = Path("/tmp/ray")  # where a cluster notes its address, whatever folder it is given
    ours = not folder.exists()
    command = [sys.executable, "-c", MACHINES]
    machines = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert machines.stdout is not None
    try:
        yield next(line.strip() for line in machines.stdout if re.fullmatch(r"[\d.]+:\d+\n", line))
    finally:
        machines.communicate()
        if ours:
            shutil.rmtree(folder, ignore_errors=True)


def test_a_model_in_process_judges_a_dataset_on_two_machines_of_a_cluster(cluster_of_two: str, tmp_path: Path):
    cameras = {"observation.images.a": (48, 72), "observation.images.b": (48, 72)}
    dataset = write_dataset(tmp_path / "pick", cameras=cameras, episodes=[EpisodeSpec(n) for n in (9, 7, 12, 5)])
    judged_by = ["--engine", "transformers", "--model", write_tiny_judge(tmp_path / "tiny"), "--cameras", *cameras]
    words = ["annotate", "terminal", "--dataset", dataset, *judged_by]
    succeeds(*words, "--output", tmp_path / "alone.jsonl")
    said = succeeds(*words, "--output", tmp_path / "rows.jsonl", "--ray", cluster_of_two)
    assert "4 judged, 0 had been already, 0 without a row" in said
    assert lines(tmp_path / "rows.jsonl") == lines(tmp_path / "alone.jsonl")
