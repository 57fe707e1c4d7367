"""Dense scores as rewards: worked by hand, and refused where they do not cover what is asked."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrasp.data.sidecar import read_provenance
from regrasp.recap.judge_rewards import earned_points, judged_tables, parse_rewards
from tests.datasets import EpisodeSpec, write_dataset
from tests.judge_rows import write_rows
from tests.stage_runs import keys, refused, sidecar, succeeds

EARNED = "the first moment from which on they are held, else the last frame"
MAP = "{1: -2, 2: -1.5, 3: -1}"


def write_scores(dataset: Path, tag: str, halves: dict[int, list[int | None]]) -> None:
    fields = {n: {"half_seconds": scores, "invalid": not any(scores)} for n, scores in halves.items()}
    write_rows(dataset, "dense", tag, fields)


def write_points(dataset: Path, tag: str, points: dict[int, list[float] | None]) -> None:
    write_rows(dataset, "rubric", tag, {n: {"points": own, "invalid": own is None} for n, own in points.items()})


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A success of 5 frames and a failure of 4, at 4 frames per second: two frames a half second."""
    return write_dataset(tmp_path / "d", fps=4, episodes=[EpisodeSpec(5), EpisodeSpec(4, success=False, index=3)])


def test_each_frame_costs_what_its_score_says(dataset: Path):
    write_scores(dataset, "j", {0: [3, 1, 2], 3: [2, 3]})
    common = ["--rollouts", dataset, "--rewards", "dense:j", "--map", MAP]
    succeeds("returns", *common, "--tag", "x", "--failure-penalty", 10)
    found = sidecar(dataset, "returns", "x")
    # success: 3 3 1 1 2 with its last frame at 0; failure: 2 2 3 3 with its last frame at -10
    assert found["reward"].tolist() == [-1, -1, -2, -2, 0, -1.5, -1.5, -1, -10]
    assert found["return"].tolist() == [-6, -5, -4, -2, 0, -14, -12.5, -11, -10]
    made = read_provenance(dataset / "meta/returns_x.parquet")
    assert made is not None
    assert (made.config["rewards"], made.config["map"]) == ("dense:j", MAP)
    assert "rewards" in made.inputs
    # task_horizon: the longest episode, 5 frames, at the dearest cost, 2: every failure stays below every success
    succeeds("returns", *common, "--tag", "y")
    assert sidecar(dataset, "returns", "y")["reward"].tolist()[-1] == -10


def test_a_score_of_normal_throughout_gives_the_plain_returns(dataset: Path):
    write_scores(dataset, "j", {0: [3, 3, 3], 3: [3, 3]})
    for gamma in (1.0, 0.9):
        succeeds("returns", "--rollouts", dataset, "--tag", f"plain{gamma}", "--gamma", gamma)
        words = ["--rewards", "dense:j", "--map", "{1: -1, 2: -1, 3: -1}"]
        succeeds("returns", "--rollouts", dataset, "--tag", f"judged{gamma}", "--gamma", gamma, *words)
        plain, judged = (sidecar(dataset, "returns", f"{name}{gamma}") for name in ("plain", "judged"))
        assert judged["reward"].tolist() == plain["reward"].tolist()
        assert judged["return"].tolist() == pytest.approx(plain["return"].tolist())


def test_other_scores_are_other_returns(dataset: Path):
    words = ["returns", "--rollouts", dataset, "--rewards", "dense:j", "--map", MAP, "--tag", "x"]
    write_scores(dataset, "j", {0: [3, 3, 3], 3: [3, 3]})
    succeeds(*words)
    assert "Already there" in succeeds(*words)
    write_scores(dataset, "j", {0: [3, 3, 3], 3: [3, 2]})
    assert "--overwrite" in refused(*words)


def test_a_rubrics_points_are_added_at_the_end(dataset: Path):
    write_points(dataset, "j", {0: [0.4, 0.6], 3: [0.25, 0]})
    common = ["--rollouts", dataset, "--rewards", "rubric:j", "--map", 20]
    succeeds("returns", *common, "--tag", "x", "--failure-penalty", 10)
    found = sidecar(dataset, "returns", "x")
    # success: full marks are worth 20 frames; failure: a quarter of them on top of -10
    assert found["reward"].tolist() == [-1, -1, -1, -1, 20, -1, -1, -1, -10 + 5]
    assert found["return"].tolist() == [16, 17, 18, 19, 20, -8, -7, -6, -5]
    made = read_provenance(dataset / "meta/returns_x.parquet")
    assert made is not None
    assert made.scale == {"scope": "task", "scales": {"put the cube in the box": [-8.0, 20.0]}}
    assert [made.config[name] for name in ("rewards", "map", "points_added_at")] == ["rubric:j", "20", EARNED]
    # task_horizon: 5 frames and the worth of full marks, so that a failure which earned all is no success
    write_points(dataset, "all", {0: [0, 0], 3: [0.4, 0.6]})
    succeeds("returns", *common[:2], "--rewards", "rubric:all", "--map", 20, "--tag", "y")
    returns = sidecar(dataset, "returns", "y")["return"]
    assert returns.tolist() == [-4, -3, -2, -1, 0, -8, -7, -6, -5]
    assert returns[5:].max() < returns[:5].min()


def test_points_are_added_where_they_were_first_held_for_good(dataset: Path):
    moments = [{"frames": 2, "points": [0.4, 0.6]}, {"frames": 3, "points": [0.4, 0.1]}, {"frames": 4, "points": None}]
    rows = {0: {"points": [0.4, 0.6], "moments": moments}, 3: {"points": [0, 0], "moments": moments}}
    write_rows(dataset, "rubric", "j", {n: {**row, "invalid": False} for n, row in rows.items()})
    words = ["--rewards", "rubric:j", "--map", 20, "--failure-penalty", 10]
    succeeds("returns", "--rollouts", dataset, *words, "--tag", "x")
    # success: after 2 frames 0.4 + 0.1 are held for good, which is 10; the rest, 0.5, only at the end, since it was
    # lost after 3. failure: all that it had was lost
    found = sidecar(dataset, "returns", "x")["reward"].tolist()
    assert found == pytest.approx([-1, -1 + 10, -1, -1, 10, -1, -1, -1, -10])


@given(
    st.integers(1, 30),
    st.lists(st.lists(st.sampled_from([0, 0.1, 0.5]), min_size=2, max_size=2), max_size=5),
    st.data(),
)
def test_earned_points_sum_up_to_the_total(length: int, marks: list[list[float]], data: st.DataObject):
    total = data.draw(st.lists(st.sampled_from([0, 0.1, 0.5]), min_size=2, max_size=2))
    moments = [{"frames": max(1, length * k // 6), "points": own} for k, own in enumerate(marks, 1)]
    earned = earned_points({"points": total, "moments": moments}, length)
    assert earned.sum() == pytest.approx(sum(total))
    assert (earned >= -1e-9).all()


def test_labels_come_from_returns_with_points_too(dataset: Path):
    write_points(dataset, "j", {0: [0.4, 0.6], 3: [0.25, 0]})
    words = ["--rewards", "rubric:j", "--map", 20, "--failure-penalty", 10]
    succeeds("returns", "--rollouts", dataset, *words, "--tag", "x")
    # exact values in the unit of the scale [-8, 20]: (G - 20)/28
    exact = (sidecar(dataset, "returns", "x")["return"].astype(np.float64) - 20) / 28
    table = pa.table({**keys(dataset), "value": exact.astype(np.float32)})
    pq.write_table(table, dataset / "meta/values_x.parquet")
    succeeds("advantages", "--rollouts", dataset, "--returns", "x", "--values", "x", "--tag", "x")
    assert sidecar(dataset, "advantages", "x")["advantage_continuous"] == pytest.approx(np.zeros(9), abs=1e-6)


def test_points_that_do_not_cover_the_run_are_refused(dataset: Path):
    write_points(dataset, "half", {0: [0.4, 0.6]})
    write_points(dataset, "mute", {0: [0.4, 0.6], 3: None})
    for tag in ("half", "mute"):
        said = refused("returns", "--rollouts", dataset, "--rewards", f"rubric:{tag}", "--map", 20, "--tag", "x")
        assert "episodes 3: not judged, or with an invalid reply" in said


def test_scores_that_do_not_cover_the_run_are_refused(dataset: Path):
    words = ["returns", "--rollouts", dataset, "--map", MAP, "--tag", "x", "--rewards"]
    assert "no dense scores tagged 'none'" in refused(*words, "dense:none")
    write_scores(dataset, "half", {0: [3, 3, 3]})
    assert "episodes 3" in refused(*words, "dense:half")
    write_scores(dataset, "holes", {0: [3, None, 3], 3: [3, 3]})
    assert "episodes 0" in refused(*words, "dense:holes")
    assert "does not go with --rewards" in refused(*words, "dense:half", "--failure-return", "flat")
    assert not list(dataset.glob("meta/returns_*"))


@pytest.mark.parametrize(
    ("source", "mapping"),
    [
        ("dense:j", None),
        (None, MAP),
        ("terminal:j", MAP),
        ("dense:", MAP),
        ("dense:j", "{1: -2, 2: -1}"),
        ("dense:j", "{1: -2, 2: -1, 3: 1}"),
        ("dense:j", "{1: -2, 2: -1, 3: .nan}"),
        ("dense:j", "{1: -2, 2: -1, 3: true}"),
        ("dense:j", "-1"),
        ("dense:j", "{"),
        ("dense:j", "100"),
        ("rubric:", "100"),
        ("rubric:j", None),
        ("rubric:j", MAP),
        ("rubric:j", "0"),
        ("rubric:j", "-1"),
        ("rubric:j", ".inf"),
        ("rubric:j", "true"),
    ],
)
def test_a_map_that_says_nothing_clear_is_refused(dataset: Path, source: str | None, mapping: str | None):
    words = [*(["--rewards", source] if source else []), *([f"--map={mapping}"] if mapping else [])]
    assert "--map" in refused("returns", "--rollouts", dataset, "--tag", "x", *words)


def test_without_either_flag_nothing_is_judged():
    assert parse_rewards(None, None) is None


def test_tables_run_from_the_end():
    episodes = [np.array([-1.0, -2.0, 0.0]), np.array([-3.0, 4.0])]
    rewards, returns = judged_tables(episodes, np.array([0.0, -9.0]), longest=3, discount=0.5)
    assert rewards.tolist() == [[0, -2, -1], [-5, -3, 0]]
    assert returns.tolist() == [[0, -2, -2], [-5, -5.5, -2.75]]
