"""What Ray's workers and the one that hands out jobs do, with workers of this process in place of Ray's."""

import asyncio
import builtins
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from regrasp.core.errors import ConfigError, RegraspError, VideoError
from regrasp.rewards import ray_bench
from regrasp.rewards.engine import EngineError, EngineUnavailable, JudgeEngine, MissingCapability, Usage
from regrasp.rewards.jobs import Job
from regrasp.rewards.ray_bench import RayBench, Task, Worker
from regrasp.rewards.ray_cluster import Cluster, Found
from regrasp.rewards.rows import RowFile
from regrasp.rewards.run import RunReport, judge_on
from tests.judge_engine import ABLE, ScriptedEngine
from tests.stage_runs import refused
from tests.test_judge_run import PROFILE, TERMINAL, failing, judge, lines, write_jobs


class LostError(Exception):
    """Stands for Ray's."""


@dataclass
class Actor:
    """A worker of this process, called as one of Ray's; it dies at the calls that its cluster names."""

    worker: Worker
    cluster: "OneProcess"
    dead: bool = False

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)


@dataclass
class Method:
    actor: Actor
    name: str

    async def remote(self, *arguments: object) -> object:
        await asyncio.sleep(0.001)
        if self.actor.dead or self.actor.cluster.dies(self.name, *arguments):
            self.actor.dead = True
            raise LostError
        return await getattr(self.actor.worker, self.name)(*arguments)


@dataclass
class OneProcess:
    """A cluster whose workers run here."""

    found: Found = field(default_factory=lambda: Found(machines=2, gpus=0))
    room: int = 99
    dies: Callable[..., bool] = lambda name, *arguments: False
    started: list[int] = field(default_factory=list)
    killed: int = 0
    closed: bool = False
    lost: tuple[type[BaseException], ...] = (LostError,)

    def connect(self, workers: int | None) -> Found:
        return self.found

    def put(self, value: object) -> object:
        return value

    def start(self, worker: type, task: Task, *, gpus: int) -> Actor:
        self.started.append(gpus)
        actor = Actor(worker(task), self)
        if len(self.started) > self.room:
            actor.worker.ready = asyncio.Event().wait  # type: ignore[method-assign, assignment]
        return actor

    def kill(self, actor: Actor) -> None:
        actor.dead = True
        self.killed += 1

    def free(self) -> str:
        return "0 cores and 0 GPUs"

    def disconnect(self) -> None:
        self.closed = True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> OneProcess:
    one = OneProcess()
    monkeypatch.setattr(ray_bench, "Cluster", lambda address: one)
    return one


def over_ray(
    jobs: list[Job], path: Path, make: Callable[[], JudgeEngine] = ScriptedEngine, **settings: Any
) -> RunReport:
    bench = RayBench(TERMINAL, PROFILE, make, "scripted", "bright", address="local", concurrency=2, **settings)
    with RowFile(path) as rows:
        return asyncio.run(judge_on(bench, jobs, rows))


def test_rows_are_those_of_one_machine(tmp_path: Path, cluster: OneProcess):
    jobs = write_jobs(tmp_path, 9)
    judge(jobs, tmp_path / "alone.jsonl", ScriptedEngine())
    report = over_ray(jobs, tmp_path / "rows.jsonl", partial(ScriptedEngine, delay_s=0.01))
    assert lines(tmp_path / "rows.jsonl") == lines(tmp_path / "alone.jsonl")
    assert (report.judged, report.failed, cluster.started, cluster.closed) == (9, {}, [0, 0], True)
    assert over_ray(jobs, tmp_path / "rows.jsonl").repeated == 9
    assert len(cluster.started) == 2  # nothing was to be done, and no worker was started


def test_rows_say_what_makes_the_judge_the_one_that_it_is_so_that_a_run_resumes(tmp_path: Path, cluster: OneProcess):
    jobs, weights = write_jobs(tmp_path, 3), [["model.safetensors", 7, "digest"]]
    assert over_ray(jobs, tmp_path / "rows.jsonl", judge=weights).judged == 3
    assert over_ray(jobs, tmp_path / "rows.jsonl", judge=weights).repeated == 3
    assert over_ray(jobs, tmp_path / "rows.jsonl").judged == 3


def test_there_is_a_worker_for_each_group_of_gpus_or_each_machine_or_as_many_as_wanted(
    tmp_path: Path, cluster: OneProcess
):
    jobs = write_jobs(tmp_path, 3)
    cluster.found = Found(machines=2, gpus=8)
    over_ray(jobs[:1], tmp_path / "a.jsonl", gpus=2)
    assert cluster.started == [2, 2, 2, 2]
    cluster.started.clear()
    over_ray(jobs[:1], tmp_path / "b.jsonl", gpus=0)
    assert cluster.started == [0, 0]
    cluster.started.clear()
    over_ray(jobs[:1], tmp_path / "c.jsonl", gpus=2, workers=3)
    assert cluster.started == [2, 2, 2]


def test_jobs_of_a_lost_worker_are_judged_by_the_others_and_by_a_new_one(tmp_path: Path, cluster: OneProcess):
    jobs = write_jobs(tmp_path, 12)
    dying = iter([True])
    cluster.dies = lambda name, *arguments: name == "judge" and arguments == (4,) and next(dying, False)
    report = over_ray(jobs, tmp_path / "rows.jsonl")
    assert (report.judged, report.failed, len(cluster.started)) == (12, {}, 3)
    judge(jobs, tmp_path / "alone.jsonl", ScriptedEngine())
    assert lines(tmp_path / "rows.jsonl") == lines(tmp_path / "alone.jsonl")


def test_a_job_that_no_worker_survives_fails_alone(tmp_path: Path, cluster: OneProcess):
    cluster.dies = lambda name, *arguments: name == "judge" and arguments == (4,)
    report = over_ray(write_jobs(tmp_path, 12), tmp_path / "rows.jsonl")
    assert (report.judged, list(report.failed)) == (11, ["job 4"])
    assert "3 workers of the Ray cluster were lost, one after another, over this job" in report.failed["job 4"]


def test_workers_that_find_no_room_are_done_without(
    tmp_path: Path, cluster: OneProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(ray_bench, "START_S", 0.2)
    cluster.room = 1
    assert over_ray(write_jobs(tmp_path, 3), tmp_path / "rows.jsonl").judged == 3
    assert "Going on with 1 workers: The Ray cluster started no worker in 0 s. Each needs one free core" in caplog.text
    cluster.room = 0
    with pytest.raises(EngineUnavailable, match=r"free are 0 cores and 0 GPUs. Mend: fewer --workers"):
        over_ray(write_jobs(tmp_path, 3), tmp_path / "none.jsonl")


def test_what_is_wrong_on_every_worker_is_said_once_before_anything_is_asked(tmp_path: Path, cluster: OneProcess):
    def broken() -> JudgeEngine:
        raise ConfigError("no such model")

    jobs = write_jobs(tmp_path, 3)
    with pytest.raises(ConfigError, match="no such model"):
        over_ray(jobs, tmp_path / "rows.jsonl", broken)
    with pytest.raises(MissingCapability):
        over_ray(jobs, tmp_path / "rows.jsonl", partial(ScriptedEngine, capabilities=replace(ABLE, logprobs=False)))
    cluster.dies = lambda name, *arguments: name == "open"
    with pytest.raises(EngineUnavailable, match="ended before it could judge"):
        over_ray(jobs, tmp_path / "rows.jsonl")
    assert cluster.closed
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_failing_job_is_told_and_a_server_that_is_gone_ends_the_run(tmp_path: Path, cluster: OneProcess):
    jobs = write_jobs(tmp_path, 6)
    ill = partial(ScriptedEngine, failing(EngineError("ill"), {"job 3"}))
    assert over_ray(jobs, tmp_path / "a.jsonl", ill).failed == {"job 3": "ill"}
    gone = partial(ScriptedEngine, failing(EngineUnavailable("gone"), {"job 3"}))
    with pytest.raises(EngineUnavailable, match="gone"):
        over_ray(jobs, tmp_path / "b.jsonl", gone)
    assert cluster.killed > 0


def test_what_servers_were_asked_is_summed_over_workers(tmp_path: Path, cluster: OneProcess):
    @dataclass
    class Counting(ScriptedEngine):
        usage: Usage = field(default_factory=lambda: Usage(requests=3, prompt_tokens=10))

    assert over_ray(write_jobs(tmp_path, 2), tmp_path / "rows.jsonl", Counting).usage == Usage(
        requests=6, prompt_tokens=20
    )


def test_a_worker_that_sees_other_files_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (job,) = write_jobs(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    common = {"make": ScriptedEngine, "signal": TERMINAL, "profile": PROFILE, "concurrency": 1, "judge": (), "keys": {}}
    task = Task(jobs=(job,), digests=("what the file was elsewhere",), folder=tmp_path, **common)

    async def answer() -> object:
        worker = Worker(task)
        assert await worker.open() is None
        return await worker.judge(0)

    said = asyncio.run(answer())
    assert isinstance(said, VideoError)
    assert f"Job 'job 0': the machine {socket.gethostname()!r} does not see the files" in str(said)
    assert "Mend: keep videos and datasets in a folder that all machines share" in str(said)


def test_relative_paths_start_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (job,) = write_jobs(tmp_path, 1)
    relative = replace(job, videos=(Path(job.videos[0].name),))
    monkeypatch.chdir(tmp_path)
    common = {"make": ScriptedEngine, "signal": TERMINAL, "profile": PROFILE, "concurrency": 1, "judge": ()}
    keys = {"REGRASP_JUDGE_API_KEY": "secret"}
    task = Task(jobs=(relative,), digests=(relative.digest,), folder=tmp_path, keys=keys, **common)
    assert "secret" not in repr(task)
    monkeypatch.chdir("/")
    monkeypatch.setenv("REGRASP_JUDGE_API_KEY", "")

    async def answer() -> object:
        worker = Worker(task)
        await worker.open()
        return await worker.judge(0)

    row = asyncio.run(answer())
    assert isinstance(row, dict)
    assert row["score"] == 1


def test_an_address_where_nothing_answers_is_told_soon():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    cluster = Cluster(f"127.0.0.1:{port}")
    started = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"No Ray cluster can be used at '127.0.0.1:\d+' \(.*refused"):
        cluster.connect(None)
    assert time.monotonic() - started < 60  # Ray itself would wait for two minutes


@pytest.mark.parametrize("address", ["", "head", "ray://head:10001", "head:", "http://head:8265"])
def test_an_address_of_another_kind_is_refused(address: str):
    with pytest.raises(ConfigError, match=r"--ray is HOST:PORT of a cluster's head"):
        Cluster(address)


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *rest: Any) -> object:
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RegraspError, match=r"pip install 'regrasp\[ray\]'"):
        Cluster("local")


def test_flags_that_do_not_go_together_are_refused(tmp_path: Path):
    (job,) = write_jobs(tmp_path, 1)
    words = ["annotate", "terminal", "--video", job.videos[0], "--task", "shine", "--model", "m"]
    words += ["--output", tmp_path / "rows.jsonl"]
    assert "--workers goes with --ray" in refused(*words, "--workers", 2)
    assert "--workers is at least 1" in refused(*words, "--workers", 0, "--ray", "local")
    assert "--concurrency is at least 1" in refused(*words, "--concurrency", 0)
    assert "--ray is HOST:PORT" in refused(*words, "--ray", "localhost")
    assert "--engine-options are name=value" in refused(*words, "--engine-options", "jpeg_quality")
    assert "no setting 'jpg_quality'" in refused(*words, "--engine-options", "jpg_quality=80")
    assert "does not take jpeg_quality = 'high'" in refused(*words, "--engine-options", "jpeg_quality=high")
    assert "A JPEG quality lies in 1 to 95" in refused(*words, "--engine-options", "jpeg-quality=100")
    assert not (tmp_path / "rows.jsonl").exists()
