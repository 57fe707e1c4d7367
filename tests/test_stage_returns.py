"""The returns stage: rewards and returns of every frame, as the user named outcomes and penalties."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.datasets import EpisodeSpec, write_dataset
from tests.stage_runs import TASKS, Run, refused, regrasp, sidecar, snapshot, succeeds, write_run

FIVE_AND_FIVE = [EpisodeSpec(5), EpisodeSpec(5, success=False)]


def returns_of(dataset: Path, *flags: object, tag: str = "base") -> list[float]:
    succeeds("returns", "--rollouts", dataset, "--tag", tag, *flags)
    return sidecar(dataset, "returns", tag)["return"].tolist()


def test_returns_are_the_worked_ones(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", episodes=FIVE_AND_FIVE)
    expected = [-4, -3, -2, -1, 0, -304, -303, -302, -301, -300]
    assert returns_of(dataset, "--failure-penalty", 300) == expected
    # task_horizon: the longest episode of the task is 5
    assert returns_of(dataset, tag="horizon")[5:] == [-9, -8, -7, -6, -5]
    assert sidecar(dataset, "returns", "horizon")["reward"].tolist() == [-1, -1, -1, -1, 0, -1, -1, -1, -1, -5]


def test_discounted_returns_are_the_worked_ones(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", episodes=[EpisodeSpec(4), EpisodeSpec(4, success=False)])
    found = returns_of(dataset, "--failure-penalty", 10, "--gamma", 0.9)
    np.testing.assert_allclose(found, [-2.71, -1.9, -1, 0, -10, -10, -10, -10], rtol=1e-7)


def test_a_single_frame_has_a_return(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", episodes=[EpisodeSpec(1), EpisodeSpec(1, success=False)])
    assert returns_of(dataset, "--failure-penalty", 300) == [0, -300]


def test_a_flat_failure_has_one_return_everywhere(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", episodes=FIVE_AND_FIVE)
    found = returns_of(dataset, "--failure-return", "flat", "--failure-penalty", 300)
    assert found == [-4, -3, -2, -1, 0, -300, -300, -300, -300, -300]


@pytest.mark.parametrize("gamma", [0, 0.5, 1])
def test_rewards_and_returns_obey_the_recursion(tmp_path: Path, gamma: float) -> None:
    run = write_run(tmp_path)
    succeeds("returns", *run.flags, "--tag", "base", "--gamma", gamma)
    for dataset in run.datasets:
        rows = sidecar(dataset, "returns", "base")
        inside = rows["episode_index"][1:] == rows["episode_index"][:-1]
        following = np.where(inside, rows["return"][1:], 0).astype(np.float64)
        np.testing.assert_allclose(rows["return"][:-1], rows["reward"][:-1] + gamma * following, rtol=1e-6, atol=1e-6)


def test_the_horizon_counts_all_datasets_of_the_run(tmp_path: Path) -> None:
    long = write_dataset(tmp_path / "long", episodes=[EpisodeSpec(20)])
    short = write_dataset(tmp_path / "short", episodes=[EpisodeSpec(3, success=False), EpisodeSpec(7, task="other")])
    succeeds("returns", "--demos", long, "--rollouts", short, "--tag", "base")
    assert sidecar(short, "returns", "base")["reward"].tolist() == [-1, -1, -20, *[-1] * 6, 0]


def test_both_layouts_get_the_same_rows(tmp_path: Path) -> None:
    tables = []
    for layout in ("v2.1", "v3.0"):
        run = write_run(tmp_path / layout, layout=layout)
        succeeds("returns", *run.flags, "--tag", "base", "--gamma", 0.97)
        tables.append([pq.read_table(dataset / "meta/returns_base.parquet") for dataset in run.datasets])
    assert all(old.equals(new) for old, new in zip(*tables, strict=True))


def test_every_frame_has_its_task_and_rows_are_sorted(tmp_path: Path) -> None:
    dataset = write_dataset(
        tmp_path / "a",
        episodes=[EpisodeSpec(3, task=TASKS[2], index=7), EpisodeSpec(2, task=TASKS[0], index=9)],
        shuffle_rows=True,
    )
    succeeds("returns", "--rollouts", dataset, "--tag", "base")
    rows = sidecar(dataset, "returns", "base")
    assert rows["prompt"].tolist() == [TASKS[2]] * 3 + [TASKS[0]] * 2
    assert rows["episode_index"].tolist() == [7, 7, 7, 9, 9]
    assert rows["frame_index"].tolist() == [0, 1, 2, 0, 1]


def test_outcomes_may_be_given_in_a_file(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", episodes=[EpisodeSpec(2, success=None), EpisodeSpec(2)])
    given = tmp_path / "outcomes.csv"
    given.write_text("episode_index,outcome\n0,failure\n1,failure\n")
    assert returns_of(dataset, "--failure-penalty", 9, "--outcomes", given) == [-10, -9, -10, -9]


def test_outcomes_for_two_datasets_name_each(tmp_path: Path) -> None:
    one = write_dataset(tmp_path / "one", episodes=[EpisodeSpec(2)])
    two = write_dataset(tmp_path / "two", episodes=[EpisodeSpec(2)])
    given = tmp_path / "outcomes.parquet"
    pq.write_table(pa.table({"dataset": ["two"], "episode_index": [0], "outcome": [False]}), given)
    succeeds("returns", "--rollouts", one, two, "--tag", "base", "--outcomes", given, "--failure-penalty", 9)
    assert sidecar(one, "returns", "base")["return"].tolist() == [-1, 0]
    assert sidecar(two, "returns", "base")["return"].tolist() == [-10, -9]


def test_unknown_outcomes_stop_with_the_episodes_or_are_left_out(tmp_path: Path) -> None:
    episodes = [EpisodeSpec(2), EpisodeSpec(3, success=None), EpisodeSpec(2, success=False)]
    dataset = write_dataset(tmp_path / "a", episodes=episodes, success_column="is_success")
    said = refused("returns", "--rollouts", dataset, "--tag", "base")
    assert "1 of 3 episodes" in said
    assert "null" in said
    assert "--outcomes" in said
    succeeds("returns", "--rollouts", dataset, "--tag", "base", "--unknown", "exclude")
    assert sidecar(dataset, "returns", "base")["episode_index"].tolist() == [0, 0, 2, 2]


def test_the_same_tag_again_is_already_there(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", episodes=FIVE_AND_FIVE)
    returns_of(dataset)
    before = snapshot(dataset)
    assert "Already there" in succeeds("returns", "--rollouts", dataset, "--tag", "base")
    assert snapshot(dataset) == before


def test_another_config_needs_overwrite(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", episodes=FIVE_AND_FIVE)
    returns_of(dataset)
    said = refused("returns", "--rollouts", dataset, "--tag", "base", "--gamma", 0.5)
    assert "gamma was 1.0 and is now 0.5" in said
    assert "--overwrite" in said
    assert returns_of(dataset, "--gamma", 0.5, "--overwrite")[:2] == [-1.875, -1.75]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", episodes=FIVE_AND_FIVE)
    before = snapshot(tmp_path)
    out = succeeds("returns", "--rollouts", dataset, "--tag", "base", "--dry-run", "--sidecars", tmp_path / "new")
    assert "Would write" in out
    assert snapshot(tmp_path) == before


def test_statistics_go_into_the_dataset_only_when_asked(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", episodes=FIVE_AND_FIVE)
    stats = json.loads((dataset / "meta/stats.json").read_text())
    returns_of(dataset, "--failure-penalty", 300)
    assert json.loads((dataset / "meta/stats.json").read_text()) == stats
    # also where the returns are there already
    succeeds("returns", "--rollouts", dataset, "--tag", "base", "--failure-penalty", 300, "--update-meta")
    now = json.loads((dataset / "meta/stats.json").read_text())
    assert now.pop("return") == {"mean": -152.0, "std": pytest.approx(150.0067, abs=1e-4), "min": -304.0, "max": 0.0}
    assert now.pop("reward")["min"] == -300.0
    assert now == stats


def test_a_dataset_without_any_known_outcome_is_left_out_whole(tmp_path: Path) -> None:
    run = Run(
        (), (write_dataset(tmp_path / "a", episodes=FIVE_AND_FIVE), write_dataset(tmp_path / "b", success_column=None))
    )
    done = regrasp("returns", *run.flags, "--tag", "base", "--unknown", "exclude")
    assert done.code == 0
    assert "b': " not in done.out
    assert "left out" in done.err
    assert len(sidecar(run.rollouts[1], "returns", "base")["return"]) == 0
