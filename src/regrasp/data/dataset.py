"""One LeRobot dataset, of either layout, as the stages see it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from regrasp.core.errors import ConfigError, DatasetError, NonFiniteData, listing, nearest
from regrasp.core.outcome import Source
from regrasp.data.columns import BLOCK_ROWS, Block, ColumnStream, open_parquet, read_blocks, scalars, to_numpy
from regrasp.data.index import EpisodeIndex, scan
from regrasp.data.layout import Layout, read_layout

STATE = "observation.state"
ENVIRONMENT_STATE = "observation.environment_state"
"""What a simulator knows of its objects, in LeRobot's words."""
CORRECTION = "intervention"
CORRECTION_COLUMNS = ("intervention", "complementary_info.is_intervention", "intervene_flag")
"""Columns that mark the frames a person drove, in the order in which they are believed."""


@dataclass(frozen=True, kw_only=True)
class Camera:
    """A camera: ``name`` in the run, ``key`` in the dataset's files."""

    name: str
    key: str
    kind: Literal["video", "image"]
    height: int | None
    width: int | None
    codec: str | None


@dataclass(frozen=True, kw_only=True)
class VideoSpan:
    """Where one camera's view of one episode lies: frame t is shown at ``start_s + timestamp_t``."""

    path: Path
    start_s: float
    end_s: float | None


class Dataset:
    """A dataset that was opened; nothing of its data is read until it is asked for."""

    def __init__(
        self, meta: Layout, *, name: str, source: Source, keys: dict[str, str], weight: float, sidecars: Path | None
    ) -> None:
        """Use ``open_dataset``."""
        self.meta = meta
        self.path, self.layout, self.features = meta.root, meta.version, meta.features
        self.name, self.source, self.weight = name, source, weight
        self.keys = keys
        self.fps = float(meta.info["fps"])
        self.robot_type: str | None = meta.info.get("robot_type")
        self.sidecar_dir = meta.root / "meta" if sidecars is None else sidecars / name
        self._index: EpisodeIndex | None = None

    @cached_property
    def columns(self) -> list[str]:
        """The columns of the first data file."""
        for path in self.meta.data_files():
            if path.is_file():
                return list(open_parquet(path).schema_arrow.names)
        return []

    @cached_property
    def cameras(self) -> dict[str, Camera]:
        """The cameras, by the run's names."""
        found = {}
        for key, feature in self.features.items():
            if feature.get("dtype") not in {"video", "image"}:
                continue
            details = feature.get("info") or feature.get("video_info") or {}
            shape = list(feature.get("shape") or [])
            names = [str(name) for name in feature.get("names") or []]
            sizes = dict(zip(names, shape, strict=False))
            height = sizes.get("height", shape[0] if len(shape) == 3 else None)
            width = sizes.get("width", shape[1] if len(shape) == 3 else None)
            name = self.keys.get(key, key)
            found[name] = Camera(
                name=name,
                key=key,
                kind=feature["dtype"],
                height=height,
                width=width,
                codec=details.get("video.codec") or details.get("codec"),
            )
        return found

    def mapped_column(self, name: str) -> str | None:
        """The dataset's own column that ``keys`` makes the run's ``name``, or None."""
        return next((key for key, found in self.keys.items() if found == name), None)

    def own_column(self, name: str) -> str:
        """The dataset's own name of the run's ``name``, whether or not it has such a column."""
        return self.mapped_column(name) or name

    @property
    def state_key(self) -> str | None:
        """The dataset's own column for the run's ``observation.state``."""
        mapped = self.mapped_column(STATE)
        return mapped or (STATE if STATE in self.features or STATE in self.columns else None)

    def vector_columns(self, names: Sequence[str]) -> list[str]:
        """The dataset's own columns for those of the run's vectors, such as ``observation.state``, that it has."""
        own = map(self.own_column, names)
        return [column for column in own if column in self.columns or column in self.features]

    @property
    def task_column(self) -> str | None:
        """The column of task texts that ``keys`` names, or None."""
        return self.mapped_column("task")

    def correction_column(self, chosen: str | None = None) -> str | None:
        """The column that marks corrections: ``chosen``, else what ``keys`` names, else the first known, or None."""
        mapped = [key for key, name in self.keys.items() if name == CORRECTION]
        candidates = [*([chosen] if chosen else []), *mapped, *CORRECTION_COLUMNS]
        return next((name for name in candidates if name in self.columns), None)

    def survey(self, *, flags: bool = True) -> EpisodeIndex:
        """Return the index with whatever problems were found; reads every data file once.

        Args:
            flags: Whether to read the success flags too, if they have not been.
        """
        if self._index is None or (flags and not self._index.flags_read):
            self._index = scan(self.meta, task_column=self.task_column, flags=flags)
        return self._index

    def index(self, *, flags: bool = False) -> EpisodeIndex:
        """Return the episodes and frames that the files hold; a DatasetError says why a stage cannot use them."""
        index = self.survey(flags=flags)
        for problem in index.problems:
            if problem.level == "error":
                problem.raise_for(self.path)
        return index

    def stream(self, columns: Sequence[str], episodes: Sequence[int] | None = None) -> ColumnStream:
        """Columns in order of episode and frame.

        Args:
            columns: The dataset's own column names. Vectors come as ``[R, D]``, images as their bytes.
            episodes: Only these, ascending; all where it is left out.
        """
        missing = [name for name in columns if name not in self.columns]
        if missing:
            has = f"it has: {listing(self.columns, 20)}.{nearest(missing[0], self.columns)}"
            message = f"'{self.path}' has no column {missing[0]!r}; {has}"
            raise DatasetError(message)
        index = self.index()
        wanted = None if episodes is None else np.asarray(sorted(episodes), dtype=np.int64)
        keys = [] if wanted is None else ["episode_index"]
        names: list[str] = list(dict.fromkeys([*columns, *keys]))
        blocks = self._ordered_blocks(names, wanted) if index.ordered else self._sorted_block(names)
        return ColumnStream(_only(blocks, wanted, columns), f"'{self.path}'")

    def _ordered_blocks(self, names: list[str], wanted: np.ndarray | None) -> Iterator[Block]:
        for path in self.meta.data_files():
            groups = None if wanted is None else _groups_with(self._episode_ranges.get(path), wanted)
            if groups == []:
                continue
            for table in read_blocks(path, names, rows=_rows_at_once(self, names), groups=groups):
                if table.num_rows:
                    yield {name: _column(table, name) for name in names}

    @cached_property
    def _episode_ranges(self) -> dict[Path, np.ndarray]:
        """The least and greatest episode of each row group of each file, ``[G, 2]``, where the file says them."""
        ranges = {}
        for path in self.meta.data_files():
            found = _episode_ranges_of(path)
            if found is not None:
                ranges[path] = found
        return ranges

    def _sorted_block(self, names: list[str]) -> Iterator[Block]:
        keys = ["episode_index", "frame_index"]
        tables = [t for path in self.meta.data_files() for t in read_blocks(path, list(dict.fromkeys([*keys, *names])))]
        whole = pa.concat_tables(tables, promote_options="permissive")
        order = np.lexsort([scalars(whole[name], name, np.int64) for name in reversed(keys)])
        whole = whole.take(pa.array(order))
        yield {name: _column(whole, name) for name in names}

    def video_span(self, camera: str, episode_index: int) -> VideoSpan:
        """Where the run's ``camera`` shows an episode; a ConfigError names a camera that is not there."""
        if camera not in self.cameras:
            has = f"it has: {listing(self.cameras) or 'none'}.{nearest(camera, self.cameras)}"
            message = f"'{self.path}' has no camera {camera!r}; {has}"
            raise ConfigError(message)
        path, start, end = self.meta.video_file(self.cameras[camera].key, episode_index)
        return VideoSpan(path=path, start_s=start, end_s=end)


def _episode_ranges_of(path: Path) -> np.ndarray | None:
    file = open_parquet(path)
    if "episode_index" not in file.schema_arrow.names:
        return None
    paths = [file.schema.column(place).path for place in range(len(file.schema))]
    column = next(place for place, name in enumerate(paths) if name.split(".")[0] == "episode_index")
    ranges = []
    for group in range(file.metadata.num_row_groups):
        found = file.metadata.row_group(group).column(column).statistics
        if found is None or not found.has_min_max:
            return None
        ranges.append((found.min, found.max))
    return np.array(ranges).reshape(-1, 2)


def _groups_with(ranges: np.ndarray | None, wanted: np.ndarray) -> list[int] | None:
    """The row groups that may hold any of the wanted episodes; None where that is not known."""
    if ranges is None:
        return None
    first = np.searchsorted(wanted, ranges[:, 0], side="left")
    last = np.searchsorted(wanted, ranges[:, 1], side="right")
    return np.flatnonzero(last > first).tolist()


def _rows_at_once(dataset: Dataset, names: list[str]) -> int:
    """Fewer rows at a time where they hold images."""
    images = any(dataset.features.get(name, {}).get("dtype") == "image" for name in names)
    return 256 if images else BLOCK_ROWS


def _column(table: pa.Table, name: str) -> np.ndarray:
    if name in {"episode_index", "frame_index"}:
        return scalars(table[name], name, np.int64)
    values = to_numpy(table[name], name)
    if values.ndim == 2 and values.shape[1] == 1 and name != STATE:
        values = values[:, 0]
    return values


def _only(blocks: Iterator[Block], wanted: np.ndarray | None, columns: Sequence[str]) -> Iterator[Block]:
    for block in blocks:
        if wanted is not None:
            keep = np.isin(block["episode_index"], wanted)
            if not keep.any():
                continue
            block = {name: values[keep] for name, values in block.items()}
        yield {name: block[name] for name in columns}


def check_finite(values: np.ndarray, column: str, dataset: Dataset, episode_index: int, frames: np.ndarray) -> None:
    """Raise NonFiniteData, naming the first frame, if any of an episode's rows is NaN or infinite."""
    bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if bad.any():
        message = (
            f"'{dataset.path}' has NaN or infinity in {column!r}, episode {episode_index}, frame {frames[bad][0]} "
            f"({int(bad.sum())} frames of it). Mend: correct the recording, or leave the episode out."
        )
        raise NonFiniteData(message)


def open_dataset(
    path: Path | str,
    *,
    name: str | None = None,
    source: Source = Source.ROLLOUT,
    keys: dict[str, str] | None = None,
    weight: float = 1.0,
    sidecars: Path | None = None,
) -> Dataset:
    """Open a LeRobot dataset, v2.1 or v3.0.

    Args:
        path: The folder that holds ``meta/`` and ``data/``.
        name: What the run calls it; the folder's name where it is left out.
        source: Demonstrations or rollouts.
        keys: The dataset's column → the run's name, for cameras, state and task.
        weight: Its share of a training mixture, relative to its frames.
        sidecars: Where its sidecars go, in a folder of its name; ``meta/`` where it is left out.

    Raises:
        DatasetNotFound, DatasetError: See ``read_layout``.
    """
    root = Path(path)
    meta = read_layout(root)
    called = name or root.resolve().name
    checked = _checked_keys(meta, keys or {})
    return Dataset(meta, name=called, source=source, keys=checked, weight=weight, sidecars=sidecars)


_RUN_NAMES = (STATE, "task", CORRECTION)
"""What a run calls the columns that are no cameras."""


def _checked_keys(meta: Layout, keys: dict[str, str]) -> dict[str, str]:
    known: dict[str, Any] = meta.features
    for key in keys:
        if known and key not in known:
            has = f"it has: {listing(known, 20)}.{nearest(key, known)}"
            message = f"`keys` of '{meta.root}' names the column {key!r}, which it does not have; {has}"
            raise ConfigError(message)
    cameras = [key for key, feature in known.items() if feature.get("dtype") in {"video", "image"}]
    for key, name in keys.items():
        if key not in cameras and name not in _RUN_NAMES:
            message = (
                f"`keys` of '{meta.root}' calls {key!r} {name!r}, which nothing reads.{nearest(name, _RUN_NAMES)} "
                f"Besides cameras, a run knows: {listing(_RUN_NAMES)}."
            )
            raise ConfigError(message)
    names = [*keys.values(), *(key for key in cameras if key not in keys)]
    doubled = sorted({name for name in keys.values() if names.count(name) > 1})
    if doubled:
        message = f"`keys` of '{meta.root}' gives two columns the name {doubled[0]!r}. Mend: give each its own."
        raise ConfigError(message)
    return keys
