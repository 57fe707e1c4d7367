"""The episodes that a dataset's files really hold, found in one pass over them."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from regrasp.core.errors import DatasetError, listing
from regrasp.core.outcome import Outcome
from regrasp.data.agreement import compare_with_metadata, task_text
from regrasp.data.frame_rows import FrameRows, RowColumns, choose_columns, flag_outcome, read_rows, usable_files
from regrasp.data.layout import Layout
from regrasp.data.problem import Problem, error, warning


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
    hasher: "hashlib.blake2b | None" = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    digest: bytes = b""
    flags: list[int] = field(default_factory=list)
    task_changes: bool = False
    time_stands: int | None = None

    def append(self, frames: np.ndarray, first: int, consecutive: bool) -> None:
        """Take the next rows' frame numbers, which begin with ``first``."""
        if self.length == 0:
            self.first = first
        regular = consecutive and self.pieces is None and first == self.first + self.length
        if not regular:
            if self.pieces is None:
                self.pieces = [np.arange(self.first, self.first + self.length, dtype=np.int64)]
            self.pieces.append(frames.astype(np.int64))
        self.length += len(frames)

    def take(self, stamps: np.ndarray, task: object, task_changes: bool) -> None:
        """Take the next rows' timestamps, and the task of the first of them."""
        if self.hasher is not None:
            self.hasher.update(stamps)
        self.task = task if self.task is None else self.task
        self.task_changes |= task_changes or self.task != task

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
    files = usable_files(layout, problems)
    columns = choose_columns(files, task_column, flags=flags, problems=problems)
    episodes: list[_Episode] = []
    ordered = True
    if columns is not None:
        found: list[Problem] = []
        try:
            episodes = _collect(read_rows(files, columns, found))
        except _Scattered:
            found, ordered = [], False
            parts = list(read_rows(files, columns, found))
            episodes = _collect([FrameRows.sorted(parts)], repeated=found)
        problems += found
    return _build(layout, episodes, columns, ordered=ordered, flags_read=flags, problems=problems)


def _collect(blocks: Iterable[FrameRows], repeated: list[Problem] | None = None) -> list[_Episode]:
    """Walk over the rows in order. ``repeated`` takes the problem of repeated rows; without it they mean unsorted."""
    episodes: list[_Episode] = []
    for rows in blocks:
        number, frame, task = rows.episode, rows.frame, rows.task
        cuts = np.flatnonzero(np.diff(number)) + 1
        starts, stops = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(number)]])
        step = np.diff(frame, prepend=frame[0] - 1)
        step[starts] = 1
        if (step <= 0).any():
            if repeated is None:
                raise _Scattered
            repeated.append(_repetition(number, frame, step))
        consecutive = np.logical_and.reduceat(step == 1, starts)
        changes = np.logical_or.reduceat(task != np.repeat(task[starts], stops - starts), starts)
        standing = ~(np.diff(rows.time, prepend=-np.inf) > 0)  # NaN counts too
        standing[starts] = np.isnan(rows.time[starts])
        stands = np.logical_or.reduceat(standing, starts)
        stamps = rows.time.astype(np.float32, copy=False)
        flags = _extremes(rows.flag, starts, stops)
        runs = (number[starts], frame[starts], consecutive, changes, stands, task[starts])
        for start, stop, flag, *run in zip(
            starts.tolist(), stops.tolist(), flags, *(column.tolist() for column in runs), strict=True
        ):
            numbered, first, is_consecutive, task_changes, time_stands, code = run
            episode = _episode_of(episodes, numbered, first)
            episode.append(frame[start:stop], first, is_consecutive)
            episode.take(stamps[start:stop], code, task_changes)
            if time_stands and episode.time_stands is None:
                episode.time_stands = int(frame[start + int(np.argmax(standing[start:stop]))])
            episode.flags += flag
    return episodes


def _extremes(flag: np.ndarray | None, starts: np.ndarray, stops: np.ndarray) -> list[list[int]]:
    """The greatest, the least and the last flag of each run; nothing where there are none."""
    if flag is None:
        return [[]] * len(starts)
    found = [np.maximum.reduceat(flag, starts), np.minimum.reduceat(flag, starts), flag[stops - 1]]
    return np.stack(found, axis=1).tolist()


def _repetition(number: np.ndarray, frame: np.ndarray, step: np.ndarray) -> Problem:
    places = np.flatnonzero(step <= 0)
    others = f" (and {len(places) - 1} more such rows)" if len(places) > 1 else ""
    text = f"episode {number[places[0]]} has frame {frame[places[0]]} more than once{others}"
    return error(text, "record or convert the dataset again")


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


def _build(
    layout: Layout,
    episodes: list[_Episode],
    columns: RowColumns | None,
    *,
    ordered: bool,
    flags_read: bool,
    problems: list[Problem],
) -> EpisodeIndex:
    column, texts, flag = (columns.task, columns.texts, columns.flag) if columns is not None else (None, False, None)
    tasks = [task_text(layout, episode, column=column, texts=texts, problems=problems) for episode in episodes]
    compare_with_metadata(layout, episodes, problems)
    whole = hashlib.blake2b(digest_size=16)
    odd: dict[int, np.ndarray] = {}
    for episode, task in zip(episodes, tasks, strict=True):
        problems += _irregularities(episode)
        frames = episode.odd_frames()
        if frames is not None:
            odd[episode.number] = frames
        whole.update(f"{episode.number} {episode.length} {task}\n".encode())
        whole.update(b"" if frames is None else frames.tobytes())
        episode.close()
        whole.update(episode.digest)
    return EpisodeIndex(
        episode_index=np.array([episode.number for episode in episodes], dtype=np.int64),
        length=np.array([episode.length for episode in episodes], dtype=np.int64),
        task=tasks,
        odd=odd,
        fingerprint=whole.hexdigest(),
        ordered=ordered,
        flags_read=flags_read,
        flag_column=flag,
        flags={e.number: flag_outcome(flag, e.flags) for e in episodes} if flag else {},
        problems=problems,
    )


def _irregularities(episode: _Episode) -> list[Problem]:
    """Frame numbers and timestamps that do not run on."""
    found = []
    frames = episode.odd_frames()
    if frames is not None:
        span = f"{len(frames)} frames from {frames[0]} to {frames[-1]}"
        text = f"episode {episode.number}: frame numbers skip ({span})"
        found.append(warning(text, "none needed: frames are taken in order"))
    if episode.time_stands is not None:
        text = f"episode {episode.number}: the timestamp does not increase at frame {episode.time_stands}"
        found.append(warning(text, "correct the timestamps, by which video frames are found"))
    return found
