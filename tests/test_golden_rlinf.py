"""What RLinf's own code gave for one dataset, in both layouts: the same returns, advantages and labels."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.stage_runs import refused, sidecar, snapshot, succeeds

GOLDEN = Path(__file__).parents[2] / "shared/golden"
RLINF = GOLDEN / "rlinf"
LABELLED = ("fail300_N10_q30", "fail300_N50_q30", "fail300_g097_N10_q30")
AS_RLINF = ("--scope", "global", "--pool", "all", "--ties", "positive", "--failure-end", "paid")
NUMBERS = ("advantage_continuous", "return", "value_current", "value_next", "reward_sum", "reward_sum_raw")

pytestmark = pytest.mark.skipif(not RLINF.is_dir(), reason=f"RLinf's files are not here: there is no folder {RLINF}")


@pytest.fixture(params=["synth_v21", "synth_v30"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A writable copy of the dataset, in either layout."""
    copy = tmp_path / "synth"
    shutil.copytree(GOLDEN / request.param, copy)
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return copy


def golden(kind: str, tag: str) -> dict[str, np.ndarray]:
    table = pq.read_table(RLINF / f"{kind}_{tag}.parquet")
    table = table.sort_by([("episode_index", "ascending"), ("frame_index", "ascending")])
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def setting(labelled: str) -> dict[str, float]:
    return json.loads((RLINF / f"advantages_{labelled}.json").read_text())


def give(dataset: Path, *names: str) -> None:
    """Put files of RLinf's beside the dataset, and nothing that says how they were made."""
    for name in names:
        shutil.copyfile(RLINF / f"{name}.parquet", dataset / f"meta/{name}.parquet")


def made_from(labelled: str) -> str:
    return labelled.split("_N")[0]


def test_returns_are_equal_to_the_last_bit_without_discount(dataset: Path) -> None:
    succeeds("returns", "--rollouts", dataset, "--tag", "x", "--failure-penalty", 300, "--scale", "global")
    mine, theirs = sidecar(dataset, "returns", "x"), golden("returns", "fail300")
    for name in ("episode_index", "frame_index", "return", "reward"):
        assert mine[name].dtype == theirs[name].dtype
        assert mine[name].tobytes() == theirs[name].tobytes()


def test_discounted_returns_are_equal_to_float32_rounding(dataset: Path) -> None:
    succeeds("returns", "--rollouts", dataset, "--tag", "x", "--failure-penalty", 300, "--gamma", 0.97)
    mine, theirs = sidecar(dataset, "returns", "x"), golden("returns", "fail300_g097")
    assert mine["reward"].tobytes() == theirs["reward"].tobytes()
    # RLinf rounds G to float32 at every step, and each rounding is discounted from then on: eps (1 + gamma + ...)
    np.testing.assert_allclose(mine["return"], theirs["return"], rtol=np.finfo(np.float32).eps / (1 - 0.97))
    exact, following = np.zeros(len(mine["reward"])), 0.0
    for t in reversed(range(len(exact))):
        last = t + 1 == len(exact) or mine["episode_index"][t + 1] != mine["episode_index"][t]
        following = exact[t] = float(mine["reward"][t]) + (0.0 if last else 0.97 * following)
    np.testing.assert_allclose(mine["return"], exact, rtol=np.finfo(np.float32).eps)


def test_demonstrations_are_successes_as_sft_data_is(dataset: Path) -> None:
    succeeds("returns", "--demos", dataset, "--tag", "x")
    mine, theirs = sidecar(dataset, "returns", "x"), golden("returns", "demo")
    assert mine["return"].tobytes() == theirs["return"].tobytes()


@pytest.mark.parametrize(("tag", "gamma"), [("fail300", 1), ("fail300_g097", 0.97)])
def test_the_statistics_that_update_meta_writes_are_rlinfs(dataset: Path, tag: str, gamma: float) -> None:
    flags = ("--failure-penalty", 300, "--gamma", gamma, "--update-meta")
    succeeds("returns", "--rollouts", dataset, "--tag", "x", *flags)
    stats, theirs = json.loads((dataset / "meta/stats.json").read_text()), json.loads(stats_file(tag))
    for name in ("return", "reward"):
        assert stats[name] == pytest.approx(theirs[name], rel=1e-6)


def stats_file(tag: str) -> str:
    return (RLINF / f"stats_{tag}.json").read_text()


@pytest.mark.parametrize("labelled", LABELLED)
def test_rlinfs_returns_and_values_give_rlinfs_labels(dataset: Path, labelled: str) -> None:
    tag, chosen = made_from(labelled), setting(labelled)
    give(dataset, f"returns_{tag}", f"values_{tag}")
    flags = ("--lookahead", int(chosen["lookahead"]), "--positive-fraction", chosen["positive_quantile"], *AS_RLINF)
    used = ("--returns", tag, "--values", tag, "--scale", "global", "--tag", "x")
    said = succeeds("advantages", "--rollouts", dataset, *used, *flags)
    assert f"gamma {chosen['gamma']:g}," in said
    mine, theirs = sidecar(dataset, "advantages", "x"), golden("advantages", labelled)
    assert mine["advantage"].tolist() == theirs["advantage"].tolist()
    assert mine["num_valid_rewards"].tolist() == theirs["num_valid_rewards"].tolist()
    for name in NUMBERS:
        np.testing.assert_allclose(mine[name], theirs[name], atol=1e-9, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("labelled", LABELLED)
def test_our_returns_and_rlinfs_values_give_rlinfs_labels(dataset: Path, labelled: str) -> None:
    tag, chosen = made_from(labelled), setting(labelled)
    give(dataset, f"values_{tag}")
    made = ("--failure-penalty", 300, "--gamma", chosen["gamma"], "--scale", "global")
    succeeds("returns", "--rollouts", dataset, "--tag", "ours", *made)
    flags = ("--lookahead", int(chosen["lookahead"]), "--positive-fraction", chosen["positive_quantile"], *AS_RLINF)
    succeeds("advantages", "--rollouts", dataset, "--returns", "ours", "--values", tag, "--tag", "x", *flags)
    mine, theirs = sidecar(dataset, "advantages", "x"), golden("advantages", labelled)
    assert mine["advantage"].tolist() == theirs["advantage"].tolist()
    np.testing.assert_allclose(mine["advantage_continuous"], theirs["advantage_continuous"], atol=1e-9)


@pytest.mark.parametrize("labelled", LABELLED)
def test_rlinfs_labels_can_be_relabelled_with_the_scale_that_their_rows_show(dataset: Path, labelled: str) -> None:
    chosen = setting(labelled)
    give(dataset, f"advantages_{labelled}")
    # what a later run with other data leaves behind; its range is not this tag's
    (dataset / "meta/mixture_config.yaml").write_text("global_return_min: -5.0\nglobal_return_max: 0.0\n")
    succeeds(
        "relabel", "--rollouts", dataset, "--source", labelled, "--tag", "x", "--positive-fraction", 0.3, *AS_RLINF
    )
    mine, theirs = sidecar(dataset, "advantages", "x"), golden("advantages", labelled)
    for name in ("advantage", "num_valid_rewards", *NUMBERS):
        assert mine[name].tolist() == theirs[name].tolist()
    provenance = json.loads(pq.read_metadata(dataset / "meta/advantages_x.parquet").metadata[b"regrasp"])
    assert provenance["scale"] == {"scope": "global", "scales": {"*": [chosen["return_min"], 0.0]}}


def test_rlinfs_labels_can_be_given_another_lookahead(dataset: Path) -> None:
    give(dataset, "advantages_fail300_N10_q30", "returns_fail300")
    words = ("relabel", "--rollouts", dataset, "--source", "fail300_N10_q30", "--positive-fraction", 0.3, *AS_RLINF)
    before = snapshot(dataset)
    assert "--returns TAG" in refused(*words, "--tag", "x", "--lookahead", 50)
    assert snapshot(dataset) == before
    succeeds(*words, "--tag", "x", "--lookahead", 50, "--returns", "fail300")
    mine, theirs = sidecar(dataset, "advantages", "x"), golden("advantages", "fail300_N50_q30")
    assert mine["advantage"].tolist() == theirs["advantage"].tolist()
    for name in NUMBERS:
        np.testing.assert_allclose(mine[name], theirs[name], atol=1e-9, rtol=1e-9, err_msg=name)


def test_rlinfs_discount_is_told_by_the_rows_for_another_lookahead(dataset: Path) -> None:
    give(dataset, "advantages_fail300_g097_N10_q30", "returns_fail300_g097")
    words = (
        "relabel",
        "--rollouts",
        dataset,
        "--source",
        "fail300_g097_N10_q30",
        "--positive-fraction",
        0.3,
        *AS_RLINF,
    )
    succeeds(*words, "--tag", "far", "--lookahead", 40, "--returns", "fail300_g097")
    back = ("relabel", "--rollouts", dataset, "--source", "far", "--tag", "back", "--lookahead", 10)
    assert "gamma 0.97" in succeeds(*back)
    mine, theirs = sidecar(dataset, "advantages", "back"), golden("advantages", "fail300_g097_N10_q30")
    assert mine["advantage"].tolist() == theirs["advantage"].tolist()
    np.testing.assert_allclose(mine["advantage_continuous"], theirs["advantage_continuous"], atol=1e-9)


def test_the_fraction_of_rlinfs_labels_is_read_from_the_mixture_file(dataset: Path) -> None:
    give(dataset, "advantages_fail300_N10_q30")
    words = ("relabel", "--rollouts", dataset, "--source", "fail300_N10_q30", "--tag", "x", *AS_RLINF)
    assert "--positive-fraction" in refused(*words)
    mixture = "tags:\n  fail300_N10_q30:\n    unified_threshold: 0.0345\n    positive_quantile: 0.3\n"
    (dataset / "meta/mixture_config.yaml").write_text(mixture)
    succeeds(*words)
    theirs = golden("advantages", "fail300_N10_q30")
    assert sidecar(dataset, "advantages", "x")["advantage"].tolist() == theirs["advantage"].tolist()


def test_rows_of_another_dataset_are_refused(dataset: Path) -> None:
    give(dataset, "returns_fail300")
    table = pq.read_table(RLINF / "values_fail300.parquet")
    pq.write_table(table.slice(0, table.num_rows - 7), dataset / "meta/values_fail300.parquet")
    before = snapshot(dataset)
    used = ("--returns", "fail300", "--values", "fail300", "--tag", "x")
    assert "does not have the rows" in refused("advantages", "--rollouts", dataset, *used)
    assert snapshot(dataset) == before
