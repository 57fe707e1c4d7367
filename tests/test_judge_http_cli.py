"""`regrasp annotate` with a server, as a user runs it: killed, misdirected, and counted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest

from regrasp.rewards.engines.openai_transport import API_KEY_VARIABLES
from tests.datasets import EpisodeSpec, write_dataset
from tests.judge_engine import write_gray
from tests.judge_stub import Call, Fault, Quirks, Stub
from tests.stage_runs import refused, regrasp, snapshot, succeeds

CONCURRENCY = 8
JOBS = 200


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in API_KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred jobs of eight two-camera clips in turn, from dark to bright."""
    folder = tmp_path_factory.mktemp("jobs")
    for number in range(8):
        for camera in ("left", "right"):
            write_gray(folder / f"{camera}{number}.mp4", [30 * number + 20] * 4)
    with (folder / "jobs.jsonl").open("w") as file:
        for n in range(JOBS):
            videos = [f"left{n % 8}.mp4", f"right{n % 8}.mp4"]
            file.write(json.dumps({"id": f"job {n:03}", "task": "Shine.", "videos": videos}) + "\n")
    return folder / "jobs.jsonl"


def command(jobs: Path, stub: Stub, output: Path, *more: object) -> list[str]:
    words = ["annotate", "terminal", "--jobs", jobs, "--output", output, "--engine", "openai", "--model", "judge"]
    return [str(word) for word in (*words, "--base-url", stub.url, "--concurrency", CONCURRENCY, *more)]


def start(words: list[str]) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    program = str(Path(sys.executable).with_name("regrasp"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [program, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def sorted_rows(path: Path) -> list[dict]:
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["id"])


def test_a_killed_run_ends_like_an_undisturbed_one_and_pays_for_no_row_twice(tmp_path: Path, jobs: Path):
    with Stub(Quirks(latency_s=0.1)) as stub:
        succeeds(*command(jobs, stub, tmp_path / "undisturbed.jsonl"))
        assert Counter(stub.paid) == Counter(f"job {n:03}" for n in range(JOBS))

    rows, kept, paid = tmp_path / "rows.jsonl", set[str](), Counter[str]()
    with Stub(Quirks(latency_s=0.1)) as stub:
        for kill_at in (50, 120):
            child = start(command(jobs, stub, rows))
            wait_for(partial(has_rows, rows, kill_at))
            child.send_signal(signal.SIGKILL)
            child.communicate()
            wait_for(lambda: all(call.ended for call in stub.calls))  # the stub ends what was under way
            assert all(stub.paid.count(name) == paid[name] for name in kept)  # what had a row was not asked again
            paid = Counter(stub.paid)
            whole = rows.read_bytes().rpartition(b"\n")[0].splitlines()
            kept = {json.loads(line)["id"] for line in whole}
            assert kill_at <= len(kept) < JOBS
        final = start(command(jobs, stub, rows))
        said, _ = final.communicate(timeout=120)
        assert final.returncode == 0, said
        assert all(stub.paid.count(name) == paid[name] for name in kept)
        paid = Counter(stub.paid)
    assert sorted_rows(rows) == sorted_rows(tmp_path / "undisturbed.jsonl")
    assert len(rows.read_text().splitlines()) == JOBS
    assert sum(count - 1 for count in paid.values()) <= 2 * CONCURRENCY  # the calls under way at either kill


def has_rows(path: Path, count: int) -> bool:
    """Whether a file holds so many rows."""
    return path.is_file() and path.read_bytes().count(b"\n") >= count


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_run_through_passing_faults_is_that_of_a_good_day(tmp_path: Path, jobs: Path):
    lines = jobs.read_text().splitlines(keepends=True)[:24]
    (few := jobs.with_name("few.jsonl")).write_text("".join(lines))
    with Stub() as stub:
        succeeds(*command(few, stub, tmp_path / "good.jsonl"))
    faults = [Fault(status=500), Fault(reset=True), Fault(status=429, headers={"Retry-After": "0.2"}), Fault(cut=True)]

    def every_third(call: Call) -> Fault | None:
        number = int(call.id.removeprefix("job ")) if not call.probe else 1
        return faults[number // 3 % 4] if number % 3 == 0 and call.attempt == 1 else None

    with Stub(Quirks(fault=every_third)) as stub:
        said = succeeds(*command(few, stub, tmp_path / "bad.jsonl"))
    assert sorted_rows(tmp_path / "good.jsonl") == sorted_rows(tmp_path / "bad.jsonl")
    assert "and 8 attempts repeated" in said


def test_the_scores_follow_what_was_shown(tmp_path: Path, jobs: Path):
    with Stub() as stub:
        succeeds(*command(jobs, stub, tmp_path / "rows.jsonl"))
    rows = sorted_rows(tmp_path / "rows.jsonl")[:8]
    expected = [row["expected_score"] for row in rows]
    assert expected == sorted(expected)
    assert rows[0]["score"] == 1
    assert rows[7]["score"] == 5
    assert rows[0]["engine_version"] == "stub 1.2"
    assert not any(row["flags"] for row in rows)


def test_the_cost_of_a_run_is_told_and_a_repeated_one_costs_nothing(tmp_path: Path, jobs: Path):
    with Stub() as stub:
        said = succeeds(*command(jobs, stub, tmp_path / "rows.jsonl", "--prices", 0.5, 2))
        read = sum(len(call.body["messages"]) > 0 for call in stub.calls)
        assert f"{read} requests and 0 attempts repeated" in said
        assert "At 0.5 and 2 a million: " in said
        before = len(stub.calls)
        again = succeeds(*command(jobs, stub, tmp_path / "rows.jsonl", "--prices", 0.5, 2))
        assert "At 0.5 and 2 a million: 0.0000" in again
        assert len(stub.calls) == before  # not even a probe


def test_no_more_requests_are_under_way_than_asked_for_where_samples_are_drawn_one_by_one(tmp_path: Path, one: Path):
    steps = [{"action": "a", "grading": [{"label": "no", "points": 0}, {"label": "yes", "points": 1}]}]
    job = json.loads(one.read_text()) | {"rubric": steps}
    one.write_text(json.dumps(job) + "\n")
    with Stub(Quirks(n=False, thinking="reasoning", latency_s=0.1)) as stub:
        words = ["--jobs", one, "--output", tmp_path / "rows.jsonl", "--model", "judge", "--base-url", stub.url]
        succeeds("annotate", "rubric", *words, "--concurrency", 3)
    (row,) = sorted_rows(tmp_path / "rows.jsonl")
    assert row["valid_samples"] == len(stub.asked) == 9
    edges = sorted([(call.started, 1) for call in stub.asked] + [(call.ended, -1) for call in stub.asked])
    assert max(accumulate(step for _, step in edges)) == 3


# Bad input


def fails(words: list[str], folder: Path) -> str:
    """Run a command that has to be refused and to leave nothing; what it says."""
    before = snapshot(folder)
    said = refused(*words)
    assert snapshot(folder) == before
    return said


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """One job, in a folder of its own."""
    (tmp_path / "in").mkdir()
    write_gray(tmp_path / "in/a.mp4", [200] * 4)
    (tmp_path / "in/jobs.jsonl").write_text('{"id": "a", "task": "Shine.", "videos": ["a.mp4"]}\n')
    return tmp_path / "in/jobs.jsonl"


def test_a_server_that_is_down(tmp_path: Path, one: Path):
    with Stub() as stub:
        pass
    said = fails(command(one, stub, tmp_path / "new/folder/rows.jsonl"), tmp_path)
    assert said.startswith(f"EngineUnavailable: No judge answers at {stub.url} (ConnectError")
    assert "Start the server, or give --base-url" in said


def test_a_wrong_model_name(tmp_path: Path, one: Path):
    with Stub(Quirks(models=("qwen3-vl-8b",))) as stub:
        said = fails(command(one, stub, tmp_path / "rows.jsonl"), tmp_path)
    assert "has no model 'judge'; it has qwen3-vl-8b." in said
    assert "Give --model or REGRASP_JUDGE_MODEL one of these names" in said


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8000", "http:// or https://"),
        ("http://127.0.0.1:eighty/v1", "http:// or https://"),
        ("http://no-such-host.invalid/v1", "No judge answers at http://no-such-host.invalid/v1"),
        ("http://127.0.0.1:8000/v1/chat/completions", "leave out what follows"),
    ],
)
def test_a_wrong_address(tmp_path: Path, one: Path, url: str, words: str):
    with Stub() as stub:
        right = command(one, stub, tmp_path / "rows.jsonl")
    assert words in fails([url if word == stub.url else word for word in right], tmp_path)


def test_an_address_of_something_else(tmp_path: Path, one: Path):
    with Stub(Quirks(prefix="/api/v1")) as stub:
        right = command(one, stub, tmp_path / "rows.jsonl")
        wrong = stub.url.removesuffix("/v1")
        said = fails([wrong if word == stub.url else word for word in right], tmp_path)
    assert f"answers under another path. Give --base-url {stub.url}." in said


def test_no_key_where_one_is_needed_and_a_wrong_one(tmp_path: Path, one: Path, monkeypatch: pytest.MonkeyPatch):
    with Stub(Quirks(key="sk-the-right-one", echo_key=True)) as stub:
        words = command(one, stub, tmp_path / "rows.jsonl")
        assert "refuses a request without a key (HTTP 401" in fails(words, tmp_path)
        monkeypatch.setenv("REGRASP_JUDGE_API_KEY", "sk-a-wrong-one")
        said = fails(words, tmp_path)
        assert "refuses the key that was sent" in said
        assert "wrong-one" not in said
        monkeypatch.setenv("REGRASP_JUDGE_API_KEY", "sk-the-right-one")
        told = regrasp(*words)
        assert told.code == 0
    rows = (tmp_path / "rows.jsonl").read_text()
    assert "sk-the-right-one" not in told.out + told.err + rows


def test_a_context_that_is_too_long(tmp_path: Path, one: Path):
    with Stub(Quirks(context=600)) as stub:
        done = regrasp(*command(one, stub, tmp_path / "rows.jsonl"))
    assert done.code == 2
    (why,) = [line for line in done.err.splitlines() if "maximum context length" in line]
    assert "Lower `most_frames`, `cell_height` or `max_tokens` in the --profile" in why
    assert "0 judged, 0 had been already, 1 without a row" in done.out
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_server_without_log_probabilities_is_refused_for_scores(tmp_path: Path, one: Path):
    with Stub(Quirks(top_logprobs=0)) as stub:
        said = fails(command(one, stub, tmp_path / "rows.jsonl"), tmp_path)
    assert "does not give log-probabilities" in said


def test_rows_that_are_to_be_replaced_stay_where_no_judge_answers(tmp_path: Path):
    cameras = {"observation.images.a": (48, 72)}
    data = write_dataset(tmp_path / "pick", cameras=cameras, episodes=[EpisodeSpec(5)], success_column=None)
    with Stub(Quirks(models=("judge", "other"))) as stub:
        words = ["annotate", "terminal", "--dataset", str(data), "--tag", "t", "--base-url", stub.url, "--overwrite"]
        succeeds(*words, "--model", "judge")
    said = fails([*words, "--model", "other"], tmp_path)
    assert "No judge answers" in said
    with Stub(Quirks(models=("judge", "other"))) as stub:
        words[7] = stub.url
        succeeds(*words, "--model", "other")
    assert [row["model"] for row in sorted_rows(data / "meta/terminal_t.jsonl")] == ["other"]
