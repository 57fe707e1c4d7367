"""The relabel stage: what labelling would have given, from the stored values alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stage_runs import Run, make_labels, refused, regrasp, sidecar, snapshot, succeeds, write_run, write_values

SETTINGS = {
    "positive_fraction": st.sampled_from([0.1, 0.3, 0.5, 0.9]),
    "lookahead": st.sampled_from([1, 4, 50, 1000]),
    "scope": st.sampled_from(["task", "global"]),
    "pool": st.sampled_from(["auto", "rollouts", "all"]),
    "ties": st.sampled_from(["negative", "positive"]),
    "discount_next_value": st.booleans(),
    "demos_positive": st.booleans(),
    "corrections_positive": st.booleans(),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = write_run(tmp_path_factory.mktemp("run"))
    make_labels(run, returns=("--gamma", 0.95), tag="source")
    return run


def flags(chosen: dict[str, Any]) -> list[object]:
    found: list[object] = []
    for name, value in chosen.items():
        flag = name.replace("_", "-")
        found += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", value]
    return found


def columns(run: Run, tag: str) -> list[dict[str, np.ndarray]]:
    return [sidecar(dataset, "advantages", tag) for dataset in run.datasets]


def same(one: list[dict[str, np.ndarray]], other: list[dict[str, np.ndarray]]) -> bool:
    return all(
        mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(one, other, strict=True)
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.fixed_dictionaries({}, optional=SETTINGS), st.sampled_from([1, 40, 1 << 17]))
def test_relabelling_gives_what_labelling_gave(run: Run, chosen: dict[str, Any], rows: int) -> None:
    used = ("--returns", "base", "--values", "base")
    succeeds("advantages", *run.flags, *used, "--tag", "labelled", "--overwrite", *flags(chosen))
    again = ["--source", "source", "--tag", "relabelled", "--overwrite", "--chunk-rows", rows]
    succeeds("relabel", *run.flags, *again, *flags(chosen))
    assert same(columns(run, "relabelled"), columns(run, "labelled"))


def test_what_is_left_out_stays_as_it_was(run: Run) -> None:
    chosen = ("--lookahead", 3, "--scope", "global", "--ties", "positive", "--no-demos-positive", "--pool", "all")
    make_labels(run, *chosen, returns=("--gamma", 0.95), tag="odd")
    succeeds("relabel", *run.flags, "--source", "odd", "--tag", "odd_again")
    assert same(columns(run, "odd_again"), columns(run, "odd"))


def test_relabelling_a_relabelling_goes_all_the_way_back(run: Run) -> None:
    succeeds(
        "relabel", *run.flags, "--source", "source", "--tag", "there", "--lookahead", 2, "--positive-fraction", 0.6
    )
    succeeds("relabel", *run.flags, "--source", "there", "--tag", "back", "--lookahead", 50, "--positive-fraction", 0.3)
    assert same(columns(run, "back"), columns(run, "source"))


@pytest.mark.parametrize("scope", ["task", "global"])
def test_demonstrations_and_corrections_stay_positive(run: Run, scope: str) -> None:
    for extra, kept in (((), True), (("--no-demos-positive", "--no-corrections-positive"), False)):
        tag = f"low_{scope}_{kept}"
        wanted = ("--positive-fraction", 0.01, "--scope", scope)
        succeeds("relabel", *run.flags, "--source", "source", "--tag", tag, *wanted, *extra)
        demo, first, _ = columns(run, tag)
        drove = (first["episode_index"] % 4 == 1) & (first["frame_index"] >= 2) & (first["frame_index"] < 6)
        assert demo["advantage"].all() == kept
        assert first["advantage"][drove].all() == kept
        assert first["advantage"][~drove].mean() < 0.1


def test_another_discount_uses_the_stored_values(run: Run) -> None:
    succeeds("relabel", *run.flags, "--source", "source", "--tag", "plain", "--gamma", 1, "--lookahead", 4)
    rows = columns(run, "plain")[1]
    assert rows["reward_sum_raw"].tolist() == np.rint(rows["reward_sum_raw"]).tolist()
    advantage = rows["reward_sum"] + rows["value_next"] - rows["value_current"]
    np.testing.assert_allclose(rows["advantage_continuous"], advantage, atol=1e-12)


def test_a_subset_of_the_datasets_has_thresholds_of_its_own(run: Run) -> None:
    alone = Run((), run.rollouts[:1])
    succeeds("relabel", *alone.flags, "--source", "source", "--tag", "alone", "--scope", "global")
    rows = columns(alone, "alone")[0]
    drove = (rows["episode_index"] % 4 == 1) & (rows["frame_index"] >= 2) & (rows["frame_index"] < 6)
    threshold = np.quantile(rows["advantage_continuous"][~drove], 0.7)
    assert rows["advantage"].tolist() == ((rows["advantage_continuous"] > threshold) | drove).tolist()


def test_a_datasets_own_files_are_never_touched(tmp_path: Path) -> None:
    run = write_run(tmp_path / "data")
    make_labels(run)
    before = snapshot(*run.datasets)
    beside = tmp_path / "beside"
    for dataset in run.datasets:
        (beside / dataset.name).mkdir(parents=True)
        for file in (dataset / "meta").glob("*_*.parquet"):
            (beside / dataset.name / file.name).write_bytes(file.read_bytes())
    succeeds("relabel", *run.flags, "--source", "labels", "--tag", "x", "--lookahead", 2, "--sidecars", beside)
    assert snapshot(*run.datasets) == before


def test_the_source_tag_needs_overwrite(run: Run) -> None:
    said = refused("relabel", *run.flags, "--source", "source", "--tag", "source")
    assert "another tag" in said


def test_a_dry_run_writes_nothing(run: Run) -> None:
    before = snapshot(*run.datasets)
    said = succeeds("relabel", *run.flags, "--source", "source", "--tag", "dry", "--lookahead", 9, "--dry-run")
    assert "Would write" in said
    assert snapshot(*run.datasets) == before


def test_labels_of_different_runs_are_not_taken_for_one(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    make_labels(run)
    one, other = (Run((), (rollout,)) for rollout in run.rollouts)
    used = ("--returns", "base", "--values", "base", "--tag", "apart")
    succeeds("advantages", *one.flags, *used, "--lookahead", 5)
    succeeds("advantages", *other.flags, *used, "--lookahead", 6)
    both = Run((), run.rollouts)
    said = refused("relabel", *both.flags, "--source", "apart", "--tag", "x")
    assert "lookahead is 5" in said
    # a flag that decides is enough, and whichever dataset agrees with it already
    for lookahead in (5, 6):
        succeeds("relabel", *both.flags, "--source", "apart", "--tag", f"n{lookahead}", "--lookahead", lookahead)
        succeeds("advantages", *both.flags, *used[:-1], f"labelled{lookahead}", "--lookahead", lookahead)
        assert same(columns(both, f"n{lookahead}"), columns(both, f"labelled{lookahead}"))


def test_a_column_of_corrections_that_is_gone_is_missed(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    make_labels(run)
    for file in run.rollouts[0].glob("data/*/*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns(["intervention"]), file)
    said = refused("relabel", *run.flags, "--source", "labels", "--tag", "x", "--positive-fraction", 0.2)
    assert "'intervention'" in said


def test_rewards_of_returns_that_were_made_again_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for dataset in run.datasets:
        write_values(dataset, "base")
    make_labels(run)
    succeeds("returns", *run.flags, "--tag", "base", "--failure-penalty", 30, "--overwrite")
    message = refused("relabel", *run.flags, "--source", "labels", "--tag", "near", "--lookahead", 2)
    assert "made again" in message
    named = refused("relabel", *run.flags, "--source", "labels", "--tag", "near", "--lookahead", 2, "--returns", "base")
    assert "another scale" in named
    succeeds("relabel", *run.flags, "--source", "labels", "--tag", "less", "--positive-fraction", 0.1)


def test_another_discount_than_the_source_s_is_said(run: Run) -> None:
    done = regrasp("relabel", *run.flags, "--source", "source", "--tag", "said", "--gamma", 0.5, "--dry-run")
    assert done.code == 0, done.err
    assert "gamma 0.95" in done.err
