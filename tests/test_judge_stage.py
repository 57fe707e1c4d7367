"""`regrasp annotate` and `regrasp outcomes`, as a user runs them, with a scripted judge as the engine."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from regrasp.data.dataset import open_dataset
from regrasp.data.sidecar import read_provenance
from regrasp.recap import annotate
from regrasp.recap.episode_spans import parse_episodes
from regrasp.rewards.engine import Reply, Request
from tests.datasets import EpisodeSpec, write_dataset
from tests.judge_engine import ScriptedEngine, bright_is_good, write_gray
from tests.stage_runs import refused, regrasp, sidecar, snapshot, succeeds

CAMERAS = {"observation.images.a": (48, 72), "observation.images.b": (48, 72)}
RUBRIC = [
    {"action": "grasp", "grading": [{"label": "no", "points": 0}, {"label": "yes", "points": 0.4}]},
    {"action": "lift", "grading": [{"label": "no", "points": 0}, {"label": "yes", "points": 0.6}]},
]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """The judge that every command of a test gets."""
    scripted = ScriptedEngine()

    def make(config: annotate.JudgeConfig, model: str) -> ScriptedEngine:
        scripted.model = model
        return scripted

    monkeypatch.setattr(annotate, "make_engine", make)
    return scripted


@pytest.fixture
def clips(tmp_path: Path) -> list[Path]:
    """Two cameras' views of one attempt."""
    return [write_gray(tmp_path / f"{name}.mp4", [200] * 30) for name in ("left", "right")]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Four episodes that nothing says the outcome of."""
    episodes = [EpisodeSpec(9), EpisodeSpec(7, index=2), EpisodeSpec(12, index=3), EpisodeSpec(5, index=8)]
    return write_dataset(tmp_path / "pick", cameras=CAMERAS, episodes=episodes, success_column=None)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_episode(scores: dict[str, str]):
    """A judge that gives each episode the score that it is told; "?" for an unreadable reply."""

    def answer(request: Request) -> Reply:
        said = scores[request.id]
        if said == "?":
            return Reply(texts=("?",))
        shares = dict.fromkeys("12345", 0.05) | {said: 0.8}
        return Reply(texts=(said,), probabilities=shares, mass=1.0)

    return answer


def test_a_video_is_judged_from_the_command_line(tmp_path: Path, clips: list[Path], engine: ScriptedEngine):
    out = tmp_path / "terminal.jsonl"
    said = succeeds("annotate", "terminal", "--video", *clips, "--task", "Shine.", "--output", out, "--model", "m")
    (row,) = rows_of(out)
    assert (row["id"], row["task"], row["score"], row["model"]) == ("left", "Shine.", 4, "m")
    assert "1 judged" in said
    assert engine.closed
    assert engine.asked[0].videos[0].frames.shape == (30, 48, 128, 3)
    again = succeeds("annotate", "terminal", "--video", *clips, "--task", "Shine.", "--output", out, "--model", "m")
    assert "0 judged, 1 had been already" in again
    assert len(engine.asked) == 1


def test_the_three_signals_go_through_jobs(tmp_path: Path, clips: list[Path], engine: ScriptedEngine):
    plain = {"id": "a", "task": "Shine.", "videos": ["left.mp4", "right.mp4"]}
    (tmp_path / "jobs.jsonl").write_text(json.dumps(plain) + "\n")
    (tmp_path / "rubric.jsonl").write_text(json.dumps(plain | {"rubric": RUBRIC, "cameras": ["l", "r"]}) + "\n")
    common = ["--model", "m"]
    succeeds("annotate", "dense", "--jobs", tmp_path / "jobs.jsonl", "--output", tmp_path / "d.jsonl", *common)
    assert rows_of(tmp_path / "d.jsonl")[0]["segments"] == [{"start": 0.0, "end": 3.0, "score": 3}]
    files = ["--jobs", tmp_path / "rubric.jsonl", "--output", tmp_path / "r.jsonl"]
    succeeds("annotate", "rubric", *files, "--num-samples", 3, "--keep-thinking", *common)
    (row,) = rows_of(tmp_path / "r.jsonl")
    assert (row["points"], row["total"], len(row["thinking"])) == ([0.4, 0.6], 1.0, 3)


def test_a_dry_run_says_what_would_be_asked_and_loads_no_engine(tmp_path: Path, clips: list[Path]):
    words = ["--video", *clips, "--task", "Shine.", "--dry-run", "--save-prompt-images", tmp_path / "seen"]
    said = succeeds("annotate", "terminal", *words)
    assert "left: 30 frames at 10 per second, 3.00 s (left 64x48, right 64x48)" in said
    assert "30 frames, 2 views as one picture of 128x48" in said
    assert '"Shine."' in said
    assert len(list((tmp_path / "seen/left").glob("*.png"))) == 30
    assert "1 windows (0.0-3.0 s), 12 frames each" in succeeds("annotate", "dense", *words[:-2])
    fields = tmp_path / "rubric.json"
    fields.write_text(json.dumps({"rubric": RUBRIC}))
    said = succeeds("annotate", "rubric", *words[:-2], "--rubric", fields)
    assert "2 videos of 6 frames (64x48, 64x48), 9 samples" in said


@pytest.mark.parametrize("dry", [True, False])
def test_a_look_at_the_pictures_passes_over_a_bad_video(
    tmp_path: Path, clips: list[Path], engine: ScriptedEngine, dry: bool
):
    names = ["gone.mp4", "left.mp4", "right.mp4"]
    jobs = [json.dumps({"id": name, "task": "Shine.", "videos": [name]}) for name in names]
    (tmp_path / "jobs.jsonl").write_text("\n".join(jobs))
    words = ["--output", tmp_path / "o.jsonl", "--save-prompt-images", tmp_path / "seen", "--model", "m"]
    done = regrasp("annotate", "terminal", "--jobs", tmp_path / "jobs.jsonl", *words, *(["--dry-run"] if dry else []))
    assert (done.code, done.err.count("gone.mp4: The video")) == (2, 1)
    assert sorted(path.name for path in (tmp_path / "seen").iterdir()) == ["left.mp4", "right.mp4"]
    assert ("Would judge 2 jobs" in done.out) == dry
    assert ("Shine." in done.out) == dry


def test_a_dry_run_over_a_dataset_needs_no_torch(dataset: Path):
    words = ["annotate", "dense", "--dataset", str(dataset), "--cameras", *CAMERAS, "--dry-run"]
    code = f"import sys; from regrasp.cli.main import main; main({words!r}); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pick/8: 5 frames at 30 per second" in done.stdout
    loaded = done.stdout.splitlines()[-1]
    assert [name for name in ("torch", "lerobot", "transformers", "httpx") if f"'{name}'" in loaded] == []


def test_a_datasets_scores_become_outcomes_and_returns(dataset: Path, engine: ScriptedEngine):
    engine.answer = by_episode({"pick/0": "5", "pick/2": "3", "pick/3": "4", "pick/8": "1"})
    cameras = ["--cameras", *reversed(CAMERAS)]
    said = succeeds("annotate", "terminal", "--dataset", dataset, *cameras, "--tag", "flora", "--model", "m")
    assert f"Next: regrasp outcomes --dataset {dataset} --from terminal:flora --success-at 4" in said
    succeeds("outcomes", "--dataset", dataset, "--from", "terminal:flora", "--success-at", 4)
    found = sidecar(dataset, "outcomes", "flora")
    assert found["episode_index"].tolist() == [0, 2, 3, 8]
    assert found["outcome"].tolist() == ["success", "failure", "success", "failure"]
    assert set(found["source"]) == {"terminal:flora"}
    made = read_provenance(dataset / "meta/outcomes_flora.parquet")
    assert made is not None
    assert (made.config["from"], made.config["success_at"], made.config["model"]) == ("terminal:flora", 4.0, "m")
    assert made.fingerprint == open_dataset(dataset).index().fingerprint
    succeeds("returns", "--rollouts", dataset, "--outcomes-tag", "flora", "--tag", "x", "--failure-penalty", 100)
    rewards = sidecar(dataset, "returns", "x")["reward"]
    assert rewards[[8, 15, 27, 32]].tolist() == [0, -100, 0, -100]  # the last frames of 9, 7, 12 and 5
    again = succeeds("outcomes", "--dataset", dataset, "--from", "terminal:flora", "--success-at", 4)
    assert "Already there" in again
    assert "success_at was 4.0 and is now 5.0" in refused(
        "outcomes", "--dataset", dataset, "--from", "terminal:flora", "--success-at", 5
    )


def test_an_invalid_score_is_an_unknown_outcome(dataset: Path, engine: ScriptedEngine):
    engine.answer = by_episode({"pick/0": "5", "pick/2": "?", "pick/3": "4"})
    words = ["--cameras", *CAMERAS, "--episodes", "0:4", "--tag", "j", "--model", "m"]
    succeeds("annotate", "terminal", "--dataset", dataset, *words)
    done = regrasp("outcomes", "--dataset", dataset, "--from", "terminal:j", "--success-at", 5)
    assert sidecar(dataset, "outcomes", "j")["outcome"].tolist() == ["success", "unknown", "failure"]
    assert "is unknown, of episodes 2" in done.err
    assert "1 episodes" in done.err  # episode 8 was not judged
    said = refused("returns", "--rollouts", dataset, "--outcomes-tag", "j", "--tag", "x")
    assert "2, 8" in said


def test_a_tag_is_one_judges(dataset: Path, engine: ScriptedEngine):
    words = ["annotate", "terminal", "--dataset", dataset, "--cameras", *CAMERAS, "--tag", "j"]
    succeeds(*words, "--model", "m")
    said = refused(*words, "--model", "other")
    assert f"(engine scripted, model m, profile generic@1, cameras {', '.join(CAMERAS)})" in said
    succeeds(*words, "--model", "other", "--overwrite")
    assert {row["model"] for row in rows_of(dataset / "meta/terminal_j.jsonl")} == {"other"}


def test_a_tag_is_of_one_camera_order_and_one_rubric(dataset: Path, tmp_path: Path, engine: ScriptedEngine):
    words = ["annotate", "terminal", "--dataset", dataset, "--tag", "j", "--model", "m", "--cameras"]
    succeeds(*words, *CAMERAS, "--episodes", "0,2")
    assert "written with other settings" in refused(*words, next(iter(CAMERAS)), "--episodes", "3")
    succeeds(*words, *CAMERAS, "--episodes", "3")
    assert len(rows_of(dataset / "meta/terminal_j.jsonl")) == 3
    (tmp_path / "rubric.json").write_text(json.dumps({"rubric": RUBRIC}))
    words = ["annotate", "rubric", "--dataset", dataset, "--cameras", *CAMERAS, "--tag", "j", "--model", "m"]
    words += ["--rubric", tmp_path / "rubric.json", "--num-samples", 1]
    succeeds(*words)
    (tmp_path / "rubric.json").write_text(json.dumps({"rubric": [RUBRIC[0] | {"action": "hold"}, RUBRIC[1]]}))
    assert "or another rubric" in refused(*words)
    succeeds(*words, "--overwrite")
    assert {row["steps"][0] for row in rows_of(dataset / "meta/rubric_j.jsonl")} == {"hold"}


def test_rows_of_another_version_of_the_dataset_are_refused(dataset: Path, engine: ScriptedEngine):
    words = ["annotate", "terminal", "--dataset", dataset, "--cameras", *CAMERAS, "--tag", "j", "--model", "m"]
    outcomes = ["outcomes", "--dataset", dataset, "--from", "terminal:j", "--success-at", 4]
    succeeds(*words)
    path = dataset / "meta/terminal_j.jsonl"
    fingerprint = open_dataset(dataset).index().fingerprint
    rows = [row | {"job": "of then"} for row in rows_of(path)]
    rows.append(rows[0] | {"id": "pick/9", "dataset": rows[0]["dataset"] | {"episode_index": 9}})  # which is gone
    path.write_text("".join(json.dumps(row).replace(fingerprint, "0" * len(fingerprint)) + "\n" for row in rows))
    assert "another version" in refused(*outcomes)
    succeeds(*words, "--episodes", "0,2")
    assert "judgement of pick/3, pick/8, made from another version" in refused(*outcomes)
    assert "2 judged, 2 had been already" in succeeds(*words)
    succeeds(*outcomes)
    assert pq.read_table(dataset / "meta/outcomes_j.parquet").num_rows == 4


def test_sidecars_and_a_copy_are_kept_elsewhere(dataset: Path, tmp_path: Path, engine: ScriptedEngine):
    before = snapshot(dataset)
    words = ["--cameras", *CAMERAS, "--tag", "j", "--model", "m", "--sidecars", tmp_path / "beside"]
    succeeds("annotate", "terminal", "--dataset", dataset, *words, "--output", tmp_path / "copy.jsonl")
    assert (tmp_path / "copy.jsonl").read_bytes() == (tmp_path / "beside/pick/terminal_j.jsonl").read_bytes()
    rest = ["--from", "terminal:j", "--success-at", 4, "--sidecars", tmp_path / "beside", "--tag", "k"]
    succeeds("outcomes", "--dataset", dataset, *rest)
    assert pq.read_table(tmp_path / "beside/pick/outcomes_k.parquet").num_rows == 4
    assert snapshot(dataset) == before


def test_where_nothing_could_be_judged_there_is_nothing_to_copy(dataset: Path, tmp_path: Path, engine: ScriptedEngine):
    for video in dataset.rglob("*.mp4"):
        video.unlink()
    words = ["annotate", "terminal", "--dataset", dataset, "--cameras", *CAMERAS, "--tag", "j", "--model", "m"]
    done = regrasp(*words, "--output", tmp_path / "copy.jsonl")
    assert (done.code, done.out.splitlines()[0]) == (2, "0 judged, 0 had been already, 4 without a row")
    assert not (tmp_path / "copy.jsonl").exists()
    assert "Next:" not in done.out


def test_the_model_may_come_from_the_environment(
    tmp_path: Path, clips: list[Path], engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
):
    words = ["annotate", "terminal", "--video", *clips, "--task", "x", "--output", tmp_path / "o.jsonl"]
    monkeypatch.delenv("REGRASP_JUDGE_MODEL", raising=False)
    assert "--model NAME, or set REGRASP_JUDGE_MODEL" in refused(*words)
    monkeypatch.setenv("REGRASP_JUDGE_MODEL", "from afar")
    succeeds(*words)
    assert rows_of(tmp_path / "o.jsonl")[0]["model"] == "from afar"


def test_a_job_without_a_row_ends_with_2_and_says_why(tmp_path: Path, clips: list[Path], engine: ScriptedEngine):
    jobs = [{"id": "good", "task": "x", "videos": ["left.mp4"]}, {"id": "bad", "task": "x", "videos": ["gone.mp4"]}]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    words = ["--jobs", tmp_path / "jobs.jsonl", "--output", tmp_path / "o.jsonl", "--model", "m"]
    done = regrasp("annotate", "terminal", *words)
    assert done.code == 2
    assert "1 judged, 0 had been already, 1 without a row" in done.out
    assert "gone.mp4" in done.err
    assert [row["id"] for row in rows_of(tmp_path / "o.jsonl")] == ["good"]


def test_what_cannot_be_meant_is_refused(tmp_path: Path, clips: list[Path], dataset: Path, engine: ScriptedEngine):
    out = ["--output", tmp_path / "o.jsonl", "--model", "m"]
    one = ["--video", *clips]
    before = snapshot(tmp_path)
    assert "found none" in refused("annotate", "terminal", *out)
    assert "found --video, --dataset" in refused("annotate", "terminal", *one, "--dataset", dataset, *out)
    assert "nothing is assumed" in refused("annotate", "terminal", *one, *out)
    assert "--tag does not go with --video" in refused("annotate", "terminal", *one, "--task", "x", "--tag", "t", *out)
    assert "Where are the rows" in refused("annotate", "dense", *one, "--task", "x", "--model", "m")
    assert "has no rubric" in refused("annotate", "rubric", *one, "--task", "x", *out)
    assert "at least 1" in refused("annotate", "rubric", *one, "--task", "x", "--num-samples", 0, *out)
    assert "at least 1" in refused("annotate", "dense", *one, "--task", "x", "--concurrency", 0, *out)
    assert "Did you mean" in refused("annotate", "dense", *one, "--task", "x", "--profile", "genric", *out)
    assert "'roboreward' does not ask" in refused(
        "annotate", "dense", *one, "--task", "x", "--profile", "roboreward", *out
    )
    assert "Name the cameras" in refused("annotate", "dense", "--dataset", dataset, *out)
    assert "file's name" in refused("annotate", "dense", "--dataset", dataset, "--cameras", *CAMERAS, "--tag", "a/b")
    assert "no terminal scores tagged 'x'" in refused(
        "outcomes", "--dataset", dataset, "--from", "terminal:x", "--success-at", 4
    )
    assert "--from is terminal:TAG" in refused("outcomes", "--dataset", dataset, "--from", "dense:x", "--success-at", 4)
    assert "--success-at is above 1" in refused(
        "outcomes", "--dataset", dataset, "--from", "terminal:x", "--success-at", 1
    )
    assert snapshot(tmp_path) == before


def test_a_profile_without_scores_gives_no_outcomes(dataset: Path, engine: ScriptedEngine):
    engine.answer = bright_is_good
    words = ["--cameras", *CAMERAS, "--tag", "t", "--model", "m", "--profile", "topreward"]
    succeeds("annotate", "terminal", "--dataset", dataset, *words)
    row = rows_of(dataset / "meta/terminal_t.jsonl")[0]
    assert row["score"] is None
    assert row["log_probability"] < 0
    said = refused("outcomes", "--dataset", dataset, "--from", "terminal:t", "--success-at", 4)
    assert "no scores from 1 to 5" in said


def test_episodes_are_numbers_and_spans():
    known = [0, 2, 3, 8]
    assert parse_episodes("0:3", known) == [0, 2]
    assert parse_episodes("3:", known) == [3, 8]
    assert parse_episodes(":", known) == known
    assert parse_episodes("8, 0:1", known) == [0, 8]
    assert parse_episodes("5", known) == [5]  # whether it is there is for the dataset to say
    assert parse_episodes(None, known) is None


def test_an_hour_is_judged_in_360_windows(tmp_path: Path, engine: ScriptedEngine):
    # one frame every 5 s, brighter and brighter
    clip = write_gray(tmp_path / "hour.mp4", [20 + k * 215 // 719 for k in range(720)], fps=0.2)
    words = ["--video", clip, "--task", "Shine.", "--model", "m"]
    assert "360 windows (0.0-16.0 s, 10.0-26.0 s, " in succeeds("annotate", "dense", *words, "--dry-run")
    succeeds("annotate", "dense", *words, "--output", tmp_path / "d.jsonl")
    (row,) = rows_of(tmp_path / "d.jsonl")
    # starts 0, 10, …, 3580 and 3584; 7200 half seconds, dark ones first
    assert (len(engine.asked), row["duration"], len(row["half_seconds"])) == (360, 3600.0, 7200)
    assert row["half_seconds"] == sorted(row["half_seconds"])
    assert [segment["score"] for segment in row["segments"]] == [1, 2, 3]
    succeeds("annotate", "terminal", *words, "--output", tmp_path / "t.jsonl")
    assert rows_of(tmp_path / "t.jsonl")[0]["frames"] == [[64]]
