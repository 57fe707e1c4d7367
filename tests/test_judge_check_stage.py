"""`regrasp annotate check`: a judge that looks is usable; one that praises all or ignores time or task is not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from regrasp.data.dataset import open_dataset
from regrasp.recap import annotate, judge_check
from regrasp.rewards.engine import Reply, Request
from regrasp.rewards.jobs import Job, episode_jobs
from regrasp.rewards.views import Views
from tests.dataset_pixels import read_pixels
from tests.datasets import EpisodeSpec, write_dataset
from tests.judge_engine import ScriptedEngine, bright_is_good, level_of, write_gray, write_numbered
from tests.stage_runs import Done, refused, regrasp

TASK = "Make it shine."


@pytest.fixture
def attempts(tmp_path: Path) -> Path:
    """Twelve attempts, each brightening: six to the full, six to the half; jobs.jsonl and truth.csv describe them."""
    jobs, labels = [], ["id,outcome,score"]
    for number in range(12):
        good = number % 2 == 0
        top = (235 if good else 120) + number // 2
        write_gray(tmp_path / f"{number}.mp4", np.linspace(20, top, 12).astype(int).tolist())
        jobs.append(json.dumps({"id": f"a{number}", "task": TASK, "videos": [f"{number}.mp4"]}))
        labels.append(f"a{number},{'success' if good else 'failure'},{5 if good else 3}")
    (tmp_path / "jobs.jsonl").write_text("\n".join(jobs) + "\n")
    (tmp_path / "truth.csv").write_text("\n".join(labels) + "\n")
    return tmp_path


def looks(request: Request) -> Reply:
    """A judge that looks at the last frame and reads the task."""
    if TASK in request.prompt:
        return bright_is_good(request)
    return Reply(texts=("1",), probabilities=dict(zip("12345", [0.96, 0.01, 0.01, 0.01, 0.01], strict=True)))


def praises(request: Request) -> Reply:
    return Reply(texts=("5",), probabilities=dict(zip("12345", [0.0, 0.0, 0.0, 0.0, 1.0], strict=True)))


def sees_the_best_moment(request: Request) -> Reply:
    """A judge that does not care for the order of time."""
    level = max(float(frame.mean()) for frame in request.videos[0].frames) / 255
    share = [float(np.exp(-8 * abs(level - place / 4))) for place in range(5)]
    total = sum(share)
    return Reply(texts=("3",), probabilities=dict(zip("12345", [s / total for s in share], strict=True)))


def check(
    folder: Path, answer: Callable[[Request], Reply], monkeypatch: pytest.MonkeyPatch, *words: object
) -> tuple[Done, ScriptedEngine]:
    engine = ScriptedEngine(answer)
    monkeypatch.setattr(annotate, "make_engine", lambda config, model: engine)
    files = ["--jobs", folder / "jobs.jsonl", "--labels", folder / "truth.csv", "--output", folder / "rows.jsonl"]
    report = ["--report", folder / "report.json", "--plot", folder / "plot.png", "--model", "m"]
    return regrasp("annotate", "check", *files, *report, *words), engine


def test_a_judge_that_looks_is_usable(attempts: Path, monkeypatch: pytest.MonkeyPatch):
    done, engine = check(attempts, looks, monkeypatch)
    assert done.code == 0, done.out + done.err
    assert "The judge is usable" in done.out
    report = json.loads((attempts / "report.json").read_text())
    assert report["usable"]
    assert report["auroc"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert report["confusion"] == {"true_positive": 6, "false_positive": 0, "false_negative": 0, "true_negative": 6}
    assert report["preferred_to_reversed"]["value"] == 1.0
    assert (report["attempts"], report["successes"], report["mae"]["value"]) == (12, 6, 0.0)
    assert report["quadratic_kappa"]["value"] == 1.0
    # each success: 4 spoilt copies, and 4 beginnings forwards and 4 backwards, the whole of both being there already
    assert len(engine.asked) == 12 + 6 * (4 + 8)
    assert report["tau_b"]["low"] > 0.5
    assert report["tau_a"]["value"] < report["tau_b"]["value"]
    # every beginning is brighter at its end than a shorter one, and darker where it is played backwards
    assert report["voc_spearman"]["value"] == 1.0
    assert report["voc_spearman_reversed"]["value"] == -1.0
    assert 0.8 < report["voc_pearson"]["value"] < 1
    assert (report["voc_spearman_undefined"], report["voc_pearson_reversed_undefined"]) == (0, 0)
    assert {"value", "low", "high"} == set(report["ece_held_out"]) == set(report["ece_held_out_after_isotonic"])
    assert report["calibration"]["progress"] == sorted(report["calibration"]["progress"])
    assert (attempts / "plot.png").read_bytes().startswith(b"\x89PNG")
    again, idle = check(attempts, looks, monkeypatch)
    assert (again.out.splitlines()[:-1], idle.asked) == (done.out.splitlines()[:-1], [])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (praises, "does not tell successes from failures"),
        (sees_the_best_moment, "same ones reversed"),
        (bright_is_good, "same ones under a wrong instruction"),
        (lambda request: Reply(texts=("?",)), "84 of 84 replies did not parse"),
    ],
)
def test_a_judge_that_looks_at_something_else_is_not(
    attempts: Path, answer: Callable[[Request], Reply], words: str, monkeypatch: pytest.MonkeyPatch
):
    done, _ = check(attempts, answer, monkeypatch)
    assert done.code == 2
    assert "NOT shown to be usable" in done.out
    assert words in done.out
    assert not json.loads((attempts / "report.json").read_text())["usable"]


def test_a_verdict_needs_more_than_a_few_attempts(attempts: Path, monkeypatch: pytest.MonkeyPatch):
    lines = (attempts / "truth.csv").read_text().splitlines()
    (attempts / "truth.csv").write_text("\n".join(lines[:10]) + "\n")
    done, _ = check(attempts, looks, monkeypatch, "--voc-points", 0)
    assert done.code == 2
    assert "NOT shown to be usable: 5 successes and 4 failures are too few to tell" in done.out


def test_without_controls_only_the_attempts_are_judged(attempts: Path, monkeypatch: pytest.MonkeyPatch):
    done, engine = check(attempts, bright_is_good, monkeypatch, "--no-controls", "--voc-points", 0)
    assert (done.code, len(engine.asked)) == (0, 12)
    assert "voc" not in done.out


def test_order_in_time_needs_no_controls(attempts: Path, monkeypatch: pytest.MonkeyPatch):
    done, engine = check(attempts, bright_is_good, monkeypatch, "--no-controls", "--voc-points", 3)
    assert (done.code, len(engine.asked)) == (0, 12 + 6 * 2)
    report = json.loads((attempts / "report.json").read_text())
    assert report["voc_spearman"]["value"] == 1.0
    assert "voc_spearman_reversed" not in report
    assert "preferred_to_reversed" not in report


def test_a_control_whose_replies_do_not_parse_counts_against_a_judge(attempts: Path, monkeypatch: pytest.MonkeyPatch):
    def mute_when_frozen(request: Request) -> Reply:
        return Reply(texts=("?",)) if "(frozen)" in request.id else looks(request)

    done, _ = check(attempts, mute_when_frozen, monkeypatch)
    assert done.code == 2
    assert "same ones frozen (nan" in done.out


@pytest.mark.parametrize("kind", ["files", "video", "image"])
def test_controls_show_what_they_say(tmp_path: Path, kind: str):
    if kind == "files":
        job = Job(id="a", task="t", videos=(write_numbered(tmp_path / "a.mp4", 9),))
    else:
        path = write_dataset(
            tmp_path / "d", cameras={"top": (48, 72)}, camera_kind=kind, episodes=[EpisodeSpec(5), EpisodeSpec(9)]
        )
        job = episode_jobs(open_dataset(path), ["top"], [1])[0]

    def seen(control: str | None, shown: float = 1.0) -> list[int]:
        views = Views(replace(job, control=control, shown=shown))  # type: ignore[arg-type]
        return [read_pixels(frame)[2] for frame in views.frames(0, np.arange(len(views.timestamps)), (48, 72))]

    assert seen(None) == list(range(9))
    assert seen("reversed") == list(range(8, -1, -1))
    assert seen("frozen") == [0] * 9
    assert seen("truncated", 1 / 3) == [0, 1, 2]
    assert seen("prefix", 0.2) == [0, 1]
    assert seen("reversed prefix", 0.2) == [8, 7]
    assert seen("prefix", 0.01) == [0]
    assert seen("wrong instruction") == list(range(9))


def test_spoilt_attempts_are_no_annotations(tmp_path: Path):
    jobs = [Job(id="a", task="x", videos=(tmp_path / "a.mp4",)), Job(id="b", task="y", videos=(tmp_path / "a.mp4",))]
    spoilt = judge_check.make_controls(jobs)
    assert len({job.id for job in spoilt}) == 8
    assert len({job.digest for job in [*jobs, *spoilt]}) == 10
    assert [job.shown for job in spoilt if job.control == "truncated"] == [1 / 3] * 2
    parts = judge_check.make_prefixes(jobs, "prefix", 4)
    assert [(job.id, job.shown) for job in parts[:3]] == [(f"a (prefix {k}/4)", k / 4) for k in (1, 2, 3)]
    assert len({job.digest for job in [*jobs, *spoilt, *parts]}) == 16
    assert [job.task for job in spoilt if job.control == "wrong instruction"] == ["y", "Fold the newspaper in half."]


def test_a_datasets_episodes_are_labelled_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dataset = write_dataset(
        tmp_path / "pick", cameras={"top": (48, 72)}, episodes=[EpisodeSpec(4), EpisodeSpec(4), EpisodeSpec(4)]
    )
    (tmp_path / "truth.csv").write_text("episode_index,outcome\n0,success\n2,failure\n")
    engine = ScriptedEngine(lambda request: bright_is_good(request) if level_of(request) >= 0 else praises(request))
    monkeypatch.setattr(annotate, "make_engine", lambda config, model: engine)
    files = ["--labels", tmp_path / "truth.csv", "--output", tmp_path / "o.jsonl", "--model", "m", "--no-controls"]
    files += ["--voc-points", 0]
    regrasp("annotate", "check", "--dataset", dataset, *files)
    assert sorted(request.id for request in engine.asked) == ["pick/0", "pick/2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,outcome\naa1,success\n", "Did you mean 'a"),
        ("id,outcome\na1,success\na1,failure\n", "labelled twice"),
        ("id,outcome\na1,maybe\n", "found 'maybe'"),
        ("id,score\na1,7\n", "from 1 to 5; found '7'"),
        ("id,outcome\n", "labels nothing"),
        ("episode_index,outcome\n0,success\n", "none of the jobs"),
        ("id,outcome\na1,é\n", "no text in UTF-8"),
        ("id,outcome\na1," + "x" * 200_000, "is no CSV after line 1"),
    ],
)
def test_labels_that_cannot_be_understood_are_refused(
    attempts: Path, text: str, words: str, monkeypatch: pytest.MonkeyPatch
):
    (attempts / "truth.csv").write_text(text, encoding="latin-1")
    done, engine = check(attempts, looks, monkeypatch)
    assert done.code == 2
    assert words in done.err
    assert engine.asked == []


def test_what_cannot_be_checked_is_refused(attempts: Path):
    assert annotate.MODEL_VARIABLE == "REGRASP_JUDGE_MODEL"
    files = ["--jobs", attempts / "jobs.jsonl", "--labels", attempts / "truth.csv"]
    assert "Where are the rows" in refused("annotate", "check", *files, "--model", "m")
    assert "--tag does not go" in refused("annotate", "check", *files, "--tag", "t")
    assert "no labels file" in refused("annotate", "check", *files[:3], attempts / "none.csv", "--model", "m")
    assert "--success-at" in refused("annotate", "check", *files, "--success-at", 0.5)
    assert "--voc-points" in refused("annotate", "check", *files, "--voc-points", 1)
