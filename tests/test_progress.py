"""Values as progress, in the schema that LeRobot's own weighting reads."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from regrasp.cli.main import main
from regrasp.core.provenance import Provenance
from regrasp.data.dataset import Dataset, open_dataset
from regrasp.data.sidecar import SidecarWriter, sidecar_path
from regrasp.data.storage import Transaction
from tests.datasets import EpisodeSpec, write_dataset


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
