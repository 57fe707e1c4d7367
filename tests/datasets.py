"""Small LeRobot datasets for tests, in both layouts and with every oddity that real recordings show.

What a frame holds depends on its episode and frame number alone, so the v2.1 and the v3.0 dataset of one
description hold the same rows.

    path = write_dataset(tmp_path / "a", layout="v2.1", episodes=[EpisodeSpec(40), EpisodeSpec(30, success=False)])
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.dataset_pixels import encode_video, frame_pixels, png_bytes

DATA_PATH = {
    "v2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "v3.0": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
}
VIDEO_PATH = {
    "v2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "v3.0": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
TASK_INDEX = {
    "index_columns": ["task"],
    "column_indexes": [],
    "columns": [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": stored, "metadata": None}
        for name, kind, stored in [("task_index", "int64", "int64"), ("task", "unicode", "object")]
    ],
    "pandas_version": "2.3.3",
}


def default_state(episode: int, frame: int, dimension: int) -> np.ndarray:
    """What ``observation.state`` holds unless told otherwise; every number is exact in float32."""
    return episode + frame / 1024 + 16.0 * np.arange(dimension)


@dataclass(frozen=True)
class EpisodeSpec:
    """One episode."""

    length: int
    task: str = "put the cube in the box"
    success: bool | None = True
    """None writes a null, and "unknown" where the outcome is a word."""
    interventions: tuple[tuple[int, int], ...] = ()
    """Spans [from, to) of frames that a person drove."""
    index: int | None = None
    """Its number; None: one more than the last."""
    truncated: bool = False
    """Cut off: its last frame has next.truncated and not next.done."""
    stated_length: int | None = None
    """The length its metadata claims, where that is to be wrong."""


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """One dataset: the keywords of :func:`write_dataset`."""

    episodes: Sequence[EpisodeSpec] = (EpisodeSpec(12), EpisodeSpec(9, success=False))
    layout: Literal["v2.1", "v3.0"] = "v3.0"
    fps: int = 30
    robot_type: str | None = "testbot"
    state_dim: int = 4
    action_dim: int = 2
    state: Callable[[int, int, int], np.ndarray] = default_state
    """(episode, frame, dimension) -> numbers."""
    state_key: str = "observation.state"
    cameras: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Key -> (height, width), both even. The position in this mapping is the camera's number in its pixels."""
    camera_kind: Literal["none", "video", "image"] = "video"
    codec: Literal["h264", "av1"] = "h264"
    gop: int = 2
    jitter: float = 0.0
    """Frame k is taken up to this part of a frame late: by 0, 1 and 1/2 of it in turn."""
    success_column: str | None = "next.success"
    """``next.success`` (true on the last frame), ``episode_success`` (in the episodes' metadata), another
    column (the outcome in every frame), or None."""
    success_type: Literal["bool", "int", "null", "list", "string"] = "bool"
    intervention_column: str | None = "intervention"
    """Written when an episode has interventions."""
    reward_columns: bool = False
    """Also write next.reward (1 at a success's end), next.done and next.truncated."""
    drop_columns: Sequence[str] = ()
    column_types: Mapping[str, str] = field(default_factory=dict)
    """Column -> words of its type: ``float64``, ``int32``, ``list``, ``fixed_size_list``; "list" makes a
    scalar a list of one. Without it v2.1 has fixed-size lists and v3.0 lists, as LeRobot's tools write."""
    row_groups: Literal["episode", "file"] | int = "episode"
    episodes_per_file: int | None = None
    """v3.0 data files; None: all in one."""
    episodes_per_video: int | None = None
    """v3.0 videos; None: all of a camera in one."""
    episodes_per_meta_file: int | None = None
    scatter: Literal["no", "episodes", "rows"] = "no"
    """v3.0: deal the episodes over the files in turn, or also put the second half of each in the next file."""
    shuffle_rows: bool = False
    tasks: Literal["jsonl", "parquet", "parquet_column"] | None = None
    """parquet: the text is a pandas index, as LeRobot writes; parquet_column: a plain column."""
    task_numbers: Mapping[str, int] = field(default_factory=dict)
    """Task text -> task_index; the rest are numbered by appearance."""
    data_path: str | None = None
    """Template in info.json; may use episode_chunk, chunk_index, episode_index and file_index."""
    video_path: str | None = None
    chunks_size: int = 1000
    stray_files: bool = False
    stats: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)
    """Written over info.json at the end."""

    @cached_property
    def numbers(self) -> list[int]:
        """The episode number of each episode."""
        numbers: list[int] = []
        for episode in self.episodes:
            numbers.append(episode.index if episode.index is not None else (numbers[-1] + 1 if numbers else 0))
        return numbers

    @cached_property
    def task_index(self) -> dict[str, int]:
        """Task text -> task_index, by task_index."""
        numbers = dict(self.task_numbers)
        for episode in self.episodes:
            numbers.setdefault(episode.task, max(numbers.values(), default=-1) + 1)
        return dict(sorted(numbers.items(), key=lambda item: item[1]))

    def timestamps(self, length: int) -> np.ndarray:
        """Seconds from the episode's start, float64 [length]."""
        frames = np.arange(length)
        return (frames + self.jitter * np.array([0, 1, 0.5])[frames % 3]) / self.fps


@dataclass(frozen=True)
class _Column:
    values: list[Any]
    dtype: str
    shape: tuple[int, ...] = (1,)


def write_dataset(path: Path | str, **options: Any) -> Path:
    """Write a dataset into the new folder ``path``; the keywords are the fields of :class:`DatasetSpec`."""
    spec, root = DatasetSpec(**options), Path(path)
    (root / "meta").mkdir(parents=True)
    columns = _columns(spec)
    tables = [_table(spec, part) for part in columns]
    files = _write_data(root, spec, tables)
    videos = _write_videos(root, spec) if spec.camera_kind == "video" else [{} for _ in spec.episodes]
    _write_tasks(root, spec)
    _write_episodes(root, spec, files, videos)
    if spec.stats and spec.episodes:
        _write_stats(root, spec, columns)
    _write_json(root / "meta/info.json", _info(spec, columns) | dict(spec.info))
    if spec.stray_files:
        _write_stray_files(root)
    return root


def edit_parquet(file: Path, edit: Callable[[pa.Table], pa.Table]) -> None:
    """Replace a parquet file by what ``edit`` makes of its table."""
    table = pq.read_table(file)
    pq.write_table(edit(table), file)


def edit_info(dataset: Path, **changes: Any) -> None:
    """Change keys of info.json; None removes one."""
    info = json.loads((dataset / "meta/info.json").read_text()) | changes
    _write_json(dataset / "meta/info.json", {key: value for key, value in info.items() if value is not None})


def _columns(spec: DatasetSpec) -> list[dict[str, _Column]]:
    columns, first_row = [], 0
    for number, episode in zip(spec.numbers, spec.episodes, strict=True):
        columns.append(_episode_columns(spec, number, episode, first_row))
        first_row += episode.length
    return columns


def _episode_columns(spec: DatasetSpec, number: int, episode: EpisodeSpec, first_row: int) -> dict[str, _Column]:
    length = episode.length
    frames = range(length)
    state = [spec.state(number, frame, spec.state_dim) for frame in frames]
    action = [np.full(spec.action_dim, (frame % 8) / 8) + np.arange(spec.action_dim) for frame in frames]
    columns = {spec.state_key: _Column(state, "float32", (spec.state_dim,))}
    columns["action"] = _Column(action, "float32", (spec.action_dim,))
    if spec.camera_kind == "image":
        for camera, (key, (height, width)) in enumerate(spec.cameras.items()):
            pictures = [png_bytes(frame_pixels(number, frame, height, width, camera)) for frame in frames]
            images = [{"bytes": png, "path": f"frame-{frame:06d}.png"} for frame, png in enumerate(pictures)]
            columns[key] = _Column(images, "image", (height, width, 3))
    columns["timestamp"] = _Column(list(spec.timestamps(length)), "float32")
    columns["frame_index"] = _Column(list(frames), "int64")
    columns["episode_index"] = _Column([number] * length, "int64")
    columns["index"] = _Column(list(range(first_row, first_row + length)), "int64")
    columns["task_index"] = _Column([spec.task_index[episode.task]] * length, "int64")
    columns |= _outcome_columns(spec, episode)
    return {name: column for name, column in columns.items() if name not in spec.drop_columns}


def _outcome_columns(spec: DatasetSpec, episode: EpisodeSpec) -> dict[str, _Column]:
    length, columns = episode.length, {}
    last = [frame == length - 1 for frame in range(length)]
    if spec.success_column not in (None, "episode_success"):
        at_end = [end and bool(episode.success) for end in last]
        everywhere = [episode.success] * length
        unknown = episode.success is None or spec.success_type == "null"
        flags = [None] * length if unknown else at_end if spec.success_column == "next.success" else everywhere
        columns[spec.success_column] = _Column([_flag(spec, flag) for flag in flags], _flag_type(spec))
    if spec.intervention_column and any(one.interventions for one in spec.episodes):
        driven = [any(start <= frame < end for start, end in episode.interventions) for frame in range(length)]
        columns[spec.intervention_column] = _Column(driven, "bool")
    if spec.reward_columns:
        rewards = [float(end and bool(episode.success)) for end in last]
        columns["next.reward"] = _Column(rewards, "float32")
        columns["next.done"] = _Column([end and not episode.truncated for end in last], "bool")
        columns["next.truncated"] = _Column([end and episode.truncated for end in last], "bool")
    return columns


def _flag(spec: DatasetSpec, flag: bool | None) -> Any:
    if flag is None:
        return None
    return {"int": int(flag), "list": [flag], "string": "success" if flag else "failure"}.get(spec.success_type, flag)


def _flag_type(spec: DatasetSpec) -> str:
    return {"int": "int64", "list": "bool list", "null": "null"}.get(spec.success_type, spec.success_type)


def _arrow_type(spec: DatasetSpec, name: str, column: _Column) -> pa.DataType:
    if column.dtype == "image":
        return pa.struct({"bytes": pa.binary(), "path": pa.string()})
    words = [*spec.column_types.get(name, "").split(), *column.dtype.split()]
    containers = [word for word in words if word in ("list", "fixed_size_list")]
    if not containers and column.shape != (1,):
        containers = ["fixed_size_list" if spec.layout == "v2.1" else "list"]
    scalar = next(word for word in words if word not in ("list", "fixed_size_list"))
    element = pa.null() if scalar == "null" else pa.type_for_alias(scalar)
    if not containers:
        return element
    return pa.list_(element, column.shape[0] if containers[0] == "fixed_size_list" else -1)


def _table(spec: DatasetSpec, columns: dict[str, _Column]) -> pa.Table:
    arrays = {}
    for name, column in columns.items():
        kind, values = _arrow_type(spec, name, column), column.values
        is_list = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
        if is_list and column.shape == (1,) and "list" not in column.dtype:
            values = [None if value is None else [value] for value in values]
        elif pa.types.is_floating(kind) or (is_list and pa.types.is_floating(kind.value_type)):
            values = [np.asarray(value, dtype=np.float32) for value in values]
            values = [value.tolist() for value in values]
        arrays[name] = pa.array(values, type=kind)
    return pa.table(arrays)


def _in_parts(items: Sequence[Any], size: int | None) -> list[list[Any]]:
    size = size or max(len(items), 1)
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def _data_files(spec: DatasetSpec, tables: list[pa.Table]) -> tuple[list[list[pa.Table]], list[int]]:
    """Give the tables of each data file, and the number of the file of each episode."""
    size = 1 if spec.layout == "v2.1" else spec.episodes_per_file or len(tables)
    if spec.scatter == "no" or spec.layout == "v2.1":
        return _in_parts(tables, size), [position // size for position in range(len(tables))]
    count = max(2, -(-len(tables) // size))
    files: list[list[pa.Table]] = [[] for _ in range(count)]
    for position, table in enumerate(tables):
        cut = table.num_rows // 2 if spec.scatter == "rows" else table.num_rows
        files[position % count].insert(0, table.slice(0, cut))
        if cut < table.num_rows:
            files[(position + 1) % count].insert(0, table.slice(cut))
    return files, [position % count for position in range(len(tables))]


def _numbers_of_file(spec: DatasetSpec, number: int) -> dict[str, int]:
    chunk = number // spec.chunks_size
    file = number if spec.layout == "v2.1" else number % spec.chunks_size
    return {"chunk_index": chunk, "episode_chunk": chunk, "episode_index": number, "file_index": file}


def _write_data(root: Path, spec: DatasetSpec, tables: list[pa.Table]) -> list[int]:
    files, file_of = _data_files(spec, tables)
    for position, parts in enumerate(files):
        number = spec.numbers[position] if spec.layout == "v2.1" else position
        template = spec.data_path or DATA_PATH[spec.layout]
        file = root / template.format(**_numbers_of_file(spec, number))
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = pa.concat_tables(parts)
        if spec.shuffle_rows:
            order = np.random.default_rng(position).permutation(whole.num_rows)
            whole = whole.take(pa.array(order))
        with pq.ParquetWriter(file, whole.schema, compression="snappy", use_dictionary=True) as writer:
            start = 0
            for size in _group_sizes(spec, parts, whole.num_rows):
                writer.write_table(whole.slice(start, size), row_group_size=max(size, 1))
                start += size
    return file_of


def _group_sizes(spec: DatasetSpec, parts: list[pa.Table], rows: int) -> list[int]:
    if spec.row_groups == "episode":
        return [part.num_rows for part in parts]
    size = rows if spec.row_groups == "file" else spec.row_groups
    return [min(size, rows - start) for start in range(0, rows, max(size, 1))]


def _write_videos(root: Path, spec: DatasetSpec) -> list[dict[str, Any]]:
    """Write every camera's videos; the columns of each episode's metadata that say where its frames are."""
    places: list[dict[str, Any]] = [{} for _ in spec.episodes]
    size = 1 if spec.layout == "v2.1" else spec.episodes_per_video
    positions = range(len(spec.episodes))
    template = spec.video_path or VIDEO_PATH[spec.layout]
    for camera, (key, (height, width)) in enumerate(spec.cameras.items()):
        for file_number, part in enumerate(_in_parts(positions, size)):
            number = spec.numbers[part[0]] if spec.layout == "v2.1" else file_number
            numbers, frames, start_s = _numbers_of_file(spec, number), [], 0.0
            for position in part:
                length = spec.episodes[position].length
                times = start_s + spec.timestamps(length)
                frames += [(time, spec.numbers[position], frame) for frame, time in enumerate(times)]
                span = {"from_timestamp": start_s, "to_timestamp": start_s + length / spec.fps}
                place = {"chunk_index": numbers["chunk_index"], "file_index": numbers["file_index"], **span}
                places[position] |= {f"videos/{key}/{name}": value for name, value in place.items()}
                start_s += length / spec.fps
            if not frames:
                continue
            pictures = ((time, frame_pixels(episode, frame, height, width, camera)) for time, episode, frame in frames)
            file = root / template.format(video_key=key, **numbers)
            encode_video(file, pictures, fps=spec.fps, height=height, width=width, codec=spec.codec, gop=spec.gop)
    return places


def _write_tasks(root: Path, spec: DatasetSpec) -> None:
    texts, numbers = list(spec.task_index), list(spec.task_index.values())
    kind = spec.tasks or ("jsonl" if spec.layout == "v2.1" else "parquet")
    if kind == "jsonl":
        rows = [{"task_index": number, "task": text} for number, text in zip(numbers, texts, strict=True)]
        _write_jsonl(root / "meta/tasks.jsonl", rows)
        return
    table = pa.table({"task_index": pa.array(numbers, pa.int64()), "task": pa.array(texts, pa.string())})
    if kind == "parquet":
        table = table.replace_schema_metadata({"pandas": json.dumps(TASK_INDEX)})
    pq.write_table(table, root / "meta/tasks.parquet")


def _write_episodes(root: Path, spec: DatasetSpec, files: list[int], videos: list[dict[str, Any]]) -> None:
    rows, first_row = [], 0
    for position, (number, episode) in enumerate(zip(spec.numbers, spec.episodes, strict=True)):
        stated = episode.length if episode.stated_length is None else episode.stated_length
        row: dict[str, Any] = {"episode_index": number, "tasks": [episode.task], "length": stated}
        if spec.success_column == "episode_success":
            unknown = "unknown" if spec.success_type == "string" else None
            row["episode_success"] = unknown if episode.success is None else _flag(spec, episode.success)
        if spec.layout == "v3.0":
            place = _numbers_of_file(spec, files[position])
            row |= {f"data/{name}": place[name] for name in ("chunk_index", "file_index")}
            row |= {"dataset_from_index": first_row, "dataset_to_index": first_row + episode.length} | videos[position]
        rows.append(row)
        first_row += episode.length
    if spec.layout == "v2.1":
        _write_jsonl(root / "meta/episodes.jsonl", rows)
        return
    folder = root / "meta/episodes/chunk-000"
    folder.mkdir(parents=True)
    for number, part in enumerate(_in_parts(rows, spec.episodes_per_meta_file)):
        part = [row | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": number} for row in part]
        pq.write_table(pa.Table.from_pylist(part), folder / f"file-{number:03d}.parquet")


def _stats(parts: list[_Column]) -> dict[str, Any] | None:
    column = parts[0]
    if column.dtype == "image" or column.dtype not in ("float32", "int64", "bool"):
        return None
    values = [value for part in parts for value in part.values if value is not None]
    if not values:
        return None
    rows = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    named = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    return {name: value.tolist() for name, value in named.items()} | {"count": [len(rows)]}


def _write_stats(root: Path, spec: DatasetSpec, columns: list[dict[str, _Column]]) -> None:
    def stats_of(parts: list[dict[str, _Column]]) -> dict[str, Any]:
        found = {name: _stats([part[name] for part in parts]) for name in parts[0]}
        pixel = {"min": 40 / 255, "max": 215 / 255, "mean": 0.5, "std": 0.34}
        images = {name: [[[value]]] * 3 for name, value in pixel.items()} | {"count": [len(parts)]}
        shown = spec.cameras if spec.camera_kind != "none" else {}
        return {name: value for name, value in found.items() if value} | dict.fromkeys(shown, images)

    if spec.layout == "v2.1":
        rows = [{"episode_index": n, "stats": stats_of([c])} for n, c in zip(spec.numbers, columns, strict=True)]
        _write_jsonl(root / "meta/episodes_stats.jsonl", rows)
    else:
        _write_json(root / "meta/stats.json", stats_of(columns))


def _feature(spec: DatasetSpec, name: str, column: _Column) -> dict[str, Any]:
    if column.dtype == "image":
        return {"dtype": "image", "shape": list(column.shape), "names": ["height", "width", "channel"]}
    words = [*spec.column_types.get(name, "").split(), *column.dtype.split()]
    dtype = next(word for word in words if word not in ("list", "fixed_size_list"))
    return {"dtype": dtype, "shape": list(column.shape), "names": None}


def _info(spec: DatasetSpec, columns: list[dict[str, _Column]]) -> dict[str, Any]:
    features = {name: _feature(spec, name, column) for name, column in (columns[0] if columns else {}).items()}
    for key, (height, width) in spec.cameras.items() if spec.camera_kind == "video" else ():
        info = {"video.height": height, "video.width": width, "video.codec": spec.codec, "video.fps": spec.fps}
        info |= {"video.pix_fmt": "yuv420p", "video.is_depth_map": False, "has_audio": False, "video.channels": 3}
        shape = {"shape": [height, width, 3], "names": ["height", "width", "channel"]}
        features[key] = {"dtype": "video", **shape, "info": info}
    has_video = bool(spec.cameras) and spec.camera_kind == "video"
    info = {
        "codebase_version": spec.layout,
        "robot_type": spec.robot_type,
        "fps": spec.fps,
        "total_episodes": len(spec.episodes),
        "total_frames": sum(episode.length for episode in spec.episodes),
        "total_tasks": len(spec.task_index),
        "chunks_size": spec.chunks_size,
        "splits": {"train": f"0:{len(spec.episodes)}"},
        "data_path": spec.data_path or DATA_PATH[spec.layout],
        "video_path": (spec.video_path or VIDEO_PATH[spec.layout]) if has_video else None,
        "features": features,
    }
    if spec.layout == "v2.1":
        chunks = len({number // spec.chunks_size for number in spec.numbers})
        videos = len(spec.cameras) * len(spec.episodes) if has_video else 0
        return info | {"total_chunks": chunks, "total_videos": videos}
    return info | {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}


def _write_stray_files(root: Path) -> None:
    """Add what file managers and people leave behind, an extra copy of a data file included."""
    for folder in {file.parent for file in root.rglob("*") if file.is_file()}:
        (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1\0")
    for file in [*root.glob("data/*/*.parquet"), *root.glob("meta/**/*.parquet"), root / "meta/info.json"]:
        (file.parent / f"._{file.name}").write_bytes(b"\0\5\26\7\0\2\0\0Mac OS X")
    first = min(file for file in root.glob("data/*/*.parquet") if not file.name.startswith("._"))
    (first.parent / f"{first.stem} (copy).parquet").write_bytes(first.read_bytes())
    pq.write_table(pa.table({"note": ["mine"]}), root / "data/notes.parquet")


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=4))


def _write_jsonl(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
