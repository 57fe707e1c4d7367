"""The advantages stage: thresholds by task and pool, ties, what is positive by rule, and rows that are left out."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from tests.datasets import EpisodeSpec, write_dataset
from tests.stage_runs import (
    TASKS,
    Run,
    episodes,
    keys,
    make_labels,
    refused,
    regrasp,
    sidecar,
    snapshot,
    succeeds,
    write_run,
    write_values,
)

USED = ("--returns", "base", "--values", "base", "--tag")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return write_run(tmp_path)


def labels(run: Run, tag: str = "labels") -> dict[str, dict[str, np.ndarray]]:
    return {dataset.name: sidecar(dataset, "advantages", tag) for dataset in run.datasets}


def rows_of(run: Run, tag: str = "labels") -> dict[str, np.ndarray]:
    """All datasets' rows together, with the task, whether a person drove, and whether it is a demonstration."""
    parts = []
    for dataset in run.datasets:
        rows = sidecar(dataset, "advantages", tag)
        prompt = sidecar(dataset, "returns", "base")["prompt"]
        number, frame = rows["episode_index"], rows["frame_index"]
        drove = (number % 4 == 1) & (frame >= 2) & (frame < 6) & (dataset not in run.demos)
        demo = np.full(len(number), dataset in run.demos)
        parts.append({**rows, "task": prompt, "drove": drove, "demo": demo})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_advantages_are_the_worked_ones(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", episodes=[EpisodeSpec(5), EpisodeSpec(4, success=False)])
    values = np.array([-0.02, -0.01, -0.01, -0.005, 0, -0.9, -0.95, -0.97, -0.99], dtype=np.float32)
    write_values(dataset, "base")
    table = pq.read_table(dataset / "meta/values_base.parquet")
    pq.write_table(table.set_column(2, "value", [values]), dataset / "meta/values_base.parquet")
    make_labels(Run((), (dataset,)), "--lookahead", 2, returns=("--failure-penalty", 300))
    found = sidecar(dataset, "advantages", "labels")
    expected = [0.003399, -0.001601, 0.003399, 0.0017, 0, -0.076601, -0.046601, -0.023399, -0.000099]
    np.testing.assert_allclose(found["advantage_continuous"], expected, atol=1e-6)
    assert found["num_valid_rewards"].tolist() == [2, 2, 2, 2, 1, 2, 2, 2, 1]


@pytest.mark.parametrize("gamma", [1, 0.9])
@pytest.mark.parametrize("lookahead", [1, 3, 50])
def test_exact_values_have_no_advantage(run: Run, gamma: float, lookahead: int) -> None:
    succeeds("returns", *run.flags, "--tag", "base", "--gamma", gamma, "--scale", "global")
    low = min(sidecar(dataset, "returns", "base")["return"].min() for dataset in run.datasets)
    for dataset in run.datasets:
        table = pq.read_table(dataset / "meta/returns_base.parquet")
        exact = (table["return"].to_numpy() / -low).astype(np.float32)
        values = table.select(["episode_index", "frame_index"]).append_column("value", [exact])
        pq.write_table(values, dataset / "meta/values_base.parquet")
    succeeds("advantages", *run.flags, *USED, "labels", "--lookahead", lookahead)
    for rows in labels(run).values():
        np.testing.assert_allclose(rows["advantage_continuous"], 0, atol=1e-6)


@pytest.mark.parametrize("scope", ["task", "global"])
@pytest.mark.parametrize("pool", ["rollouts", "all"])
def test_thresholds_leave_the_fraction_of_each_pool_above(run: Run, scope: str, pool: str) -> None:
    make_labels(run, "--scope", scope, "--pool", pool, "--positive-fraction", 0.25)
    rows = rows_of(run)
    pooled = np.ones(len(rows["task"]), bool) if pool == "all" else ~rows["demo"] & ~rows["drove"]
    for task in TASKS:
        mine = (rows["task"] == task) if scope == "task" else np.ones(len(rows["task"]), bool)
        threshold = np.quantile(rows["advantage_continuous"][mine & pooled], 0.75)
        above = rows["advantage_continuous"] > threshold
        expected = above | rows["demo"] | rows["drove"]
        assert rows["advantage"][mine].tolist() == expected[mine].tolist()


@pytest.mark.parametrize("ties", ["negative", "positive"])
def test_ties_follow_the_flag_and_are_reported(run: Run, ties: str) -> None:
    for seed, dataset in enumerate(run.datasets):
        write_values(dataset, "base", seed=seed, choices=[-0.5])  # whole frames of one advantage
    said = make_labels(run, "--ties", ties, "--lookahead", 1, "--scope", "global", "--positive-fraction", 0.3)
    rows = rows_of(run)
    pooled = ~rows["demo"] & ~rows["drove"]
    advantage = rows["advantage_continuous"]
    threshold = np.quantile(advantage[pooled], 0.7)
    tied = int((advantage[pooled] == threshold).sum())
    assert tied > 100
    assert f"{tied} of them exactly at it" in said
    positive = rows["advantage"][pooled & (advantage == threshold)]
    assert positive.all() if ties == "positive" else not positive.any()


def test_auto_pools_the_rollouts_where_there_are_any_and_says_so(run: Run) -> None:
    assert "pool: rollouts (auto)" in make_labels(run)
    demos = Run(run.demos, ())
    assert "pool: all (auto)" in make_labels(demos, tag="demos")
    assert "no rollout dataset" in refused("advantages", *demos.flags, *USED, "x", "--pool", "rollouts")


def test_rollouts_need_no_demonstrations(run: Run) -> None:
    rollouts = Run((), run.rollouts)
    make_labels(rollouts)
    fractions = [rows["advantage"].mean() for rows in labels(rollouts).values()]
    assert all(0 < fraction < 1 for fraction in fractions)


def test_demonstrations_and_corrections_are_positive_unless_turned_off(run: Run) -> None:
    make_labels(run, "--overwrite")
    rows = rows_of(run)
    assert rows["advantage"][rows["demo"] | rows["drove"]].all()
    make_labels(run, "--no-demos-positive", tag="no_demos")
    rows = rows_of(run, "no_demos")
    assert 0 < rows["advantage"][rows["demo"]].mean() < 1
    assert rows["advantage"][rows["drove"]].all()
    make_labels(run, "--no-corrections-positive", tag="no_corrections")
    rows = rows_of(run, "no_corrections")
    assert rows["advantage"][rows["demo"]].all()
    assert 0 < rows["advantage"][rows["drove"]].mean() < 1


def test_the_column_of_corrections_can_be_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, intervention_column="my_takeover")
    assert "0 correction frames" in make_labels(run)
    done = regrasp("advantages", *run.flags, *USED, "named", "--correction-column", "my_takeover")
    drove = int(rows_of(run, "named")["drove"].sum())
    assert f"{drove} correction frames" in done.out
    assert "demo: has no column 'my_takeover'" in done.err
    rows = rows_of(run, "named")
    assert rows["advantage"][rows["drove"]].all()
    before = snapshot(tmp_path)
    said = refused("advantages", *run.flags, *USED, "typo", "--correction-column", "my_takover")
    assert "Did you mean 'my_takeover'?" in said
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("flags", [(), ("--gamma", 0.9), ("--failure-penalty", 0.1)])
def test_chunks_change_nothing(run: Run, flags: tuple[object, ...]) -> None:
    make_labels(run, returns=flags)
    before = [(dataset / "meta/advantages_labels.parquet").read_bytes() for dataset in run.datasets]
    whole = rows_of(run)
    for rows in (1, 17, 100):
        make_labels(run, "--chunk-rows", rows, returns=flags, tag=f"by_{rows}")
        chunked = rows_of(run, f"by_{rows}")
        assert all(np.array_equal(chunked[name], whole[name]) for name in whole)
    assert [(dataset / "meta/advantages_labels.parquet").read_bytes() for dataset in run.datasets] == before
    assert "Already there" in make_labels(run, "--chunk-rows", 5, returns=flags)


def test_both_layouts_get_the_same_labels(tmp_path: Path) -> None:
    tables = []
    for layout in ("v2.1", "v3.0"):
        run = write_run(tmp_path / layout, layout=layout)
        make_labels(run, "--lookahead", 7)
        tables.append([pq.read_table(dataset / "meta/advantages_labels.parquet") for dataset in run.datasets])
    assert all(old.equals(new) for old, new in zip(*tables, strict=True))


def test_the_order_of_datasets_does_not_matter(run: Run) -> None:
    make_labels(run)
    before = snapshot(*run.datasets)
    turned = Run(run.demos, run.rollouts[::-1])
    said = succeeds("advantages", *turned.flags, *USED, "labels")
    assert "Already there" in said
    assert snapshot(*run.datasets) == before


def test_next_values_may_be_left_undiscounted(run: Run) -> None:
    make_labels(run, "--lookahead", 3, returns=("--gamma", 0.5))
    make_labels(run, "--lookahead", 3, "--no-discount-next-value", returns=("--gamma", 0.5), tag="plain")
    discounted, plain = rows_of(run), rows_of(run, "plain")
    factor = 0.5 ** discounted["num_valid_rewards"]
    # A_plain - A = (1 - gamma^n) V_{t+n}, in raw units; value_next is (V - high) / width, and high is 0
    expected = (1 - factor) * discounted["value_next"]
    np.testing.assert_allclose(plain["advantage_continuous"] - discounted["advantage_continuous"], expected, atol=1e-9)


def test_excluded_episodes_are_left_out_everywhere(tmp_path: Path) -> None:
    specs = episodes(12, 4)
    specs[5] = EpisodeSpec(11, task=TASKS[2], success=None, interventions=((2, 6),))
    specs[9] = EpisodeSpec(8, task="only here", success=None, interventions=((2, 6),))
    dataset = write_dataset(tmp_path / "a", episodes=specs, success_column="is_success")
    none = write_dataset(tmp_path / "none", episodes=[EpisodeSpec(4, success=None)], success_column="is_success")
    run = Run((), (dataset, none))
    for one in run.datasets:
        write_values(one, "base")
    make_labels(run, returns=("--unknown", "exclude"))
    succeeds("relabel", *run.flags, "--source", "labels", "--tag", "less", "--positive-fraction", 0.1)
    succeeds("relabel", *run.flags, "--source", "labels", "--tag", "near", "--lookahead", 2)
    all_rows = keys(dataset)
    kept = ~np.isin(all_rows["episode_index"], [5, 9])
    for kind, tag in (("returns", "base"), ("advantages", "labels"), ("advantages", "less"), ("advantages", "near")):
        rows = sidecar(dataset, kind, tag)
        assert all(np.array_equal(rows[name], column[kept]) for name, column in all_rows.items())
        assert len(sidecar(none, kind, tag)["episode_index"]) == 0
    for tag in ("labels", "less", "near"):
        rows = sidecar(dataset, "advantages", tag)
        drove = (rows["episode_index"] % 4 == 1) & (rows["frame_index"] >= 2) & (rows["frame_index"] < 6)
        assert rows["advantage"][drove].all()
        assert not rows["advantage"].all()


def test_a_task_without_rollout_frames_is_refused_unless_all_of_it_is_positive_by_rule(tmp_path: Path) -> None:
    demo = write_dataset(tmp_path / "demo", episodes=[EpisodeSpec(4, task="demo only")], success_column=None)
    roll = write_dataset(tmp_path / "roll", episodes=episodes(5, 1))
    run = Run((demo,), (roll,))
    for dataset in run.datasets:
        write_values(dataset, "base")
    said = make_labels(run)
    assert "'demo only': none: no frame in the pool, all forced positive" in said
    assert sidecar(demo, "advantages", "labels")["advantage"].all()
    before = snapshot(tmp_path)
    said = refused("advantages", *run.flags, *USED, "x", "--no-demos-positive")
    assert "'demo only'" in said
    assert "--pool all" in said
    assert snapshot(tmp_path) == before
    succeeds("advantages", *run.flags, *USED, "x", "--no-demos-positive", "--pool", "all")


def test_single_frames_and_thousands_of_tasks(tmp_path: Path) -> None:
    specs = [EpisodeSpec(1 + number % 2, task=f"task {number}", success=bool(number % 3)) for number in range(2000)]
    dataset = write_dataset(tmp_path / "a", episodes=specs, row_groups="file")
    write_values(dataset, "base")
    said = make_labels(Run((), (dataset,)), returns=("--failure-penalty", 5, "--scale", "global"))
    assert "and 1992 more tasks" in said
    rows = sidecar(dataset, "advantages", "labels")
    # a task of one frame is never above its own threshold; of two frames the better one is
    alone = np.isin(rows["episode_index"], np.arange(0, 2000, 2))
    assert not rows["advantage"][alone].any()
    assert rows["advantage"][~alone].sum() == 1000


def test_a_huge_lookahead_is_the_monte_carlo_advantage(run: Run) -> None:
    make_labels(run, "--lookahead", 30, returns=("--gamma", 0.9))
    make_labels(run, "--lookahead", 10**30, returns=("--gamma", 0.9), tag="huge")
    assert rows_of(run, "huge")["advantage_continuous"].tolist() == rows_of(run)["advantage_continuous"].tolist()


def test_a_dry_run_reports_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    succeeds("returns", *run.flags, "--tag", "base", "--sidecars", tmp_path / "beside")
    for dataset in run.datasets:
        (dataset / "meta/values_base.parquet").rename(tmp_path / "beside" / dataset.name / "values_base.parquet")
    before = snapshot(tmp_path)
    said = succeeds("advantages", *run.flags, *USED, "x", "--dry-run", "--sidecars", tmp_path / "beside")
    assert "Positive frames" in said
    assert "Would write" in said
    assert snapshot(tmp_path) == before


def test_the_mixture_file_keeps_the_tags_of_earlier_runs(run: Run) -> None:
    make_labels(run)
    make_labels(run, "--scope", "global", "--positive-fraction", 0.2, tag="global")
    mixture = yaml.safe_load((run.rollouts[0] / "meta/mixture_config.yaml").read_text())
    assert set(mixture["tags"]) == {"labels", "global"}
    assert set(mixture["tags"]["labels"]["task_thresholds"]) == set(TASKS)
    assert mixture["tags"]["global"]["positive_quantile"] == 0.2
    rows = rows_of(run, "global")
    pooled = ~rows["demo"] & ~rows["drove"]
    threshold = mixture["tags"]["global"]["unified_threshold"]
    assert threshold == np.quantile(rows["advantage_continuous"][pooled], 0.8)
    assert [entry["name"] for entry in mixture["datasets"]] == ["demo", "first", "second rollouts"]


def test_what_the_labels_depend_on_is_what_another_config_means(run: Run) -> None:
    make_labels(run)
    said = refused("advantages", *run.flags, *USED, "labels", "--positive-fraction", 0.2)
    assert "positive_fraction was 0.3 and is now 0.2" in said
    said = refused("advantages", *Run((), run.rollouts).flags, *USED, "labels")
    assert "inputs have changed" in said
    succeeds("advantages", *run.flags, *USED, "labels", "--positive-fraction", 0.2, "--overwrite")


def test_returns_of_two_runs_are_not_mixed(run: Run) -> None:
    for rollout in run.rollouts:
        succeeds("returns", "--rollouts", rollout, "--tag", "base")
    said = refused("advantages", *Run((), run.rollouts).flags, *USED, "x")
    assert "made in different runs" in said


def test_a_dataset_without_the_chosen_column_keeps_its_known_one(tmp_path: Path) -> None:
    specs = [EpisodeSpec(12, interventions=((2, 6),)), EpisodeSpec(9, success=False)]
    known = write_dataset(tmp_path / "known", episodes=specs)
    human = write_dataset(tmp_path / "human", episodes=specs, intervention_column="human")
    run = Run((), (known, human))
    for one in run.datasets:
        write_values(one, "base")
    make_labels(run, "--correction-column", "human")
    for one in run.datasets:
        rows = sidecar(one, "advantages", "labels")
        assert rows["advantage"][2:6].all()


def test_keys_name_the_column_of_corrections(tmp_path: Path) -> None:
    specs = [EpisodeSpec(12, interventions=((2, 6),)), EpisodeSpec(9, success=False)]
    path = write_dataset(tmp_path / "d", episodes=specs, intervention_column="human")
    write_values(path, "base")
    entry = {"dataset_path": "d", "type": "rollout", "keys": {"human": "intervention"}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"train_data_paths": [entry]}))
    succeeds("returns", "--config", recipe, "--tag", "base")
    flags = ("--returns", "base", "--values", "base", "--tag", "labels", "--positive-fraction", 0.05)
    succeeds("advantages", "--config", recipe, *flags)
    assert sidecar(path, "advantages", "labels")["advantage"][2:6].all()


def test_waiting_for_a_time_limit_is_not_positive(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "a", episodes=[EpisodeSpec(20), EpisodeSpec(60, success=False)])
    write_values(dataset, "base")
    table = pq.read_table(dataset / "meta/values_base.parquet")
    # -120 is the least return. The success has A = 17/120 ... 36/120; a failure that is stuck has -90 in every
    # frame, the mean of -61 ... -120, so that its last 20 have 10/120 ... 29/120 if nothing is left after them,
    # and at most 0 else.
    values = np.concatenate([np.full(20, -0.3), np.full(60, -0.75)]).astype(np.float32)
    pq.write_table(table.set_column(2, "value", [values]), dataset / "meta/values_base.parquet")
    run = Run((), (dataset,))
    flags = ("--lookahead", 20, "--positive-fraction", 0.25)
    make_labels(run, *flags, tag="bounded", returns=("--failure-penalty", 61))
    used = ("--returns", "base", "--values", "base", "--tag", "paid", "--failure-end", "paid")
    succeeds("advantages", *run.flags, *used, *flags)
    bounded, paid = (sidecar(dataset, "advantages", tag)["advantage"] for tag in ("bounded", "paid"))
    assert bounded.tolist() == [True] * 20 + [False] * 60
    assert paid[-6:].all() and not paid[20:60].any()
    succeeds("relabel", *run.flags, "--source", "bounded", "--tag", "again", "--failure-end", "paid")
    assert sidecar(dataset, "advantages", "again")["advantage"].tolist() == paid.tolist()
