"""What a LeRobot dataset says of itself: ``info.json``, tasks and episodes, of v2.1 and v3.0 alike."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from regrasp.core.errors import DatasetError, DatasetNotFound, listing
from regrasp.data.columns import open_parquet, primitives, read_table

Version = Literal["v2.1", "v3.0"]
_READ_AS: dict[str, Version] = {"v2.0": "v2.1", "v2.1": "v2.1", "v3.0": "v3.0"}
_DATA_PATH = {
    "v2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "v3.0": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
}
_VIDEO_PATH = {
    "v2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "v3.0": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


_UNREAD = ("stats/", "meta/episodes/", "dataset_from_index", "dataset_to_index")
"""Columns of meta/episodes that nothing here needs; stats are most of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRow:
    """What the metadata says of one episode."""

    episode_index: int
    length: int | None
    tasks: tuple[str, ...]
    fields: dict[str, Any]
    """Every other column: outcome, file numbers, video spans."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A dataset's metadata, the same above this point for both versions."""

    root: Path
    version: Version
    info: dict[str, Any]
    tasks: dict[int, str]
    episodes: dict[int, EpisodeRow]
    notes: list[str] = field(default_factory=list)
    """What in the metadata was odd but could be read."""

    @property
    def features(self) -> dict[str, dict]:
        """``info.json``'s features."""
        return self.info.get("features") or {}

    def data_files(self) -> list[Path]:
        """The data files that the metadata names, in order of episode or of chunk and file."""
        template = self.info.get("data_path") or _DATA_PATH[self.version]
        if self.version == "v2.1":
            return [self._path(template, _v21_numbers(self, episode)) for episode in sorted(self.episodes)]
        pairs = {self._file_numbers(row, "data") for row in self.episodes.values()}
        if None in pairs:
            return sorted(path for path in self.root.glob("data/*/*.parquet") if not path.name.startswith("."))
        return [self._path(template, _v30_numbers(*pair)) for pair in sorted(pair for pair in pairs if pair)]

    def video_file(self, key: str, episode: int) -> tuple[Path, float, float | None]:
        """The file that holds one camera of one episode, and where the episode starts and ends in it, in seconds."""
        template = self.info.get("video_path") or _VIDEO_PATH[self.version]
        row = self.episodes.get(episode)
        if row is None:
            message = f"'{self.root}' has no metadata for episode {episode}, so its video cannot be found."
            raise DatasetError(message)
        if self.version == "v2.1":
            return self._path(template, _v21_numbers(self, episode) | {"video_key": key}), 0.0, None
        numbers = self._file_numbers(row, f"videos/{key}")
        start = row.fields.get(f"videos/{key}/from_timestamp")
        if numbers is None or start is None:
            message = (
                f"'{self.root}' does not say where episode {episode} lies in the videos of {key!r}: meta/episodes has "
                f"no videos/{key}/chunk_index, file_index and from_timestamp. "
                "Mend: record or convert the dataset again."
            )
            raise DatasetError(message)
        end = row.fields.get(f"videos/{key}/to_timestamp")
        path = self._path(template, _v30_numbers(*numbers) | {"video_key": key})
        return path, float(start), None if end is None else float(end)

    def _file_numbers(self, row: EpisodeRow, prefix: str) -> tuple[int, int] | None:
        chunk, file = row.fields.get(f"{prefix}/chunk_index"), row.fields.get(f"{prefix}/file_index")
        if chunk is None or file is None:
            return None
        return _whole(chunk, f"{prefix}/chunk_index", self.root), _whole(file, f"{prefix}/file_index", self.root)

    def _path(self, template: str, numbers: dict[str, Any]) -> Path:
        try:
            return self.root / template.format(**numbers)
        except (KeyError, IndexError, ValueError) as error:
            message = (
                f"'{self.root}/meta/info.json' has the path template {template!r}, which cannot be filled in "
                f"({error}); known are: {listing(numbers)}. Mend: correct the template."
            )
            raise DatasetError(message) from None


def _v21_numbers(layout: Layout, episode: int) -> dict[str, Any]:
    chunk = episode // int(layout.info.get("chunks_size") or 1000)
    return {"episode_chunk": chunk, "chunk_index": chunk, "episode_index": episode, "file_index": episode}


def _v30_numbers(chunk: int, file: int) -> dict[str, Any]:
    return {"episode_chunk": chunk, "chunk_index": chunk, "file_index": file}


def _whole(value: object, name: str, where: Path) -> int:
    """A whole number of the metadata, which may be a list of one or a float; a DatasetError names what is not."""
    if type(value) is int:  # nearly always, and there may be a hundred thousand
        return value
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, int | float) and math.isfinite(value) and value == int(value):
        return int(value)
    message = f"'{where}' has {value!r} as {name}, where a whole number is needed. Mend: correct the metadata."
    raise DatasetError(message)


def read_layout(root: Path) -> Layout:
    """Read a dataset's metadata.

    Raises:
        DatasetNotFound: There is nothing at ``root``.
        DatasetError: It is not a LeRobot dataset, of an unknown version, or its metadata cannot be read.
    """
    if not root.exists():
        message = f"There is no dataset at '{root}': no such path. Mend: give the folder that holds meta/info.json."
        raise DatasetNotFound(message)
    info_path = root / "meta" / "info.json"
    if not info_path.is_file():
        message = (
            f"'{root}' is not a LeRobot dataset: it has no meta/info.json. "
            "Mend: give the folder that holds meta/ and data/."
        )
        raise DatasetError(message)
    info = _read_json(info_path)
    found = str(info.get("codebase_version"))
    if found not in _READ_AS:
        message = (
            f"'{root}' says codebase_version {found!r}; Regrasp reads v2.1 and v3.0. "
            "Mend: convert it with LeRobot's own converters."
        )
        raise DatasetError(message)
    fps = info.get("fps")
    if not isinstance(fps, int | float) or not fps > 0:
        message = (
            f"'{info_path}' needs a positive number of frames per second under 'fps'; found {fps!r}. Mend: add it."
        )
        raise DatasetError(message)
    notes: list[str] = []
    episodes = _read_episodes(root, notes)
    return Layout(
        root=root, version=_READ_AS[found], info=info, tasks=_read_tasks(root), episodes=episodes, notes=notes
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        message = f"'{path}' is not valid JSON ({error}). Mend: restore it from its source."
        raise DatasetError(message) from None
    if not isinstance(value, dict):
        message = (
            f"'{path}' holds a {type(value).__name__} where an object is needed. Mend: restore it from its source."
        )
        raise DatasetError(message)
    return value


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            message = f"'{path}', line {number}, is not valid JSON ({error}). Mend: restore it from its source."
            raise DatasetError(message) from None
        if not isinstance(row, dict):
            message = f"'{path}', line {number}, holds no object: {row!r:.80}. Mend: restore it from its source."
            raise DatasetError(message)
        rows.append(row)
    return rows


def _read_tasks(root: Path) -> dict[int, str]:
    parquet, lines = root / "meta" / "tasks.parquet", root / "meta" / "tasks.jsonl"
    if parquet.is_file():
        table = read_table(parquet)
        text = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
        if text is None or "task_index" not in table.column_names:
            found = listing(table.column_names)
            message = (
                f"'{parquet}' needs the columns task and task_index; found: {found}. Mend: restore it from its source."
            )
            raise DatasetError(message)
        pairs = zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True)
    elif lines.is_file():
        pairs = ((row.get("task_index"), row.get("task")) for row in _read_json_lines(lines))
    else:
        return {}
    texts = [(index, str(task)) for index, task in pairs if index is not None and task is not None]
    return {_whole(index, "task_index", root / "meta"): text for index, text in texts if text.strip()}


def _read_episodes(root: Path, notes: list[str]) -> dict[int, EpisodeRow]:
    lines = root / "meta" / "episodes.jsonl"
    files = sorted(path for path in (root / "meta" / "episodes").glob("**/*.parquet") if not path.name.startswith("."))
    if files:
        rows = [row for path in files for row in _parquet_rows(path)]
    elif lines.is_file():
        rows = _read_json_lines(lines)
    else:
        message = (
            f"'{root}' has neither meta/episodes.jsonl (v2.1) nor meta/episodes/*/*.parquet (v3.0). "
            "Mend: restore meta/ from its source."
        )
        raise DatasetError(message)
    episodes: dict[int, EpisodeRow] = {}
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    meta = root / "meta"
    for row in rows:
        number = _whole(row.pop("episode_index", None), "an episode's episode_index", meta)
        if number in episodes:
            notes.append(f"meta lists episode {number} twice; the first is used")
            continue
        length, tasks = _stated_length(row.pop("length", None), number, meta), row.pop("tasks", None)
        tasks = [tasks] if isinstance(tasks, str) else tasks or []
        key = tuple(map(str, tasks))
        if key not in known:
            known[key] = tuple(task for task in key if task.strip())
        episodes[number] = EpisodeRow(episode_index=number, length=length, tasks=known[key], fields=row)
    return episodes


def _stated_length(value: object, number: int, meta: Path) -> int | None:
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    return None if missing else _whole(value, f"the length of episode {number}", meta)


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    names = [name for name in open_parquet(path).schema_arrow.names if not name.startswith(_UNREAD)]
    table = read_table(path, names)
    columns = [_plain(table[name]) for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _plain(column: pa.ChunkedArray) -> list[Any]:
    """A column as Python values; numbers without nulls by way of numpy, which takes a tenth of the time."""
    numbers = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    return primitives(column).tolist() if numbers and not column.null_count else column.to_pylist()
