"""One index whatever the files look like, and every disagreement said with its figures and a mend."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regrasp.core.errors import DatasetError
from regrasp.core.outcome import Outcome
from regrasp.data import frame_rows
from regrasp.data.columns import read_blocks
from regrasp.data.index import EpisodeIndex, scan
from regrasp.data.layout import read_layout
from regrasp.data.problem import EVERY_STAGE, Problem
from tests.datasets import EpisodeSpec, edit_info, edit_parquet, write_dataset

EPISODES = [EpisodeSpec(12, task="fold"), EpisodeSpec(7, task="pour", success=False), EpisodeSpec(9, task="fold")]
V30_FILE = "data/chunk-000/file-000.parquet"
V21_FILE = "data/chunk-000/episode_{:06d}.parquet"


def written(path: Path, **options: Any) -> Path:
    return write_dataset(path / "a", **{"episodes": EPISODES, "jitter": 0.25, **options})


def scanned(path: Path, **options: Any) -> EpisodeIndex:
    return scan(read_layout(path), **options)


def problems(path: Path, **options: Any) -> list[tuple[str, str]]:
    """(level, text) of every problem; each has a mend, and errors say what they block."""
    found = scanned(path, **options).problems
    for problem in found:
        assert problem.mend
        assert problem.blocks == (EVERY_STAGE if problem.level == "error" else ())
    return [(problem.level, problem.text.replace(f"{path}/", "")) for problem in found]


def replace(name: str, change: Callable[[list[Any]], Any]) -> Callable[[pa.Table], pa.Table]:
    """An edit that gives a column new values."""

    def edit(table: pa.Table) -> pa.Table:
        values = change(table[name].to_pylist())
        values = values if isinstance(values, pa.Array) else pa.array(values)
        return table.set_column(table.column_names.index(name), name, values)

    return edit


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> EpisodeIndex:
    return scanned(written(tmp_path_factory.mktemp("plain")))


def test_the_index_holds_the_episodes_and_their_frames(plain: EpisodeIndex):
    assert plain.episode_index.tolist() == [0, 1, 2]
    assert plain.length.tolist() == [12, 7, 9]
    assert plain.offset.tolist() == [0, 12, 19, 28]
    assert plain.total == 28
    assert plain.task == ["fold", "pour", "fold"]
    assert plain.tasks == ["fold", "pour"]
    assert plain.frames(1).tolist() == list(range(7))
    assert (plain.odd, plain.problems, plain.ordered) == ({}, [], True)


VARIANTS: dict[str, dict[str, Any]] = {
    "v2.1": {"layout": "v2.1"},
    "v2.1 by chunk_index": {"layout": "v2.1", "data_path": "data/c{chunk_index}/e{episode_index}.parquet"},
    "v2.1 in small chunks": {"layout": "v2.1", "chunks_size": 2},
    "v2.1 with tasks in parquet": {"layout": "v2.1", "tasks": "parquet"},
    "v3.0 with tasks in jsonl": {"tasks": "jsonl"},
    "other task numbers": {"task_numbers": {"pour": 0, "fold": 5}},
    "a file for each episode": {"episodes_per_file": 1, "chunks_size": 2},
    "metadata in several files": {"episodes_per_meta_file": 1},
    "one row group": {"row_groups": "file"},
    "row groups that cut episodes": {"row_groups": 5},
    "row groups of one row": {"row_groups": 1},
    "shuffled rows": {"shuffle_rows": True},
    "episodes dealt over files": {"scatter": "episodes", "episodes_per_file": 2},
    "halves of episodes in other files": {"scatter": "rows", "episodes_per_file": 2},
    "halves in other files, shuffled, in row groups": {
        "scatter": "rows",
        "episodes_per_file": 2,
        "shuffle_rows": True,
        "row_groups": 3,
    },
    "no index column": {"drop_columns": ("index",)},
    "float64 and int32": {
        "column_types": {"timestamp": "float64", "episode_index": "int32", "frame_index": "int16", "task_index": "int8"}
    },
    "whole numbers as floats": {"column_types": {"episode_index": "float64", "frame_index": "float32"}},
    "lists of one": {
        "column_types": dict.fromkeys(["timestamp", "episode_index", "frame_index", "task_index"], "list")
    },
    "fixed lists of one": {
        "column_types": dict.fromkeys(["timestamp", "episode_index", "frame_index"], "fixed_size_list")
    },
    "shuffled lists of one": {
        "shuffle_rows": True,
        "column_types": dict.fromkeys(["timestamp", "episode_index", "frame_index"], "list"),
    },
    "another robot's state": {"state_dim": 7, "success_column": None},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_how_the_files_look_changes_neither_index_nor_fingerprint(tmp_path: Path, name: str, plain: EpisodeIndex):
    index = scanned(written(tmp_path, **VARIANTS[name]))
    assert index.fingerprint == plain.fingerprint
    assert index.episode_index.tolist() == plain.episode_index.tolist()
    assert index.length.tolist() == plain.length.tolist()
    assert (index.task, index.odd, index.problems) == (plain.task, {}, [])
    scattered = bool({"shuffle_rows", "scatter"} & set(VARIANTS[name]))
    assert index.ordered is not scattered


def test_strays_are_left_out_and_named(tmp_path: Path, plain: EpisodeIndex):
    for layout in ("v2.1", "v3.0"):
        root = written(tmp_path / layout, layout=layout, stray_files=True)
        index = scanned(root)
        assert index.fingerprint == plain.fingerprint
        copy = "episode_000000 (copy)" if layout == "v2.1" else "file-000 (copy)"
        strays = f"data/chunk-000/{copy}.parquet, data/notes.parquet"
        assert problems(root) == [
            ("warning", f"2 parquet files that the metadata does not name are left out: {strays}")
        ]


def test_a_single_task_in_the_metadata_stands_in_for_task_index(tmp_path: Path, plain: EpisodeIndex):
    root = written(tmp_path, drop_columns=("task_index",))
    assert scanned(root).fingerprint == plain.fingerprint


def test_a_column_of_texts_stands_in_for_task_index(tmp_path: Path, plain: EpisodeIndex):
    root = written(tmp_path, row_groups=5)

    def edit(table: pa.Table) -> pa.Table:
        texts = [["fold", "pour", "fold"][number] for number in table["episode_index"].to_pylist()]
        return table.drop_columns(["task_index"]).append_column("words", pa.array(texts))

    edit_parquet(root / V30_FILE, edit)
    assert scanned(root, task_column="words").fingerprint == plain.fingerprint


def test_an_episode_that_goes_on_over_several_reads_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(frame_rows, "read_blocks", functools.partial(read_blocks, rows=5))
    pieces, whole = written(tmp_path / "p", row_groups=4), written(tmp_path / "w", row_groups="file")
    assert scanned(pieces).fingerprint == scanned(whole).fingerprint
    assert scanned(pieces).length.tolist() == [12, 7, 9]


def test_gaps_in_the_episode_numbers_stay(tmp_path: Path):
    numbered = [EpisodeSpec(3, index=4), EpisodeSpec(2, index=2_000_000), EpisodeSpec(1, index=2_000_001)]
    for layout in ("v2.1", "v3.0"):
        index = scanned(written(tmp_path / layout, layout=layout, episodes=numbered))
        assert index.episode_index.tolist() == [4, 2_000_000, 2_000_001]
        assert index.problems == []
        assert index.position(2_000_000) == 1


@pytest.mark.parametrize("number", [-1, 3, 5, 2_000_002])
def test_the_position_of_an_episode_that_is_not_there_is_refused(tmp_path: Path, number: int):
    index = scanned(written(tmp_path, episodes=[EpisodeSpec(3, index=4), EpisodeSpec(2, index=7)]))
    with pytest.raises(DatasetError, match=rf"no episode {number}; there are: 4, 7"):
        index.position(number)


@pytest.mark.parametrize("options", [{"layout": "v2.1"}, {"row_groups": 2}, {"shuffle_rows": True}])
def test_gaps_in_the_frame_numbers_stay_and_are_said(tmp_path: Path, options: dict[str, Any], plain: EpisodeIndex):
    root = written(tmp_path, **options)
    gone = [(1, 0), (2, 3), (2, 4)]  # episode 1 starts at frame 1, episode 2 has a hole

    def edit(table: pa.Table) -> pa.Table:
        pairs = zip(table["episode_index"].to_pylist(), table["frame_index"].to_pylist(), strict=True)
        return table.filter(pa.array([pair not in gone for pair in pairs]))

    for file in root.glob("data/*/*.parquet"):
        edit_parquet(file, edit)
    index = scanned(root)
    assert index.frames(0).tolist() == list(range(12))
    assert index.frames(1).tolist() == [1, 2, 3, 4, 5, 6]
    assert index.frames(2).tolist() == [0, 1, 2, 5, 6, 7, 8]
    episode, frame = index.keys(np.array([1, 2]))
    assert episode.tolist() == [1] * 6 + [2] * 7
    assert frame.tolist() == [1, 2, 3, 4, 5, 6, 0, 1, 2, 5, 6, 7, 8]
    assert index.fingerprint != plain.fingerprint
    assert problems(root) == [
        ("warning", "episode 1: the metadata says 7 frames, the data holds 6; the data counts"),
        ("warning", "episode 2: the metadata says 9 frames, the data holds 7; the data counts"),
        ("warning", "info.json says total_frames 28, the data holds 25"),
        ("warning", "episode 1: frame numbers skip (6 frames from 1 to 6)"),
        ("warning", "episode 2: frame numbers skip (7 frames from 0 to 8)"),
    ]


def test_keys_are_the_frames_of_the_chosen_episodes(plain: EpisodeIndex):
    episode, frame = plain.keys(np.array([0, 2]))
    assert episode.tolist() == [0] * 12 + [2] * 9
    assert frame.tolist() == [*range(12), *range(9)]
    assert [part.tolist() for part in plain.keys(np.array([], dtype=np.int64))] == [[], []]


def shifted(table: pa.Table) -> pa.Table:
    return replace("timestamp", lambda times: [time + 0.5 for time in times])(table)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"state_dim": 3, "success_column": "is_success", "fps": 30}, True),
        ({"fps": 25}, False),
        ({"jitter": 0.26}, False),
        ({"episodes": [EpisodeSpec(12, task="folds"), *EPISODES[1:]]}, False),
        ({"episodes": [*EPISODES[:2], EpisodeSpec(9, task="fold", index=3)]}, False),
        ({"episodes": [*EPISODES[:2], EpisodeSpec(10, task="fold")]}, False),
        ({"episodes": EPISODES[:2]}, False),
        ({"episodes": [EPISODES[0], EPISODES[2], EPISODES[1]]}, False),
        ({"episodes": [EpisodeSpec(12, task="fold", success=False), *EPISODES[1:]]}, True),
    ],
)
def test_the_fingerprint_depends_on_frames_times_and_tasks_alone(
    tmp_path: Path, change: dict[str, Any], same: bool, plain: EpisodeIndex
):
    assert (scanned(written(tmp_path, **change)).fingerprint == plain.fingerprint) is same


def test_one_changed_timestamp_changes_the_fingerprint(tmp_path: Path, plain: EpisodeIndex):
    root = written(tmp_path)
    edit_parquet(root / V30_FILE, replace("timestamp", lambda times: [*times[:-1], times[-1] + 1e-3]))
    assert scanned(root).fingerprint != plain.fingerprint


def test_wrong_figures_of_the_metadata_are_said(tmp_path: Path):
    stated = [EpisodeSpec(12, task="fold", stated_length=13), *EPISODES[1:]]
    root = written(tmp_path, episodes=stated, info={"total_episodes": 4, "total_frames": 29})
    assert problems(root) == [
        ("warning", "episode 0: the metadata says 13 frames, the data holds 12; the data counts"),
        ("warning", "info.json says total_episodes 4, the data holds 3"),
        ("warning", "info.json says total_frames 29, the data holds 28"),
    ]


def test_episodes_that_only_the_data_has_are_said(tmp_path: Path):
    root = written(tmp_path)
    edit_parquet(root / "meta/episodes/chunk-000/file-000.parquet", lambda table: table.slice(0, 1))
    assert problems(root) == [("warning", "the data holds episodes that the metadata does not list: 1, 2")]


def test_episodes_that_only_the_metadata_has_stop_every_stage(tmp_path: Path):
    root = written(tmp_path, episodes=[*EPISODES, EpisodeSpec(0, task="fold"), EpisodeSpec(0, task="fold")])
    assert problems(root) == [
        ("error", "the metadata lists episodes without any frame in the data: 3, 4"),
        ("warning", "info.json says total_episodes 5, the data holds 3"),
    ]


def test_a_dataset_without_frames_is_refused(tmp_path: Path):
    root = written(tmp_path, episodes=[EpisodeSpec(0)])
    assert problems(root)[0] == ("error", "the dataset has no frames")


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
def test_a_data_file_that_is_missing_is_named(tmp_path: Path, layout: str):
    root = written(tmp_path, layout=layout, episodes_per_file=1)
    file = V21_FILE.format(1) if layout == "v2.1" else "data/chunk-000/file-001.parquet"
    (root / file).unlink()
    found = problems(root)
    assert found[0] == ("error", f"the metadata names '{file}', which does not exist")
    assert [level for level, _ in found[1:]] == ["warning", "warning"]  # the totals


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def blur(path: Path, group: int = 0) -> None:
    """Damage the pages of a row group and leave the footer whole."""
    content = bytearray(path.read_bytes())
    columns = pq.ParquetFile(path).metadata.row_group(group)
    for place in range(columns.num_columns):
        column = columns.column(place)
        start = column.dictionary_page_offset or column.data_page_offset
        content[start : start + 20] = b"\xff" * 20
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "cannot be read as parquet ("),
        (blur, "cannot be read ("),
        (lambda path: path.write_bytes(b""), "is empty (0 bytes), so it is not a parquet file"),
    ],
)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_damaged_data_file_is_an_error_wherever_it_lies(
    tmp_path: Path, which: int, spoil: Any, said: str, shuffle: bool
):
    root = written(tmp_path, episodes_per_file=1, shuffle_rows=shuffle)
    file = root / f"data/chunk-000/file-{which:03d}.parquet"
    spoil(file)
    errors = [text for level, text in problems(root) if level == "error"]
    assert len(errors) == 1
    assert errors[0].startswith(f"'data/chunk-000/{file.name}' {said}")


def test_a_file_with_one_damaged_row_group_does_not_pass_for_a_shorter_one(tmp_path: Path):
    # Shuffled, so that the rows are read twice; the second reading must not forget the damage either.
    root = written(tmp_path, shuffle_rows=True, row_groups=10)
    blur(root / V30_FILE, group=2)
    levels = [level for level, _ in problems(root)]
    assert "error" in levels


def test_columns_that_every_stage_needs_are_named_when_they_lack(tmp_path: Path):
    root = written(tmp_path, drop_columns=("timestamp", "frame_index"))
    found = [text for level, text in problems(root) if level == "error"]
    assert found == ["the data has no column 'frame_index'", "the data has no column 'timestamp'"]


def test_a_later_file_without_a_needed_column_is_named(tmp_path: Path):
    root = written(tmp_path, layout="v2.1")
    edit_parquet(root / V21_FILE.format(2), lambda table: table.drop_columns(["timestamp", "task_index"]))
    errors = [text for level, text in problems(root) if level == "error"]
    lacks = "lacks the columns timestamp, task_index, which other files of the dataset have"
    assert errors == [f"'{V21_FILE.format(2)}' {lacks}"]


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("frame_index", lambda v: [n + 0.5 for n in v], "holds values that are not whole numbers"),
        ("episode_index", lambda v: [None, *v[1:]], "has 1 nulls where numbers are needed"),
        ("frame_index", lambda v: [str(n) for n in v], "holds string where numbers are needed"),
        ("timestamp", lambda v: [[t, t] for t in v], "holds 2 numbers a row where one is needed"),
        ("timestamp", lambda v: [[t] * (k % 2 + 1) for k, t in enumerate(v)], "holds vectors of different lengths"),
        (
            "timestamp",
            lambda v: pa.array(range(len(v)), pa.timestamp("s")),
            "holds timestamp[ms] where numbers are needed",
        ),
    ],
)
def test_a_key_column_that_cannot_be_read_is_named_with_its_file(tmp_path: Path, column: str, values: Any, said: str):
    root = written(tmp_path, layout="v2.1")
    edit_parquet(root / V21_FILE.format(1), replace(column, values))
    errors = [text for level, text in problems(root) if level == "error"]
    assert len(errors) == 1
    assert errors[0].startswith(f"'{V21_FILE.format(1)}': The column {column!r} {said}")


@pytest.mark.parametrize("options", [{}, {"layout": "v2.1"}, {"row_groups": 4}, {"shuffle_rows": True}])
def test_repeated_frames_are_refused(tmp_path: Path, options: dict[str, Any]):
    root = written(tmp_path, **options)
    file = root / (V21_FILE.format(1) if options.get("layout") == "v2.1" else V30_FILE)

    def edit(table: pa.Table) -> pa.Table:
        pairs = list(zip(table["episode_index"].to_pylist(), table["frame_index"].to_pylist(), strict=True))
        return pa.concat_tables([table, table.slice(pairs.index((1, 4)), 1), table.slice(pairs.index((1, 2)), 1)])

    edit_parquet(file, edit)
    errors = [text for level, text in problems(root) if level == "error"]
    assert errors == ["episode 1 has frame 2 more than once (and 1 more such rows)"]


def test_a_frame_that_one_file_ends_and_the_next_begins_with_is_refused(tmp_path: Path):
    root = written(tmp_path, episodes_per_file=1)
    last = pq.read_table(root / V30_FILE).slice(11, 1)
    edit_parquet(root / "data/chunk-000/file-001.parquet", lambda table: pa.concat_tables([last, table]))
    errors = [text for level, text in problems(root) if level == "error"]
    assert errors == ["episode 0 has frame 11 more than once"]


def test_an_episode_in_two_files_is_refused(tmp_path: Path):
    root = written(tmp_path, layout="v2.1")
    edit_parquet(root / V21_FILE.format(2), replace("episode_index", lambda numbers: [0] * len(numbers)))
    errors = [text for level, text in problems(root) if level == "error"]
    assert errors == ["episode 0 has frame 0 more than once (and 8 more such rows)"]


def test_a_task_index_without_text_is_refused(tmp_path: Path):
    root = written(tmp_path)
    edit_parquet(root / "meta/tasks.parquet", lambda table: table.slice(0, 1))
    index = scanned(root)
    assert index.task == ["fold", "", "fold"]  # no text is made up
    assert problems(root) == [("error", "episode 1 has task_index 1, which meta/tasks has no text for")]


def test_no_task_index_and_several_tasks_in_the_metadata_is_refused(tmp_path: Path):
    root = written(tmp_path, layout="v2.1", drop_columns=("task_index",))
    rows = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
    rows[1]["tasks"], rows[2]["tasks"] = ["pour", "fold"], []
    (root / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert problems(root) == [
        ("error", "episode 1 has no task_index and its metadata lists 2 tasks"),
        ("error", "episode 2 has no task_index and its metadata lists 0 tasks"),
    ]


def test_another_task_in_the_metadata_than_in_the_data_is_said(tmp_path: Path):
    root = written(tmp_path)
    edit_parquet(root / "meta/episodes/chunk-000/file-000.parquet", replace("tasks", lambda _: [["stir"]] * 3))
    expected = "episode 1: the data says task 'pour', the metadata 'stir'; the data's is used"
    assert ("warning", expected) in problems(root)
    assert scanned(root).task == ["fold", "pour", "fold"]


def test_a_task_that_changes_within_an_episode_is_said(tmp_path: Path):
    root = written(tmp_path)
    edit_parquet(root / V30_FILE, replace("task_index", lambda codes: [*codes[:-1], 1]))
    assert problems(root) == [
        ("warning", "the task changes within episode 2; its first frame's counts for the whole episode")
    ]


@pytest.mark.parametrize("texts", [["fold", "", "fold"], ["fold", None, "fold"], ["fold", " ", "fold"]])
def test_an_episode_without_text_in_the_task_column_is_refused(tmp_path: Path, texts: list[Any]):
    root = written(tmp_path)

    def edit(table: pa.Table) -> pa.Table:
        return table.append_column("words", pa.array([texts[n] for n in table["episode_index"].to_pylist()]))

    edit_parquet(root / V30_FILE, edit)
    assert problems(root, task_column="words") == [("error", "episode 1 has no text in 'words'")]


def test_a_task_column_that_is_not_there_is_refused(tmp_path: Path):
    found = problems(written(tmp_path), task_column="words")
    assert ("error", "the data has no column 'words', which `keys` names as task") in found


@pytest.mark.parametrize(
    ("times", "frame"),
    [
        (lambda v: [*v[:14], v[13], *v[15:]], 2),  # row 14 is frame 2 of episode 1
        (lambda v: [*v[:14], float("nan"), *v[15:]], 2),
        (lambda v: [*v[:12], None, *v[13:]], 0),
        (lambda v: [*v[:18], v[17] - 1, *v[19:]], 6),
    ],
)
def test_a_timestamp_that_does_not_increase_is_said(tmp_path: Path, times: Any, frame: int):
    root = written(tmp_path)
    edit_parquet(root / V30_FILE, replace("timestamp", times))
    assert problems(root) == [("warning", f"episode 1: the timestamp does not increase at frame {frame}")]


def flags(root: Path) -> dict[int, tuple[Outcome, str]]:
    return scanned(root).flags


@pytest.mark.parametrize("column", ["next.success", "is_success"])
@pytest.mark.parametrize(("kind", "types"), [("bool", ""), ("int", ""), ("int", "int8"), ("int", "float64")])
@pytest.mark.parametrize("shuffle", [False, True])
def test_success_flags_are_read_as_truth_or_as_numbers(
    tmp_path: Path, column: str, kind: str, types: str, shuffle: bool
):
    options = {"column_types": {column: types}} if types else {}
    root = written(tmp_path, success_column=column, success_type=kind, shuffle_rows=shuffle, row_groups=5, **options)
    assert flags(root) == {0: (Outcome.SUCCESS, column), 1: (Outcome.FAILURE, column), 2: (Outcome.SUCCESS, column)}


@pytest.mark.parametrize("column", ["next.success", "is_success"])
def test_an_episode_whose_flag_is_null_has_no_outcome(tmp_path: Path, column: str):
    root = written(tmp_path, success_column=column, episodes=[EpisodeSpec(4, success=None), EpisodeSpec(3)])
    where = "null" if column == "next.success" else "null in the last frame"
    assert flags(root) == {0: (Outcome.UNKNOWN, f"{column} is {where}"), 1: (Outcome.SUCCESS, column)}


@pytest.mark.parametrize("column", ["next.success", "is_success"])
def test_a_column_of_nulls_has_no_outcome(tmp_path: Path, column: str):
    root = written(tmp_path, success_column=column, success_type="null")
    assert {outcome for outcome, _ in flags(root).values()} == {Outcome.UNKNOWN}


@pytest.mark.parametrize("kind", ["list", "string"])
def test_a_flag_that_is_no_truth_value_is_no_outcome(tmp_path: Path, kind: str):
    root = written(tmp_path, success_column="is_success", success_type=kind)
    assert set(flags(root).values()) == {(Outcome.UNKNOWN, "is_success is not a true/false column")}


def edited_flags(tmp_path: Path, column: str, values: pa.Array) -> list[tuple[Outcome, str]]:
    root = written(tmp_path, success_column=column, episodes=[EpisodeSpec(4)])
    edit_parquet(root / V30_FILE, lambda t: t.set_column(t.column_names.index(column), column, values))
    return list(flags(root).values())


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([False, True, False, False], Outcome.SUCCESS),  # any frame
        ([None, True, None, None], Outcome.SUCCESS),
        ([False, None, False, False], Outcome.UNKNOWN),  # the null could have been the true one
        ([False, False, False, False], Outcome.FAILURE),
        ([0.0, 1.0, 0.0, 0.0], Outcome.SUCCESS),
        ([0, 2, 0, 0], Outcome.UNKNOWN),
        ([0.0, 0.5, 0.0, 1.0], Outcome.UNKNOWN),
    ],
)
def test_next_success_counts_in_any_frame(tmp_path: Path, values: list[Any], outcome: Outcome):
    assert [found for found, _ in edited_flags(tmp_path, "next.success", pa.array(values))] == [outcome]


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([True, True, True, False], Outcome.FAILURE),  # only the last frame
        ([False, False, False, True], Outcome.SUCCESS),
        ([None, None, None, True], Outcome.SUCCESS),
        ([True, True, True, None], Outcome.UNKNOWN),
    ],
)
def test_is_success_counts_in_the_last_frame(tmp_path: Path, values: list[Any], outcome: Outcome):
    assert [found for found, _ in edited_flags(tmp_path, "is_success", pa.array(values))] == [outcome]


def test_categories_are_no_truth_values(tmp_path: Path):
    values = pa.array(["true"] * 4).dictionary_encode()
    assert edited_flags(tmp_path, "is_success", values) == [(Outcome.UNKNOWN, "is_success is not a true/false column")]


def test_next_success_is_believed_before_is_success(tmp_path: Path):
    root = written(tmp_path, episodes=[EpisodeSpec(4, success=False)])
    edit_parquet(root / V30_FILE, lambda table: table.append_column("is_success", pa.array([True] * 4)))
    assert flags(root) == {0: (Outcome.FAILURE, "next.success")}


def test_a_file_without_the_flag_has_episodes_without_outcome(tmp_path: Path):
    root = written(tmp_path, layout="v2.1", success_column="is_success")
    edit_parquet(root / V21_FILE.format(1), lambda table: table.drop_columns(["is_success"]))
    assert flags(root) == {
        0: (Outcome.SUCCESS, "is_success"),
        1: (Outcome.UNKNOWN, "is_success is missing from its file"),
        2: (Outcome.SUCCESS, "is_success"),
    }
    assert problems(root) == []


def test_flags_are_left_alone_when_they_are_not_wanted(tmp_path: Path):
    index = scanned(written(tmp_path), flags=False)
    assert (index.flags, index.flag_column, index.flags_read) == ({}, None, False)


def test_a_problem_becomes_an_error_that_says_where_and_how_to_mend(tmp_path: Path):
    problem = Problem(level="error", text="the dataset has no frames", mend="record some episodes")
    with pytest.raises(DatasetError) as found:
        problem.raise_for(tmp_path / "a")
    assert str(found.value) == f"'{tmp_path}/a': the dataset has no frames. Mend: record some episodes."


def test_what_info_json_does_not_say_is_not_compared(tmp_path: Path):
    root = written(tmp_path)
    edit_info(root, total_episodes=None, total_frames=None)
    assert problems(root) == []
