"""Values as progress, in the schema that LeRobot's own weighting reads."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrasp.cli.main import main
from regrasp.core.provenance import Provenance
from regrasp.data.dataset import Dataset, open_dataset
from regrasp.data.sidecar import SidecarWriter, read_provenance, sidecar_path
from regrasp.data.storage import Transaction
from regrasp.recap.judge_progress import headway_progress
from tests.datasets import EpisodeSpec, write_dataset
from tests.judge_rows import write_rows
from tests.stage_runs import refused, regrasp, succeeds


def write_values(dataset: Dataset) -> np.ndarray:
    """Write values that fall from -0.1 by 0.01 a row, and return them."""
    index = dataset.index()
    episode, frame = index.keys(np.arange(len(index.length)))
    values = (-0.1 - 0.01 * np.arange(len(episode))).astype(np.float32)
    with Transaction() as transaction:
        writer = SidecarWriter(transaction, sidecar_path(dataset, "values", "v"), "values")
        writer.write({"episode_index": episode, "frame_index": frame, "value": values})
        writer.close(Provenance(stage="value predict", config={}, fingerprint=index.fingerprint))
        transaction.commit()
    return values


@pytest.mark.parametrize("dropped", [(), ("index",)])
def test_progress_is_the_value_plus_one_under_the_dataset_s_own_index(tmp_path: Path, dropped: tuple[str, ...]) -> None:
    path = write_dataset(
        tmp_path / "d", episodes=[EpisodeSpec(5), EpisodeSpec(4, index=7)], cameras={}, drop_columns=dropped
    )
    values = write_values(open_dataset(path))
    assert main(["progress", "--rollouts", str(path), "--values", "v", "--tag", "p"]) == 0
    table = pq.read_table(path / "meta" / "progress_p.parquet")
    assert table.column_names == ["index", "episode_index", "frame_index", "progress_sparse"]
    assert table["index"].to_pylist() == list(range(9))
    assert table["episode_index"].to_pylist() == [0] * 5 + [7] * 4
    np.testing.assert_allclose(table["progress_sparse"].to_numpy(), values + 1, rtol=0, atol=1e-6)
    metadata = pq.ParquetFile(path / "meta" / "progress_p.parquet").metadata.metadata
    assert metadata[b"reward_model_path"] == b"regrasp value v"
    assert json.loads(metadata[b"regrasp"])["notes"]["tags"] == {"values": "v"}


def test_stock_lerobot_weights_frames_by_it(tmp_path: Path) -> None:
    rabc = pytest.importorskip("lerobot.rewards.sarm.rabc")
    path = write_dataset(tmp_path / "d", episodes=[EpisodeSpec(6), EpisodeSpec(6)], cameras={})
    write_values(open_dataset(path))
    assert main(["progress", "--rollouts", str(path), "--values", "v", "--tag", "p"]) == 0
    weights = rabc.RABCWeights(progress_path=path / "meta" / "progress_p.parquet", chunk_size=2, head_mode="sparse")
    assert weights.get_stats()["num_frames"] == 12


MAP = "{1: 0, 2: 0.5, 3: 1}"


def judged(tmp_path: Path) -> Path:
    """Two episodes at 4 frames per second: of 5 frames, half seconds 3, 1 and 2, and of 4, half seconds 1 and 1."""
    path = write_dataset(tmp_path / "d", fps=4, episodes=[EpisodeSpec(5), EpisodeSpec(4, index=7)], cameras={})
    halves = {0: [3, 1, 2], 7: [1, 1]}
    write_rows(path, "dense", "j", {n: {"half_seconds": own, "invalid": False} for n, own in halves.items()})
    write_rows(path, "terminal", "j", {n: {"progress": p, "invalid": False} for n, p in {0: 0.8, 7: 0.0}.items()})
    return path


@pytest.mark.parametrize(
    ("words", "expected", "rule"),
    [
        # a terminal score alone: 0.8 and 0, in equal parts
        (["terminal:j"], [0.16, 0.32, 0.48, 0.64, 0.8, 0, 0, 0, 0], "the end's progress, shared out evenly"),
        # headway 1 1 0 0 .5 of 5 frames, 0 0 0 0 of 4
        (["dense:j", "--map", MAP], [0.2, 0.4, 0.4, 0.4, 0.5, 0, 0, 0, 0], "headway, summed up"),
        # 0.8 by the same headway, 2.5 in all
        (
            ["dense:j", "terminal:j", "--map", MAP],
            [0.32, 0.64, 0.64, 0.64, 0.8, 0, 0, 0, 0],
            "the end's progress, shared out by headway",
        ),
    ],
)
def test_a_judges_scores_are_progress(tmp_path: Path, words: list[str], expected: list[float], rule: str) -> None:
    path = judged(tmp_path)
    succeeds("progress", "--rollouts", path, "--tag", "p", "--scores", *words)
    table = pq.read_table(path / "meta" / "progress_p.parquet")
    assert table.column_names == ["index", "episode_index", "frame_index", "progress_sparse"]
    assert table["progress_sparse"].to_pylist() == pytest.approx(expected)
    made = read_provenance(path / "meta" / "progress_p.parquet")
    assert made is not None
    assert made.config["rule"] == rule
    assert "Already there" in succeeds("progress", "--rollouts", path, "--tag", "p", "--scores", *words)


def test_stock_lerobot_weights_frames_by_a_judges_progress(tmp_path: Path) -> None:
    rabc = pytest.importorskip("lerobot.rewards.sarm.rabc")
    path = judged(tmp_path)
    succeeds("progress", "--rollouts", path, "--tag", "p", "--scores", "dense:j", "terminal:j", "--map", MAP)
    weights = rabc.RABCWeights(progress_path=path / "meta" / "progress_p.parquet", chunk_size=1, head_mode="sparse")
    assert weights.get_stats()["num_frames"] == 9
    # the next frame makes headway after frame 0, and none after frame 1
    first, second = weights.compute_batch_weights({"index": np.array([0, 1])})[0].tolist()
    assert first > second


def test_episodes_that_a_judge_says_nothing_of_are_left_out_and_named(tmp_path: Path) -> None:
    path = judged(tmp_path)
    write_rows(path, "terminal", "j", {0: {"progress": 0.5, "invalid": False}})
    write_rows(path, "terminal", "odd", {n: {"progress": 0.5, "invalid": False} for n in (0, 7)})
    for words in (["terminal:j"], ["terminal:odd", "dense:j", "--map", MAP]):
        done = regrasp("progress", "--rollouts", path, "--tag", words[0][9:], "--scores", *words)
        assert "1 episodes of" in done.err
        assert "full weight: 7" in done.err
    assert set(pq.read_table(path / "meta" / "progress_j.parquet")["episode_index"].to_pylist()) == {0}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--values TAG, or from --scores"),
        (["--values", "v", "--scores", "terminal:j"], "give one of them"),
        (["--values", "v", "--map", MAP], "does not go with --values"),
        (["--scores", "rubric:j"], "found rubric:j"),
        (["--scores", "terminal:j", "terminal:k"], "found terminal:j"),
        (["--scores", "terminal:"], "found terminal:"),
        (["--scores", "dense:j"], "--map '{1: 0"),
        (["--scores", "terminal:j", "--map", MAP], "Dense scores go with"),
        (["--scores", "dense:j", "--map", "{1: 0, 2: 0.5, 3: 2}"], "a headway from 0 to 1"),
        (["--scores", "dense:none", "--map", MAP], "no dense scores tagged 'none'"),
    ],
)
def test_progress_of_nothing_clear_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    path = judged(tmp_path)
    assert said in refused("progress", "--rollouts", path, "--tag", "p", *words)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 1))
def test_progress_rises_to_its_end(headway: list[float], end: float) -> None:
    made = np.array(headway)
    alone, ended = headway_progress(made, None), headway_progress(made, end)
    assert alone[-1] == pytest.approx(made.mean())
    assert (np.diff(alone) >= 0).all()
    if made.sum() > 0:
        assert ended[-1] == pytest.approx(end)
        assert (np.diff(ended) >= -1e-12).all()
    else:
        assert np.isnan(ended).all() == (end > 0)
