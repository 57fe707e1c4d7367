"""A dataset as the stages see it: the same rows of either layout, cameras by the run's names, refusals in words."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from regrasp.core.errors import ConfigError, DatasetError, NonFiniteData
from regrasp.core.outcome import Source
from regrasp.data.dataset import Dataset, check_finite, open_dataset
from tests.dataset_pixels import frame_pixels, png_bytes
from tests.datasets import EpisodeSpec, default_state, edit_info, edit_parquet, write_dataset

EPISODES = [
    EpisodeSpec(12, task="fold", interventions=((2, 5),)),
    EpisodeSpec(7, task="pour", success=False, index=4),
    EpisodeSpec(9, task="fold", index=5),
]
ROWS = [(episode, frame) for episode, length in ((0, 12), (4, 7), (5, 9)) for frame in range(length)]
V30_FILE = "data/chunk-000/file-000.parquet"
TOP, WRIST = "observation.images.top", "observation.images.wrist"


def opened(path: Path, *, options: dict[str, Any] | None = None, **written: Any) -> Dataset:
    return open_dataset(write_dataset(path / "a", **{"episodes": EPISODES, **written}), **(options or {}))


LAYOUTS: list[dict[str, Any]] = [
    {"layout": "v2.1"},
    {"layout": "v3.0"},
    {"row_groups": 5},
    {"row_groups": "file"},
    {"episodes_per_file": 1},
    {"shuffle_rows": True},
    {"scatter": "episodes", "episodes_per_file": 2},
    {"scatter": "rows", "episodes_per_file": 2, "shuffle_rows": True},
    {"column_types": {"observation.state": "float64 fixed_size_list", "episode_index": "int32"}},
    {"column_types": {"observation.state": "list", "frame_index": "list", "episode_index": "list"}},
    {"layout": "v2.1", "column_types": {"episode_index": "float64", "intervention": "fixed_size_list"}},
    {"layout": "v2.1", "stray_files": True},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_come_in_order_of_episode_and_frame(tmp_path: Path, layout: dict[str, Any]):
    dataset = opened(tmp_path, **layout)
    rows = dataset.stream(["observation.state", "episode_index", "frame_index", "intervention"]).take(28)
    assert list(zip(rows["episode_index"].tolist(), rows["frame_index"].tolist(), strict=True)) == ROWS
    np.testing.assert_array_equal(rows["observation.state"], [default_state(*key, 4) for key in ROWS])
    assert rows["intervention"].tolist() == [key in [(0, 2), (0, 3), (0, 4)] for key in ROWS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_chosen_episodes_come_alone_and_ascending(tmp_path: Path, layout: dict[str, Any]):
    stream = opened(tmp_path, **layout).stream(["frame_index", "observation.state"], episodes=[5, 0])
    assert stream.take(12)["observation.state"].tolist() == [default_state(0, frame, 4).tolist() for frame in range(12)]
    rest = stream.take(9)
    assert list(rest) == ["frame_index", "observation.state"]
    assert rest["observation.state"].tolist() == [default_state(5, frame, 4).tolist() for frame in range(9)]
    with pytest.raises(DatasetError, match="ends 1 rows early"):
        stream.take(1)


def test_a_column_may_be_asked_for_twice(tmp_path: Path):
    assert list(opened(tmp_path).stream(["index", "index"]).take(3)) == ["index"]


@pytest.mark.parametrize("layout", [{"layout": "v2.1"}, {"row_groups": 5}, {"shuffle_rows": True}])
def test_images_in_parquet_come_as_their_bytes(tmp_path: Path, layout: dict[str, Any]):
    dataset = opened(tmp_path, cameras={TOP: (24, 36)}, camera_kind="image", **layout)
    camera = dataset.cameras[TOP]
    assert (camera.kind, camera.height, camera.width, camera.codec) == ("image", 24, 36, None)
    pictures = dataset.stream([TOP]).take(28)[TOP]
    assert pictures.tolist() == [png_bytes(frame_pixels(*key, 24, 36)) for key in ROWS]


def test_a_column_that_is_not_there_is_named_with_the_nearest(tmp_path: Path):
    with pytest.raises(
        DatasetError, match=r"no column 'observation.stat'; it has: .*Did you mean 'observation.state'\?"
    ):
        opened(tmp_path).stream(["observation.stat"])


def test_a_dataset_with_errors_streams_nothing(tmp_path: Path):
    dataset = opened(tmp_path)
    edit_parquet(dataset.path / "meta/tasks.parquet", lambda table: table.slice(0, 1))
    dataset = open_dataset(dataset.path)
    with pytest.raises(DatasetError, match=r"'.*/a': episode 4 has task_index 1, .* Mend: add the task's text"):
        dataset.stream(["index"])


def test_a_dataset_is_read_once_unless_flags_are_wanted_later(tmp_path: Path):
    dataset = opened(tmp_path)
    first = dataset.index()
    assert dataset.index() is first
    assert first.flags == {}
    assert set(dataset.index(flags=True).flags) == {0, 4, 5}
    assert dataset.index() is dataset.index(flags=True)


@pytest.mark.parametrize("names", [["height", "width", "channel"], ["channels", "height", "width"], None])
def test_cameras_have_the_size_that_the_metadata_says(tmp_path: Path, names: list[str] | None):
    dataset = opened(tmp_path, cameras={TOP: (24, 36)}, codec="h264")
    features = dataset.features
    channels_first = names is not None and names[0] == "channels"
    features[TOP] |= {"names": names, "shape": [3, 24, 36] if channels_first else [24, 36, 3]}
    edit_info(dataset.path, features=features)
    camera = open_dataset(dataset.path).cameras[TOP]
    assert (camera.height, camera.width, camera.codec, camera.kind) == (24, 36, "h264", "video")


def test_a_codec_may_be_said_the_old_way(tmp_path: Path):
    dataset = opened(tmp_path, cameras={TOP: (24, 36)})
    details = dataset.features[TOP].pop("info")
    edit_info(dataset.path, features=dataset.features | {TOP: dataset.features[TOP] | {"video_info": details}})
    assert open_dataset(dataset.path).cameras[TOP].codec == "h264"


def test_keys_give_cameras_and_state_the_names_of_the_run(tmp_path: Path):
    keys = {TOP: "front", "proprio": "observation.state"}
    options = {"keys": keys, "name": "mine", "source": Source.DEMO, "weight": 2.0}
    dataset = opened(tmp_path, cameras={TOP: (24, 24), WRIST: (24, 24)}, state_key="proprio", options=options)
    assert {name: camera.key for name, camera in dataset.cameras.items()} == {"front": TOP, WRIST: WRIST}
    assert dataset.state_key == "proprio"
    assert (dataset.name, dataset.source, dataset.weight) == ("mine", Source.DEMO, 2.0)
    assert dataset.video_span("front", 4).path.parts[-3] == TOP


def test_keys_give_the_column_of_task_texts(tmp_path: Path):
    dataset = opened(tmp_path)
    texts = {0: "fold it", 4: "pour it", 5: "fold it"}

    def edit(table: pa.Table) -> pa.Table:
        return table.append_column("words", pa.array([texts[n] for n in table["episode_index"].to_pylist()]))

    edit_parquet(dataset.path / V30_FILE, edit)
    edit_info(dataset.path, features=dataset.features | {"words": {"dtype": "string", "shape": [1]}})
    assert open_dataset(dataset.path, keys={"words": "task"}).index().task == ["fold it", "pour it", "fold it"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"observation.images.tpo": "front"}, "the column 'observation.images.tpo', which it does not have; .*Did you"),
        ({TOP: "front", WRIST: "front"}, "gives two columns the name 'front'. Mend: "),
        ({TOP: WRIST}, f"gives two columns the name '{WRIST}'"),  # the other camera has it already
    ],
)
def test_keys_that_cannot_be_used_are_refused(tmp_path: Path, keys: dict[str, str], said: str):
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path, cameras={TOP: (24, 24), WRIST: (24, 24)}, options={"keys": keys})


def test_cameras_may_swap_their_names(tmp_path: Path):
    keys = {TOP: WRIST, WRIST: TOP}
    dataset = opened(tmp_path, cameras={TOP: (24, 24), WRIST: (24, 24)}, options={"keys": keys})
    assert dataset.cameras[TOP].key == WRIST


def test_the_state_is_known_by_its_usual_name_or_not_at_all(tmp_path: Path):
    assert opened(tmp_path / "usual").state_key == "observation.state"
    assert opened(tmp_path / "other", state_key="proprio").state_key is None


def test_a_video_span_says_where_an_episode_is_shown(tmp_path: Path):
    dataset = opened(tmp_path, cameras={TOP: (24, 24)}, fps=10)
    file = dataset.path / f"videos/{TOP}/chunk-000/file-000.mp4"
    span = dataset.video_span(TOP, 4)
    assert (span.path, span.start_s, span.end_s) == (file, pytest.approx(1.2), pytest.approx(1.9))


def test_a_camera_that_is_not_there_is_named_with_the_nearest(tmp_path: Path):
    dataset = opened(tmp_path, cameras={TOP: (24, 24)})
    with pytest.raises(ConfigError, match=rf"no camera '{TOP}s'; it has: {TOP}\. Did you mean '{TOP}'\?"):
        dataset.video_span(f"{TOP}s", 0)


@pytest.mark.parametrize("column", ["intervention", "complementary_info.is_intervention", "intervene_flag"])
def test_corrections_are_found_under_any_known_name(tmp_path: Path, column: str):
    assert opened(tmp_path, intervention_column=column).correction_column() == column


def test_a_user_may_name_the_column_of_corrections(tmp_path: Path):
    dataset = opened(tmp_path)
    assert dataset.correction_column() == "intervention"
    assert dataset.correction_column("next.success") == "next.success"
    assert dataset.correction_column("no such column") == "intervention"
    assert opened(tmp_path / "b", episodes=[EpisodeSpec(3)]).correction_column() is None


def test_sidecars_lie_in_meta_or_in_a_folder_of_the_datasets_name(tmp_path: Path):
    dataset = opened(tmp_path)
    assert dataset.sidecar_dir == tmp_path / "a/meta"
    elsewhere = open_dataset(dataset.path, sidecars=tmp_path / "s", name="towels")
    assert elsewhere.sidecar_dir == tmp_path / "s/towels"


def test_a_dataset_is_called_by_its_folder_however_that_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dataset = opened(tmp_path)
    monkeypatch.chdir(dataset.path)
    assert open_dataset(".").name == "a"


def test_numbers_that_are_not_finite_are_named_by_their_first_frame(tmp_path: Path):
    dataset = opened(tmp_path)
    values, frames = np.zeros((4, 3)), np.array([5, 6, 8, 9])
    check_finite(values, "observation.state", dataset, 4, frames)
    values[2, 1], values[3, 0] = np.nan, -np.inf
    said = r"NaN or infinity in 'observation.state', episode 4, frame 8 \(2 frames of it\)\. Mend: "
    with pytest.raises(NonFiniteData, match=said):
        check_finite(values, "observation.state", dataset, 4, frames)
    with pytest.raises(NonFiniteData, match=r"frame 9 \(1 frames"):
        check_finite(np.array([0, 0, 0, np.inf]), "observation.state", dataset, 4, frames)
