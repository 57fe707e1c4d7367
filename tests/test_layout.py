"""What a dataset says of itself, read from either layout and refused in words where it cannot be."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regrasp.core.errors import DatasetError, DatasetNotFound
from regrasp.data.layout import read_layout
from tests.datasets import EpisodeSpec, edit_info, edit_parquet, write_dataset

EPISODES = [EpisodeSpec(4, task="fold"), EpisodeSpec(3, task="pour", success=False), EpisodeSpec(5, task="fold")]
TOP = "observation.images.top"


def written(path: Path, **options: Any) -> Path:
    return write_dataset(path / "data set", **{"episodes": EPISODES, **options})


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
@pytest.mark.parametrize("tasks", ["jsonl", "parquet", "parquet_column"])
def test_tasks_are_read_in_every_style(tmp_path: Path, layout: str, tasks: str):
    meta = read_layout(written(tmp_path, layout=layout, tasks=tasks, task_numbers={"pour": 7, "fold": 3}))
    assert meta.tasks == {3: "fold", 7: "pour"}


def test_tasks_whose_pandas_index_has_no_name(tmp_path: Path):
    root = written(tmp_path)
    edit_parquet(root / "meta/tasks.parquet", lambda table: table.rename_columns(["task_index", "__index_level_0__"]))
    assert read_layout(root).tasks == {0: "fold", 1: "pour"}


def test_a_task_text_may_hold_any_character_but_a_line_break(tmp_path: Path):
    root = written(tmp_path, layout="v2.1")
    lines = [{"task_index": 0, "task": "pour\u2028the été"}, {"task_index": 1, "task": "  "}]
    text = "\ufeff" + "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n"
    (root / "meta/tasks.jsonl").write_text(text, encoding="utf-8", newline="")
    assert read_layout(root).tasks == {0: "pour\u2028the été"}  # a text of blanks is none


def test_a_dataset_without_a_tasks_file_has_no_tasks(tmp_path: Path):
    root = written(tmp_path)
    (root / "meta/tasks.parquet").unlink()
    assert read_layout(root).tasks == {}


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
def test_both_layouts_list_the_same_episodes(tmp_path: Path, layout: str):
    episodes = read_layout(written(tmp_path, layout=layout, episodes_per_meta_file=2)).episodes
    assert [(n, row.length, row.tasks) for n, row in episodes.items()] == [
        (0, 4, ("fold",)),
        (1, 3, ("pour",)),
        (2, 5, ("fold",)),
    ]


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
def test_what_file_managers_leave_in_the_metadata_is_not_read(tmp_path: Path, layout: str):
    meta = read_layout(written(tmp_path, layout=layout, stray_files=True))
    assert (list(meta.episodes), meta.notes) == ([0, 1, 2], [])


@pytest.mark.parametrize(
    "data_path",
    [
        None,
        "data/chunk-{chunk_index:03d}/episode_{episode_index:06d}.parquet",
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "data/{chunk_index}/{file_index}.parquet",
    ],
)
def test_v21_files_are_found_by_any_template(tmp_path: Path, data_path: str | None):
    numbered = [EpisodeSpec(2, index=3), EpisodeSpec(2, index=11)]
    meta = read_layout(written(tmp_path, layout="v2.1", data_path=data_path, chunks_size=10, episodes=numbered))
    assert len(meta.data_files()) == 2
    assert [path.is_file() for path in meta.data_files()] == [True, True]


@pytest.mark.parametrize(
    "data_path",
    [
        None,
        "data/chunk-{episode_chunk:03d}/file-{file_index:03d}.parquet",
        "data/{chunk_index}/part.{file_index}.parquet",
    ],
)
def test_v30_files_are_found_by_any_template_each_once(tmp_path: Path, data_path: str | None):
    root = written(tmp_path, data_path=data_path, chunks_size=1, episodes_per_file=2)
    meta = read_layout(root)
    assert [path.is_file() for path in meta.data_files()] == [True, True]


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
def test_a_dataset_that_names_no_templates_has_the_usual_ones(tmp_path: Path, layout: str):
    root = written(tmp_path, layout=layout, cameras={TOP: (24, 24)})
    edit_info(root, data_path=None, video_path=None, chunks_size=None)
    meta = read_layout(root)
    assert all(path.is_file() for path in meta.data_files())
    assert meta.video_file(TOP, 1)[0].is_file()


def test_v30_metadata_without_file_numbers_takes_the_files_that_are_there(tmp_path: Path):
    root = written(tmp_path, episodes_per_file=2)
    file = root / "meta/episodes/chunk-000/file-000.parquet"
    edit_parquet(file, lambda table: table.drop_columns(["data/chunk_index", "data/file_index"]))
    assert [path.name for path in read_layout(root).data_files()] == ["file-000.parquet", "file-001.parquet"]


def test_numbers_of_the_metadata_may_be_lists_of_one_or_floats(tmp_path: Path):
    root = written(tmp_path)

    def edit(table: pa.Table) -> pa.Table:
        for name, kind in [("episode_index", pa.float64()), ("length", pa.list_(pa.int64()))]:
            values = [[value] if pa.types.is_list(kind) else value for value in table[name].to_pylist()]
            table = table.set_column(table.column_names.index(name), name, pa.array(values, kind))
        one = pa.array([[0]] * len(table))
        return table.set_column(table.column_names.index("data/file_index"), "data/file_index", one)

    edit_parquet(root / "meta/episodes/chunk-000/file-000.parquet", edit)
    meta = read_layout(root)
    assert [(type(n), row.length) for n, row in meta.episodes.items()] == [(int, 4), (int, 3), (int, 5)]
    assert [path.is_file() for path in meta.data_files()] == [True]


def test_a_length_that_is_not_said_is_not_known(tmp_path: Path):
    root = written(tmp_path)

    def edit(table: pa.Table) -> pa.Table:
        lengths = pa.array([4.0, None, float("nan")])
        return table.set_column(table.column_names.index("length"), "length", lengths)

    edit_parquet(root / "meta/episodes/chunk-000/file-000.parquet", edit)
    assert [row.length for row in read_layout(root).episodes.values()] == [4, None, None]


def test_an_episode_that_is_listed_twice_is_noted(tmp_path: Path):
    root = written(tmp_path, layout="v2.1")
    file = root / "meta/episodes.jsonl"
    file.write_text(file.read_text() + json.dumps({"episode_index": 1, "length": 99, "tasks": []}) + "\n")
    meta = read_layout(root)
    assert meta.notes == ["meta lists episode 1 twice; the first is used"]
    assert meta.episodes[1].length == 3


def test_v20_is_read_as_v21(tmp_path: Path):
    assert read_layout(written(tmp_path, layout="v2.1", info={"codebase_version": "v2.0"})).version == "v2.1"


def test_a_v21_video_is_a_file_of_its_own(tmp_path: Path):
    root = written(tmp_path, layout="v2.1", cameras={TOP: (24, 24)})
    file = root / f"videos/chunk-000/{TOP}/episode_000002.mp4"
    assert read_layout(root).video_file(TOP, 2) == (file, 0.0, None)


def test_a_v30_video_is_a_span_of_a_file(tmp_path: Path):
    root = written(tmp_path, cameras={TOP: (24, 24)}, fps=10, episodes_per_video=2)
    first, second = (root / f"videos/{TOP}/chunk-000/file-{number:03d}.mp4" for number in (0, 1))
    meta = read_layout(root)
    assert meta.video_file(TOP, 1) == (first, 0.4, pytest.approx(0.7))  # after 4 frames, for 3
    assert meta.video_file(TOP, 2) == (second, 0.0, 0.5)


def test_a_video_span_that_is_not_said_is_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match=r"where episode 1 lies in the videos of 'nope': .*from_timestamp\. Mend: "):
        read_layout(written(tmp_path)).video_file("nope", 1)


def test_the_video_of_an_episode_that_is_not_listed_is_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match="no metadata for episode 9"):
        read_layout(written(tmp_path)).video_file(TOP, 9)


def test_no_such_path_is_said(tmp_path: Path):
    with pytest.raises(DatasetNotFound, match=r"no dataset at '.*/nothing': no such path\. Mend: ") as found:
        read_layout(tmp_path / "nothing")
    assert isinstance(found.value, FileNotFoundError)
    assert found.value.exit_code == 2


def write(text: bytes) -> Any:
    return lambda path: path.write_bytes(text)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def blur(path: Path) -> None:
    """Damage the data and leave the footer whole."""
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(bytes(content))


BAD_META: list[tuple[str, str, Any, str]] = [
    ("v3.0", "meta/info.json", Path.unlink, "not a LeRobot dataset: it has no meta/info.json"),
    ("v3.0", "meta/info.json", write(b'{"fps": 30'), "info.json' is not valid JSON"),
    ("v3.0", "meta/info.json", write(b"\xff\xfe\x00"), "info.json' is not valid JSON"),
    ("v3.0", "meta/info.json", write(b"[1]"), "holds a list where an object is needed"),
    ("v3.0", "meta/info.json", write(b'{"fps": 30}'), "codebase_version 'None'; Regrasp reads v2.1 and v3.0"),
    ("v3.0", "meta/info.json", write(b'{"codebase_version": "v1.6"}'), "codebase_version 'v1.6'"),
    ("v3.0", "meta/info.json", write(b'{"codebase_version": "v3.0"}'), "under 'fps'; found None"),
    ("v3.0", "meta/info.json", write(b'{"codebase_version": "v3.0", "fps": 0}'), "under 'fps'; found 0"),
    ("v3.0", "meta/tasks.parquet", write(b""), "tasks.parquet' is empty (0 bytes)"),
    ("v3.0", "meta/tasks.parquet", cut, "tasks.parquet' cannot be read as parquet"),
    ("v3.0", "meta/tasks.parquet", blur, "tasks.parquet' cannot be read"),
    ("v3.0", "meta/episodes/chunk-000/file-000.parquet", Path.unlink, "has neither meta/episodes.jsonl"),
    ("v3.0", "meta/episodes/chunk-000/file-000.parquet", cut, "file-000.parquet' cannot be read as parquet"),
    ("v3.0", "meta/episodes/chunk-000/file-000.parquet", blur, "file-000.parquet' cannot be read"),
    ("v2.1", "meta/episodes.jsonl", Path.unlink, "has neither meta/episodes.jsonl"),
    ("v2.1", "meta/episodes.jsonl", write(b'{"episode_index": 0}\n{"episode'), "episodes.jsonl', line 2, is not valid"),
    ("v2.1", "meta/episodes.jsonl", write(b'{"episode_index": 0, "tasks": ["\xff"]}'), "line 1, is not valid JSON"),
    ("v2.1", "meta/episodes.jsonl", write(b"\n7\n"), "episodes.jsonl', line 2, holds no object: 7"),
    ("v2.1", "meta/episodes.jsonl", write(b'{"length": 3}'), "None as an episode's episode_index"),
    ("v2.1", "meta/episodes.jsonl", write(b'{"episode_index": 1.5}'), "1.5 as an episode's episode_index"),
    ("v2.1", "meta/episodes.jsonl", write(b'{"episode_index": 2, "length": "x"}'), "'x' as the length of episode 2"),
    ("v2.1", "meta/tasks.jsonl", write(b'{"task_index": "a", "task": "b"}'), "'a' as task_index"),
]


@pytest.mark.parametrize(("layout", "file", "spoil", "said"), BAD_META)
def test_metadata_that_cannot_be_used_is_refused_with_a_mend(
    tmp_path: Path, layout: str, file: str, spoil: Any, said: str
):
    root = written(tmp_path, layout=layout)
    spoil(root / file)
    with pytest.raises(DatasetError) as found:
        read_layout(root)
    assert said in str(found.value)
    assert " Mend: " in str(found.value)
    assert "\n" not in str(found.value)


def test_tasks_without_a_text_column_are_refused(tmp_path: Path):
    root = written(tmp_path)
    pq.write_table(pa.table({"task_index": [0], "words": ["fold"]}), root / "meta/tasks.parquet")
    with pytest.raises(DatasetError, match="needs the columns task and task_index; found: task_index, words"):
        read_layout(root)


@pytest.mark.parametrize("template", ["data/{series}.parquet", "data/{}.parquet", "data/{file_index:q}.parquet"])
def test_a_template_that_cannot_be_filled_in_is_refused(tmp_path: Path, template: str):
    root = written(tmp_path)
    edit_info(root, data_path=template)
    with pytest.raises(DatasetError, match=r"cannot be filled in .* known are: .*chunk_index, file_index\. Mend: "):
        read_layout(root).data_files()
