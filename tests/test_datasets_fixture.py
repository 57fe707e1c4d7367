"""The datasets that the other tests use are what LeRobot itself would read."""

import os
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.dataset_pixels import frame_pixels, read_pixels
from tests.datasets import EpisodeSpec, write_dataset

EPISODES = [
    EpisodeSpec(12, task="fold the towel"),
    EpisodeSpec(7, task="open the drawer", success=False),
    EpisodeSpec(9, task="fold the towel", interventions=((2, 5),)),
]
TOP, WRIST = "observation.images.top", "observation.images.wrist"
CAMERAS = {TOP: (48, 64), WRIST: (64, 96)}


def rows(dataset: Path) -> pa.Table:
    tables = [pq.read_table(file) for file in sorted(dataset.glob("data/*/*.parquet"))]
    table = pa.concat_tables(tables)
    state = pa.array([list(value) for value in table["observation.state"].to_pylist()])
    table = table.set_column(table.schema.get_field_index("observation.state"), "observation.state", state)
    return table.drop_columns(["action"]).sort_by([("episode_index", "ascending"), ("frame_index", "ascending")])


def test_both_layouts_hold_the_same_rows(tmp_path: Path) -> None:
    old = write_dataset(tmp_path / "old", layout="v2.1", episodes=EPISODES)
    new = write_dataset(tmp_path / "new", layout="v3.0", episodes=EPISODES)
    assert rows(old).equals(rows(new))


@pytest.mark.parametrize(
    "oddity",
    [
        {"shuffle_rows": True},
        {"scatter": "episodes", "episodes_per_file": 2},
        {"scatter": "rows", "episodes_per_file": 2},
        {"row_groups": "file"},
        {"row_groups": 5},
        {"episodes_per_file": 1, "chunks_size": 2},
    ],
)
def test_how_rows_are_laid_out_changes_none_of_them(tmp_path: Path, oddity: dict[str, object]) -> None:
    plain = write_dataset(tmp_path / "plain", episodes=EPISODES)
    odd = write_dataset(tmp_path / "odd", episodes=EPISODES, **oddity)
    assert rows(odd).equals(rows(plain))


def test_column_types_are_as_asked(tmp_path: Path) -> None:
    types = {"observation.state": "float64 fixed_size_list", "timestamp": "list", "frame_index": "int32"}
    dataset = write_dataset(
        tmp_path / "a", column_types=types, drop_columns=("index",), success_type="list", success_column="is_success"
    )
    schema = pq.read_schema(dataset / "data/chunk-000/file-000.parquet")
    assert schema.field("observation.state").type == pa.list_(pa.float64(), 4)
    assert schema.field("timestamp").type == pa.list_(pa.float32())
    assert schema.field("frame_index").type == pa.int32()
    assert schema.field("is_success").type == pa.list_(pa.bool_())
    assert "index" not in schema.names


@pytest.mark.parametrize("size", [(24, 24), (48, 64), (480, 640)])
def test_a_picture_tells_its_frame(size: tuple[int, int]) -> None:
    assert read_pixels(frame_pixels(201, 9_999, *size, camera=3)) == (3, 201, 9_999)


@pytest.mark.parametrize("codec", ["h264", "av1"])
@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
def test_every_video_frame_is_at_its_time(tmp_path: Path, codec: str, layout: str) -> None:
    options = {"episodes": EPISODES, "cameras": CAMERAS, "codec": codec, "layout": layout, "jitter": 0.4}
    dataset = write_dataset(tmp_path / "a", **options)
    frame = np.arange(12)
    within = (frame + 0.4 * np.array([0, 1, 0.5])[frame % 3]) / 30
    for camera, key in enumerate(CAMERAS):
        seen = []
        for file in sorted(dataset.glob(f"videos/**/{key}/**/*.mp4")):
            with av.open(str(file)) as container:
                pictures = container.decode(video=0)
                seen += [(picture.time, read_pixels(picture.to_ndarray(format="rgb24"))) for picture in pictures]
        starts = [0, 0, 0] if layout == "v2.1" else [0, 12 / 30, 19 / 30]
        expected = [
            (starts[episode] + within[frame], (camera, episode, frame))
            for episode, spec in enumerate(EPISODES)
            for frame in range(spec.length)
        ]
        assert [code for _, code in seen] == [code for _, code in expected]
        np.testing.assert_allclose([time for time, _ in seen], [time for time, _ in expected], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["video", "image"])
def test_lerobot_reads_a_v30_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lerobot.datasets import LeRobotDataset

    root = write_dataset(
        tmp_path / "a", episodes=EPISODES, cameras=CAMERAS, camera_kind=kind, reward_columns=True, episodes_per_file=2
    )
    dataset = LeRobotDataset("local/a", root=root, video_backend="pyav")
    assert (dataset.num_episodes, dataset.num_frames) == (3, 28)
    for row, episode, frame in [(0, 0, 0), (11, 0, 11), (12, 1, 0), (18, 1, 6), (19, 2, 0), (27, 2, 8)]:
        item = dataset[row]
        assert item["task"] == EPISODES[episode].task
        assert (item["episode_index"].item(), item["frame_index"].item()) == (episode, frame)
        for camera, key in enumerate(CAMERAS):
            assert read_pixels(item[key].permute(1, 2, 0).numpy()) == (camera, episode, frame)
        assert item["next.success"].item() is (frame == EPISODES[episode].length - 1 and episode != 1)
        assert item["intervention"].item() is (episode == 2 and 2 <= frame < 5)
