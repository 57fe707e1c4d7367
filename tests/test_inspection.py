"""What `regrasp inspect` says of a dataset: everything it holds, and every problem with its mend and what it blocks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regrasp.core.outcome import Source
from regrasp.core.provenance import Provenance
from regrasp.data.dataset import open_dataset
from regrasp.data.inspection import examine
from regrasp.data.problem import EVERY_STAGE
from tests.datasets import EpisodeSpec, default_state, edit_info, edit_parquet, write_dataset

EPISODES = [
    EpisodeSpec(12, task="fold", interventions=((2, 5),)),
    EpisodeSpec(7, task="pour", success=False),
    EpisodeSpec(9, task="fold", interventions=((0, 1), (8, 9))),
]
TOP, WRIST = "observation.images.top", "observation.images.wrist"
V30_FILE = "data/chunk-000/file-000.parquet"
VALUE_STAGES = ["value fit", "value predict"]


def written(path: Path, **options: Any) -> Path:
    return write_dataset(path / "a", **{"episodes": EPISODES, **options})


def examined(path: Path, **options: Any) -> dict[str, Any]:
    report = examine(open_dataset(path, **options))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert all(problem["mend"] for problem in report["problems"])
    assert all(bool(problem["blocks"]) == (problem["level"] == "error") for problem in report["problems"])
    return report


def problems(report: dict[str, Any], path: Path) -> list[tuple[str, str, list[str]]]:
    return [(p["level"], p["text"].replace(f"{path}/", ""), p["blocks"]) for p in report["problems"]]


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
def test_everything_that_a_dataset_holds(tmp_path: Path, layout: str):
    root = written(tmp_path, layout=layout, cameras={TOP: (24, 36)}, fps=25)
    report = examined(root)
    fingerprint = report.pop("fingerprint")
    camera = {"name": TOP, "key": TOP, "kind": "video", "codec": "h264", "height": 24, "width": 36, "missing": []}
    assert report == {
        "path": str(root),
        "name": "a",
        "layout": layout,
        "robot": "testbot",
        "fps": 25.0,
        "episodes": 3,
        "frames": 28,
        "episode_frames": {"least": 7, "median": 9, "most": 12},
        "tasks": {"fold": 2, "pour": 1},
        "state": "observation.state",
        "cameras": [camera],
        "outcomes": {"success": 2, "failure": 1, "unknown": 0, "read_from": ["next.success"]},
        "corrections": {"column": "intervention", "frames": 5, "episodes": 2},
        "sidecars": [],
        "problems": [],
    }
    assert fingerprint == open_dataset(root).index().fingerprint


@pytest.mark.parametrize("options", [{}, {"column_types": {"intervention": "list"}}, {"shuffle_rows": True}])
def test_corrections_are_counted_however_they_are_stored(tmp_path: Path, options: dict[str, Any]):
    report = examined(written(tmp_path, **options))
    assert report["corrections"] == {"column": "intervention", "frames": 5, "episodes": 2}


def test_corrections_that_cannot_be_read_block_the_labels(tmp_path: Path):
    root = written(tmp_path)
    nulls = pa.array([None] * 28, pa.bool_())
    edit_parquet(root / V30_FILE, lambda t: t.set_column(t.column_names.index("intervention"), "intervention", nulls))
    report = examined(root)
    assert report["corrections"] == {"column": "intervention"}
    said = "The column 'intervention' has 28 nulls where numbers are needed"
    assert problems(report, root) == [("error", said, ["advantages", "relabel"])]


def test_images_in_parquet_are_cameras_too(tmp_path: Path):
    root = written(tmp_path, cameras={TOP: (24, 36)}, camera_kind="image")
    (camera,) = examined(root)["cameras"]
    assert camera == {"name": TOP, "key": TOP, "kind": "image", "codec": None, "height": 24, "width": 36, "missing": []}


def test_an_image_column_that_is_not_there_is_missing(tmp_path: Path):
    root = written(tmp_path, cameras={TOP: (24, 36)}, camera_kind="image")
    edit_parquet(root / V30_FILE, lambda table: table.drop_columns([TOP]))
    report = examined(root)
    assert report["cameras"][0]["missing"] == ["the column itself"]
    said = f"the data has no column '{TOP}', where the images of '{TOP}' should be"
    assert problems(report, root) == [("error", said, VALUE_STAGES)]


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "is missing"), (b"", "is empty (0 bytes)"), (b"no video", "cannot be opened as a video (")],
)
def test_a_video_that_cannot_be_shown_blocks_the_value_stages_alone(tmp_path: Path, content: bytes | None, said: str):
    root = written(tmp_path, layout="v2.1", cameras={TOP: (24, 24), WRIST: (24, 24)})
    file = f"videos/chunk-000/{WRIST}/episode_000001.mp4"
    (root / file).unlink()
    if content is not None:
        (root / file).write_bytes(content)
    report = examined(root)
    ((level, text, blocks),) = problems(report, root)
    assert (level, blocks) == ("error", VALUE_STAGES)
    assert text.startswith(f"the video '{file}' of '{WRIST}' {said}")
    assert text.endswith("(episodes 1)")
    assert "--cameras" in report["problems"][0]["mend"]
    assert [camera["missing"] for camera in report["cameras"]] == [[], [str(root / file)]]


def test_a_video_that_is_too_short_for_its_episodes_is_said(tmp_path: Path):
    root = written(tmp_path, cameras={TOP: (24, 24)}, episodes_per_video=2)
    videos = root / f"videos/{TOP}/chunk-000"
    (videos / "file-000.mp4").write_bytes((videos / "file-001.mp4").read_bytes())  # 9 frames for 12 + 7
    file = f"videos/{TOP}/chunk-000/file-000.mp4"
    said = f"the video '{file}' of '{TOP}' holds 9 frames, its episodes 0, 1 have 19"
    assert problems(examined(root), root) == [("error", said, VALUE_STAGES)]


def test_another_size_in_the_metadata_than_in_the_video_is_said(tmp_path: Path):
    root = written(tmp_path, cameras={TOP: (24, 36)})
    features = open_dataset(root).features
    features[TOP]["shape"] = [48, 36, 3]
    edit_info(root, features=features)
    report = examined(root)
    file = f"videos/{TOP}/chunk-000/file-000.mp4"
    assert problems(report, root) == [("warning", f"info.json says '{TOP}' is 36x48, '{file}' is 36x24", [])]
    assert (report["cameras"][0]["height"], report["cameras"][0]["width"]) == (24, 36)


def test_episodes_whose_video_is_not_said_block_the_value_stages(tmp_path: Path):
    root = written(tmp_path, cameras={TOP: (24, 24)})
    file = root / "meta/episodes/chunk-000/file-000.parquet"
    edit_parquet(file, lambda table: table.drop_columns([f"videos/{TOP}/from_timestamp"]))
    said = f"where '{TOP}' shows the episodes 0, 1, 2 is not said"
    assert problems(examined(root), root) == [("error", said, VALUE_STAGES)]


def test_unknown_outcomes_are_said_with_their_reasons(tmp_path: Path):
    episodes = [EpisodeSpec(4, success=None) for _ in range(8)] + [EpisodeSpec(3)]
    root = written(tmp_path, episodes=episodes)
    report = examined(root)
    assert report["outcomes"] == {"success": 1, "failure": 0, "unknown": 8, "read_from": ["next.success"]}
    said = "the outcome of 8 episodes is unknown (next.success is null): 0, 1, 2, 3, 4, 5 and 2 more"
    assert problems(report, root) == [("warning", said, [])]
    assert examined(root, source=Source.DEMO)["problems"] == []


def test_outcomes_that_cannot_be_chosen_between_block_returns(tmp_path: Path):
    root = written(tmp_path)
    for tag in ("a", "b"):
        pq.write_table(pa.table({"episode_index": [0], "outcome": ["success"]}), root / f"meta/outcomes_{tag}.parquet")
    report = examined(root)
    ((level, text, blocks),) = problems(report, root)
    assert (level, blocks) == ("error", ["returns"])
    assert text == "'a' has 2 outcome sidecars (outcomes_a.parquet, outcomes_b.parquet)"
    assert report["problems"][0]["mend"] == "name one with --outcomes-tag"
    assert report["outcomes"] == {}


@pytest.mark.filterwarnings("ignore:invalid value")  # of the fixture's statistics
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_state_that_is_not_finite_blocks_the_value_stages_alone(tmp_path: Path, number: float):
    def state(episode: int, frame: int, dimension: int) -> np.ndarray:
        return np.full(dimension, number if (episode, frame) in [(1, 3), (2, 0)] else 0.0)

    root = written(tmp_path, state=state)
    said = "'observation.state' has NaN or infinity, first in episode 1, frame 3"
    assert problems(examined(root), root) == [("error", said, VALUE_STAGES)]


def test_states_of_different_lengths_block_the_value_stages_alone(tmp_path: Path):
    root = written(tmp_path)
    states = [default_state(0, row, 4 + (row == 20)).tolist() for row in range(28)]

    def edit(table: pa.Table) -> pa.Table:
        return table.set_column(table.column_names.index("observation.state"), "observation.state", pa.array(states))

    edit_parquet(root / V30_FILE, edit)
    said = "The column 'observation.state' holds vectors of different lengths"
    assert problems(examined(root), root) == [("error", said, VALUE_STAGES)]


def test_what_info_json_says_of_the_columns_is_compared_with_them(tmp_path: Path):
    root = written(tmp_path)
    features = open_dataset(root).features
    features["observation.state"]["shape"] = [6]
    features["observation.effort"] = features.pop("action") | {"shape": [2]}
    edit_info(root, features=features)
    assert problems(examined(root), root) == [
        ("warning", "info.json lists features that the data has no column for: observation.effort", []),
        ("warning", "the data has columns that info.json does not list: action", []),
        ("warning", "info.json says that 'observation.state' has 6 numbers, the data has 4", []),
    ]


def test_problems_of_the_index_and_of_the_metadata_are_passed_on(tmp_path: Path):
    root = written(tmp_path, layout="v2.1", info={"total_frames": 5}, stray_files=True)
    lines = root / "meta/episodes.jsonl"
    lines.write_text(lines.read_text() + lines.read_text().splitlines()[0] + "\n")
    assert [text for _, text, _ in problems(examined(root), root)] == [
        "meta lists episode 0 twice; the first is used",
        "2 parquet files that the metadata does not name are left out: "
        "data/chunk-000/episode_000000 (copy).parquet, data/notes.parquet",
        "info.json says total_frames 5, the data holds 28",
    ]


def test_a_broken_dataset_is_reported_as_far_as_it_can_be(tmp_path: Path):
    root = written(tmp_path, episodes_per_file=1)
    (root / "data/chunk-000/file-001.parquet").write_bytes(b"")
    report = examined(root)
    assert (report["episodes"], report["frames"], report["outcomes"], report["corrections"]) == (2, 21, {}, {})
    level, text, blocks = problems(report, root)[0]
    assert (level, blocks) == ("error", list(EVERY_STAGE))
    assert text.startswith("'data/chunk-000/file-001.parquet' is empty (0 bytes)")


def test_a_dataset_without_frames_is_reported(tmp_path: Path):
    report = examined(written(tmp_path, episodes=[EpisodeSpec(0)]))
    assert (report["episodes"], report["frames"], report["episode_frames"], report["tasks"]) == (0, 0, {}, {})


def write_sidecar(path: Path, made: Provenance | None) -> None:
    metadata = {} if made is None else {"regrasp": made.to_json()}
    pq.write_table(pa.table({"episode_index": [0]}).replace_schema_metadata(metadata), path)


def test_sidecars_are_listed_with_their_lineage(tmp_path: Path):
    root = written(tmp_path)
    now = open_dataset(root).index().fingerprint
    made = Provenance(stage="returns", config={}, fingerprint=now, created="2026-11-30")
    later = Provenance(
        stage="advantages",
        config={},
        fingerprint=now,
        inputs={"returns": made.id},
        notes={"tags": {"returns": "base"}},
        created="2026-12-01",
    )
    old = Provenance(stage="value predict", config={}, fingerprint="before", created="2026-11-01")
    write_sidecar(root / "meta/returns_base.parquet", made)
    write_sidecar(root / "meta/returns_rlinf.parquet", None)
    write_sidecar(root / "meta/advantages_base_N50.parquet", later)
    write_sidecar(root / "meta/values_old.parquet", old)
    (root / "meta/values_torn.parquet").write_bytes(b"")
    report = examined(root)
    shown = {(s["kind"], s["tag"]): s for s in report["sidecars"]}
    assert [(kind, tag, s["state"]) for (kind, tag), s in shown.items()] == [
        ("returns", "base", "current"),
        ("returns", "rlinf", "without provenance (not written by Regrasp)"),
        ("values", "old", "stale"),
        ("values", "torn", "unreadable"),
        ("advantages", "base_N50", "current"),
    ]
    assert shown["advantages", "base_N50"]["inputs"] == {"returns": shown["returns", "base"]["id"]}
    assert shown["advantages", "base_N50"]["tags"] == {"returns": "base"}
    assert (shown["values", "old"]["stage"], shown["values", "old"]["created"]) == ("value predict", "2026-11-01")
    said = [text for _, text, _ in problems(report, root)]
    assert said[0] == "values_old.parquet was made (2026-11-01) from another version of this dataset"
    assert said[1].startswith("'meta/values_torn.parquet' is empty (0 bytes)")
    assert report["problems"][0]["mend"] == "make it again: regrasp value predict … --overwrite"


def test_sidecars_elsewhere_are_listed_too(tmp_path: Path):
    root = written(tmp_path)
    (tmp_path / "s/a").mkdir(parents=True)
    write_sidecar(tmp_path / "s/a/returns_base.parquet", None)
    assert examined(root)["sidecars"] == []
    assert [s["tag"] for s in examined(root, sidecars=tmp_path / "s")["sidecars"]] == ["base"]
