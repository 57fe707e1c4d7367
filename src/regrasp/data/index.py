"""The episodes that a dataset's files really hold, found in one pass over them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from regrasp.core.errors import DatasetError, listing
from regrasp.core.outcome import Outcome
from regrasp.data.columns import open_parquet, primitives, read_blocks, scalars
from regrasp.data.layout import Layout
from regrasp.data.problem import Problem, error, warning

FLAG_COLUMNS = ("next.success", "is_success")
"""Success flags in the data, in the order in which they are believed."""
_TRUE, _FALSE, _NULL, _UNREADABLE = 1, 0, -1, -2


@dataclass(frozen=True, kw_only=True)
class EpisodeIndex:
    """Which frames a dataset holds, by episode, in ascending order of episode and frame.

    Attributes:
        episode_index: The episodes' numbers, ascending, ``[E]``.
        length: Their frames, ``[E]``.
        task: Their task texts.
        odd: The frame numbers of episodes that do not simply count 0, 1, 2, …, by episode number.
        fingerprint: A digest over the (episode, frame, timestamp) rows and the episodes' tasks.
        ordered: Whether the files hold the rows in this order already.
        flags_read: Whether success flags were looked for.
        flag_column: The success flag that was read, or None.
        flags: What it says of each episode, with a reason where it says nothing.
        problems: Everything found wrong on the way.
    """

    episode_index: np.ndarray
    length: np.ndarray
    task: list[str]
    odd: dict[int, np.ndarray]
    fingerprint: str
    ordered: bool
    flags_read: bool = True
    flag_column: str | None = None
    flags: dict[int, tuple[Outcome, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def offset(self) -> np.ndarray:
        """The first row of each episode, and the total at the end, ``[E + 1]``."""
        return np.concatenate([[0], np.cumsum(self.length)]).astype(np.int64)

    @property
    def total(self) -> int:
        """All frames."""
        return int(self.length.sum())

    @property
    def tasks(self) -> list[str]:
        """The different task texts, sorted."""
        return sorted(set(self.task))

    def position(self, episode_index: int) -> int:
        """Where an episode stands in this index; a DatasetError names one that is not there."""
        place = int(np.searchsorted(self.episode_index, episode_index))
        if place == len(self.episode_index) or self.episode_index[place] != episode_index:
            message = f"There is no episode {episode_index}; there are: {listing(self.episode_index.tolist())}."
            raise DatasetError(message)
        return place

    def frames(self, position: int) -> np.ndarray:
        """The frame numbers of the episode at ``position``, ascending."""
        number = int(self.episode_index[position])
        return self.odd[number] if number in self.odd else np.arange(self.length[position], dtype=np.int64)

    def keys(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The (episode_index, frame_index) columns of the episodes at ``positions``, one after the other."""
        length = self.length[positions]
        starts = np.cumsum(length) - length
        frame = np.arange(int(length.sum()), dtype=np.int64) - np.repeat(starts, length)
        for place in [k for k, p in enumerate(positions) if int(self.episode_index[p]) in self.odd] if self.odd else []:
            frame[starts[place] : starts[place] + length[place]] = self.frames(int(positions[place]))
        return np.repeat(self.episode_index[positions], length), frame


class _Scattered(Exception):
    """The files do not hold the rows in order; they have to be sorted first."""


@dataclass(slots=True)
class _Episode:
    number: int
    length: int = 0
    first: int = 0
    task: object = None
    pieces: list[np.ndarray] | None = None
    hasher: "hashlib._Hash | None" = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    digest: bytes = b""
    flags: list[int] = field(default_factory=list)
    task_changes: bool = False
    time_stands: int | None = None

    def append(self, frames: np.ndarray, consecutive: bool) -> None:
        """Take the next rows' frame numbers."""
        if self.length == 0:
            self.first = int(frames[0])
        regular = consecutive and self.pieces is None and int(frames[0]) == self.first + self.length
        if not regular:
            if self.pieces is None:
                self.pieces = [np.arange(self.first, self.first + self.length, dtype=np.int64)]
            self.pieces.append(frames.astype(np.int64))
        self.length += len(frames)

    def close(self) -> None:
        """Take no more rows: keep the digest of the timestamps instead of what makes it."""
        if self.hasher is not None:
            self.digest, self.hasher = self.hasher.digest(), None

    def odd_frames(self) -> np.ndarray | None:
        if self.pieces is not None:
            return np.concatenate(self.pieces)
        return None if self.first == 0 else np.arange(self.first, self.first + self.length, dtype=np.int64)


def scan(layout: Layout, *, task_column: str | None = None, flags: bool = True) -> EpisodeIndex:
    """Read every data file once and return the episodes they hold.

    Args:
        layout: The dataset's metadata.
        task_column: A column of task texts that stands in for ``task_index``.
        flags: Whether to read the success flag too.

    Returns:
        The index; its ``problems`` say what no stage should go on with.
    """
    problems: list[Problem] = []
    files = _usable_files(layout, problems)
    columns = _columns(layout, files, task_column, flags, problems)
    try:
        episodes, ordered = _collect(_file_blocks(files, columns, problems), columns), True
    except _Scattered:
        tables = list(_file_blocks(files, columns, problems=[]))
        whole = pa.concat_tables(tables, promote_options="permissive")
        order = np.lexsort([scalars(whole[name], name, np.int64) for name in ("frame_index", "episode_index")])
        episodes, ordered = _collect(iter([whole.take(pa.array(order))]), columns, repeated=problems), False
    return replace(_build(layout, episodes, columns, ordered, problems), flags_read=flags)


def _usable_files(layout: Layout, problems: list[Problem]) -> list[Path]:
    named = layout.data_files()
    for path in named:
        if not path.is_file():
            problems.append(error(f"the metadata names '{path}', which does not exist", "restore it from its source"))
    known = set(named)
    strays = [
        str(path.relative_to(layout.root))
        for path in sorted((layout.root / "data").glob("**/*.parquet"))
        if path not in known and not path.name.startswith(".")
    ]
    if strays:
        text = f"{len(strays)} parquet files that the metadata does not name are left out: {listing(strays, 3)}"
        problems.append(warning(text, "remove them from data/, or add their episodes to the metadata"))
    return [path for path in named if path.is_file()]


def _columns(
    layout: Layout, files: list[Path], task_column: str | None, flags: bool, problems: list[Problem]
) -> dict[str, str | None]:
    """The columns to read, by what they are for."""
    names: set[str] = set()
    for path in files:
        try:
            names = set(open_parquet(path).schema_arrow.names)
            break
        except DatasetError:
            continue
    for needed in ("episode_index", "frame_index", "timestamp"):
        if files and names and needed not in names:
            problems.append(error(f"the data has no column {needed!r}", "record or convert the dataset again"))
    if task_column is not None and names and task_column not in names:
        problems.append(error(f"the data has no column {task_column!r}, which `keys` names as task", "correct the recipe"))
    task = task_column or ("task_index" if "task_index" in names else None)
    flag = next((name for name in FLAG_COLUMNS if name in names), None) if flags else None
    return {"task": task if task in names else None, "flag": flag, "text": task_column}


def _file_blocks(files: list[Path], columns: dict[str, str | None], problems: list[Problem]) -> Iterator[pa.Table]:
    wanted = ["episode_index", "frame_index", "timestamp", *[c for c in (columns["task"], columns["flag"]) if c]]
    if any(problem.text.startswith("the data has no column") for problem in problems):
        return
    for path in files:
        try:
            for table in read_blocks(path, wanted, dictionary=[columns["text"]] if columns["text"] else []):
                missing = [name for name in wanted if name not in table.column_names]
                if missing:
                    message = f"'{path}' lacks the columns {listing(missing)}, which other files of the dataset have."
                    raise DatasetError(message)
                yield table
        except DatasetError as trouble:
            problems.append(error(str(trouble).split(" Mend:")[0].rstrip("."), "restore the file from its source"))


def _collect(
    tables: Iterator[pa.Table], columns: dict[str, str | None], repeated: list[Problem] | None = None
) -> list[_Episode]:
    """Walk over the rows in order. ``repeated`` takes the problem of repeated rows; without it they mean unsorted."""
    episodes: list[_Episode] = []
    for table in tables:
        if table.num_rows == 0:
            continue
        number = scalars(table["episode_index"], "episode_index", np.int64)
        frame = scalars(table["frame_index"], "frame_index", np.int64)
        time = scalars(table["timestamp"], "timestamp", np.float64)
        task = _task_codes(table, columns)
        flag = _flag_codes(table[columns["flag"]]) if columns["flag"] else None
        cuts = np.flatnonzero(np.diff(number)) + 1
        starts, stops = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(number)]])
        step = np.diff(frame, prepend=frame[0] - 1)
        step[starts] = 1
        if (step <= 0).any():
            if repeated is None:
                raise _Scattered
            place = int(np.flatnonzero(step <= 0)[0])
            text = f"episode {number[place]} has frame {frame[place]} more than once"
            repeated.append(error(text, "record or convert the dataset again"))
        consecutive = np.logical_and.reduceat(step == 1, starts)
        changes = np.logical_or.reduceat(task != np.repeat(task[starts], stops - starts), starts)
        standing = ~(np.diff(time, prepend=-np.inf) > 0)  # NaN counts too
        standing[starts] = False
        stands = np.logical_or.reduceat(standing, starts)
        stamps = time.astype(np.float32)
        for run, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            episode = _episode_of(episodes, int(number[start]), int(frame[start]))
            episode.append(frame[start:stop], bool(consecutive[run]))
            episode.hasher.update(stamps[start:stop])  # type: ignore[union-attr] - open until the next begins
            episode.task = task[start] if episode.task is None else episode.task
            episode.task_changes |= bool(changes[run]) or episode.task != task[start]
            if stands[run] and episode.time_stands is None:
                episode.time_stands = int(frame[start + int(np.argmax(standing[start:stop]))])
            if flag is not None:
                part = flag[start:stop]
                episode.flags += [int(part.max()), int(part.min()), int(part[-1])]
    return episodes


def _episode_of(episodes: list[_Episode], number: int, frame: int) -> _Episode:
    """The episode that the next rows belong to: the last one, or a new one with a higher number."""
    if episodes and episodes[-1].number == number:
        last = episodes[-1]
        seen = last.pieces[-1][-1] if last.pieces is not None else last.first + last.length - 1
        if frame <= seen:
            raise _Scattered
        return last
    if episodes and episodes[-1].number > number:
        raise _Scattered
    if episodes:
        episodes[-1].close()
    episodes.append(_Episode(number))
    return episodes[-1]


def _task_codes(table: pa.Table, columns: dict[str, str | None]) -> np.ndarray:
    name = columns["task"]
    if name is None:
        return np.zeros(table.num_rows, dtype=np.int64)
    if columns["text"] is None:
        return scalars(table[name], name, np.int64)
    return np.array(table[name].to_pylist(), dtype=object)


def _flag_codes(column: pa.ChunkedArray) -> np.ndarray:
    """Each row's flag as 1, 0, -1 (null) or -2 (not a flag)."""
    kind = column.type
    if pa.types.is_nested(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.full(len(column), _UNREADABLE, dtype=np.int8)
    if not column.null_count and pa.types.is_boolean(kind):
        return primitives(column).astype(np.int8)
    if pa.types.is_null(kind):
        return np.full(len(column), _NULL, dtype=np.int8)
    numbers = primitives(pc.cast(column, pa.float64()))
    codes = np.where(np.isnan(numbers), _NULL, np.where(np.isin(numbers, (0, 1)), numbers, _UNREADABLE))
    return codes.astype(np.int8)


def _flag_outcome(name: str, codes: list[int]) -> tuple[Outcome, str]:
    """What an episode's flags say; ``codes`` are the greatest, least and last of each run of rows."""
    greatest, least, last = max(codes[0::3]), min(codes[1::3]), codes[-1]
    if least == _UNREADABLE:
        return Outcome.UNKNOWN, f"{name} is not a true/false column"
    if name == "next.success":
        if greatest == _TRUE:
            return Outcome.SUCCESS, name
        return (Outcome.UNKNOWN, f"{name} is null") if least == _NULL else (Outcome.FAILURE, name)
    if last == _NULL:
        return Outcome.UNKNOWN, f"{name} is null in the last frame"
    return (Outcome.SUCCESS if last == _TRUE else Outcome.FAILURE), name


def _build(
    layout: Layout, episodes: list[_Episode], columns: dict[str, str | None], ordered: bool, problems: list[Problem]
) -> EpisodeIndex:
    tasks = [_task_text(layout, episode, columns, problems) for episode in episodes]
    _compare_with_metadata(layout, episodes, tasks, problems)
    whole = hashlib.blake2b(digest_size=16)
    odd: dict[int, np.ndarray] = {}
    for episode, task in zip(episodes, tasks, strict=True):
        frames = episode.odd_frames()
        if frames is not None:
            odd[episode.number] = frames
        whole.update(f"{episode.number} {episode.length} {task}\n".encode())
        whole.update(b"" if frames is None else frames.tobytes())
        episode.close()
        whole.update(episode.digest)
    flag = columns["flag"]
    return EpisodeIndex(
        episode_index=np.array([episode.number for episode in episodes], dtype=np.int64),
        length=np.array([episode.length for episode in episodes], dtype=np.int64),
        task=tasks,
        odd=odd,
        fingerprint=whole.hexdigest(),
        ordered=ordered,
        flag_column=flag,
        flags={e.number: _flag_outcome(flag, e.flags) for e in episodes} if flag else {},
        problems=problems,
    )


def _task_text(
    layout: Layout, episode: _Episode, columns: dict[str, str | None], problems: list[Problem]
) -> str:
    row = layout.episodes.get(episode.number)
    listed = row.tasks if row is not None else ()
    if episode.task_changes:
        text = f"the task changes within episode {episode.number}; its first frame's counts for the whole episode"
        problems.append(warning(text, "split the episode where the task changes"))
    if columns["text"] is not None:
        if isinstance(episode.task, str) and episode.task.strip():
            return episode.task
        problems.append(error(f"episode {episode.number} has no text in {columns['text']!r}", "fill in the column"))
        return ""
    if columns["task"] is None:
        if len(listed) == 1:
            return listed[0]
        text = f"episode {episode.number} has no task_index and its metadata lists {len(listed)} tasks"
        problems.append(error(text, "give each episode one task in the metadata"))
        return ""
    text = layout.tasks.get(int(episode.task))  # type: ignore[call-overload] - an integer code
    if text is None:
        message = f"episode {episode.number} has task_index {episode.task}, which meta/tasks has no text for"
        problems.append(error(message, "add the task's text to meta/tasks"))
        return ""
    if listed and text not in listed:
        message = f"episode {episode.number}: the data says task {text!r}, the metadata {listing(map(repr, listed))}"
        problems.append(warning(message + "; the data's is used", "correct the metadata"))
    return text


def _compare_with_metadata(
    layout: Layout, episodes: list[_Episode], tasks: list[str], problems: list[Problem]
) -> None:
    lengths = {episode.number: episode.length for episode in episodes}
    empty = sorted(set(layout.episodes) - set(lengths))
    if empty and not any(problem.level == "error" for problem in problems):
        text = f"the metadata lists episodes without any frame in the data: {listing(empty)}"
        problems.append(error(text, "remove them from the metadata, or restore their data"))
    unlisted = sorted(set(lengths) - set(layout.episodes))
    if unlisted:
        text = f"the data holds episodes that the metadata does not list: {listing(unlisted)}"
        problems.append(warning(text, "add them to the metadata; without it their videos cannot be found"))
    for number, row in sorted(layout.episodes.items()):
        if row.length is not None and number in lengths and row.length != lengths[number]:
            text = f"episode {number}: the metadata says {row.length} frames, the data holds {lengths[number]}"
            problems.append(warning(text + "; the data counts", "correct the metadata"))
    for name, counted in (("total_episodes", len(lengths)), ("total_frames", sum(lengths.values()))):
        said = layout.info.get(name)
        if said is not None and said != counted:
            problems.append(warning(f"info.json says {name} {said}, the data holds {counted}", "correct info.json"))
    for episode in episodes:
        if episode.pieces is not None or episode.first != 0:
            frames = episode.odd_frames()
            text = f"episode {episode.number}: frame numbers skip ({len(frames)} frames from {frames[0]} to {frames[-1]})"  # type: ignore[arg-type, index]
            problems.append(warning(text, "none needed: frames are taken in order"))
        if episode.time_stands is not None:
            text = f"episode {episode.number}: the timestamp does not increase at frame {episode.time_stands}"
            problems.append(warning(text, "correct the timestamps, by which video frames are found"))
    if not episodes and not any(problem.level == "error" for problem in problems):
        problems.append(error("the dataset has no frames", "record some episodes"))
