"""Outcomes that say nothing are said to say nothing, in returns and in labels."""

from pathlib import Path

import pytest

from regrasp.recap.outcome_signal import one_sided
from tests.datasets import EpisodeSpec, write_dataset
from tests.stage_runs import Run, make_labels, succeeds, write_values


def episodes(*outcomes: bool, task: str = "lift the cup") -> list[EpisodeSpec]:
    return [EpisodeSpec(5 + n, task=task, success=success) for n, success in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ((False, False, False), "No episode of 'lift the cup' is a success: outcomes give its labels no signal"),
        ((True, True, True), "No episode of 'lift the cup' is a failure: outcomes give its labels no signal"),
        ((True, False, True), None),
    ],
)
def test_it_is_said_where_all_attempts_ended_alike(tmp_path: Path, outcomes: tuple[bool, ...], said: str | None):
    dataset = write_dataset(tmp_path / "a", episodes=episodes(*outcomes), camera_kind="none")
    returns = succeeds("returns", "--rollouts", dataset, "--tag", "shown")
    write_values(dataset, "base")
    labels = make_labels(Run((), (dataset,)), "--lookahead", 2)
    for shown in (returns, labels):
        assert ("no signal" in shown) is (said is not None)
        assert said is None or said in shown


def test_each_task_is_looked_at_by_itself_and_demonstrations_are_successes(tmp_path: Path):
    mixed = [*episodes(False, False), *episodes(True, False, task="close the lid")]
    rollouts = write_dataset(tmp_path / "a", episodes=mixed, camera_kind="none")
    said = succeeds("returns", "--rollouts", rollouts, "--tag", "alone")
    assert "No episode of 'lift the cup' is a success" in said
    assert "close the lid' is" not in said
    demos = write_dataset(tmp_path / "demos", episodes=episodes(True), camera_kind="none")
    assert "no signal" not in succeeds("returns", "--demos", demos, "--rollouts", rollouts, "--tag", "both")


def test_many_tasks_are_counted_and_unknown_outcomes_say_nothing():
    lines = one_sided([(f"task {n}", "failure") for n in range(7)])
    assert len(lines) == 5
    assert lines[-1] == "The same holds for 3 more tasks."
    assert one_sided([("t", "failure"), ("t", "unknown")]) == []
