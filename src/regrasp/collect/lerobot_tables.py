"""A LeRobot v3.0 dataset without cameras, written in one pass.

LeRobot's own writer takes 65 ms for an episode of 100 frames without images (measured with 0.6.1), and its files
have no footer, so cannot be read, until it is closed. This one takes 2 ms and gives the same columns, types and
metadata; ``tests/test_recording.py`` compares the two.

Source: lerobot 0.6.1, ``lerobot.datasets`` (``dataset_writer``, ``compute_stats``, ``io_utils``).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from regrasp.collect.environment import STATE, EnvironmentSpec
from regrasp.collect.rollout import EpisodeRecord
from regrasp.core.errors import InternalError

CHUNKS_SIZE = 1000
DATA_FILE_MB = 100
VIDEO_FILE_MB = 200
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}

Statistics = dict[str, dict[str, np.ndarray]]
"""Per feature: min, max, mean, std and quantiles, one number per dimension, and count, one number."""


def episode_features(spec: EnvironmentSpec) -> dict[str, dict[str, Any]]:
    """Return the features that every recording has, cameras aside, in LeRobot's terms."""

    def flag() -> dict[str, Any]:
        return {"dtype": "bool", "shape": (1,), "names": None}

    vectors = {
        key: {"dtype": "float32", "shape": (size,), "names": (list(spec.state_names) or None) if key == STATE else None}
        for key, size in spec.vector_sizes.items()
    }
    return {
        **vectors,
        "action": {"dtype": "float32", "shape": (spec.action_size,), "names": list(spec.action_names) or None},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": flag(),
        "next.success": flag(),
        "intervention": flag(),
    }


def episode_columns(episode: EpisodeRecord) -> dict[str, np.ndarray]:
    """Return an episode's values for ``episode_features``: [T] or [T, D]."""
    last = np.arange(episode.steps) == episode.steps - 1
    return {
        **{key: value for key, value in episode.observations.items() if value.ndim == 2},
        "action": episode.actions,
        "next.reward": episode.rewards,
        "next.done": last,
        "next.success": last & episode.success,
        "intervention": episode.interventions,
    }


def write_tables(root: Path, spec: EnvironmentSpec, episodes: Iterable[EpisodeRecord]) -> int:
    """Write a dataset into the new folder ``root`` and return its number of frames.

    Args:
        root: must not exist.
        spec: of the environment, without cameras.
        episodes: read once; only one is held at a time.

    Raises:
        InternalError: the environment has cameras, whose images this cannot write.
    """
    if spec.cameras:
        raise InternalError(f"{spec.name} is recorded with cameras, which need LeRobot's own writer.")
    writer = _Writer(root, spec)
    for episode in episodes:
        writer.add(episode)
    return writer.close()


def statistics_of(columns: dict[str, np.ndarray]) -> Statistics:
    """Return the statistics of one episode's columns, each [T] or [T, D]."""
    widths = {key: value.shape[1] if value.ndim == 2 else 1 for key, value in columns.items()}
    matrix = np.concatenate([value.reshape(len(value), -1).astype(np.float64) for value in columns.values()], axis=1)
    rows = {
        "min": matrix.min(0),
        "max": matrix.max(0),
        "mean": matrix.mean(0),
        "std": matrix.std(0),
        **dict(zip(QUANTILES, np.quantile(matrix, list(QUANTILES.values()), axis=0), strict=True)),
    }
    ends = np.cumsum(list(widths.values()))
    found: Statistics = {}
    for (key, width), end in zip(widths.items(), ends, strict=True):
        found[key] = {name: row[end - width : end] for name, row in rows.items()}
        found[key]["count"] = np.array([len(matrix)])
    return found


@dataclass
class _Total:
    """Statistics over episodes, combined as LeRobot combines them: quantiles are means weighted by frames."""

    count: int = 0
    low: np.ndarray = field(default_factory=lambda: np.array(np.inf))
    high: np.ndarray = field(default_factory=lambda: np.array(-np.inf))
    sums: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, part: dict[str, np.ndarray]) -> None:
        """Take one episode's statistics of this feature in."""
        count = int(part["count"][0])
        self.count += count
        self.low, self.high = np.minimum(self.low, part["min"]), np.maximum(self.high, part["max"])
        square = part["std"] ** 2 + part["mean"] ** 2
        for name, value in {"mean": part["mean"], "square": square, **{q: part[q] for q in QUANTILES}}.items():
            self.sums[name] = self.sums.get(name, 0.0) + count * value

    def result(self) -> dict[str, list[float] | list[int]]:
        """Return the feature's entry of stats.json."""
        means = {name: value / self.count for name, value in self.sums.items()}
        variance = np.maximum(means["square"] - means["mean"] ** 2, 0.0)
        return {
            "min": self.low.tolist(),
            "max": self.high.tolist(),
            "mean": means["mean"].tolist(),
            "std": np.sqrt(variance).tolist(),
            "count": [self.count],
            **{name: means[name].tolist() for name in QUANTILES},
        }


class _Writer:
    """The files of one dataset while they are written."""

    def __init__(self, root: Path, spec: EnvironmentSpec) -> None:
        root.mkdir(parents=True)
        self._root, self._spec = root, spec
        self._features = episode_features(spec)
        self._schema = pa.schema([(key, _arrow_type(feature)) for key, feature in self._features.items()])
        for key, kind in [("timestamp", pa.float32()), *((key, pa.int64()) for key in _NUMBERS)]:
            self._schema = self._schema.append(pa.field(key, kind))
        self._file, self._frames = 0, 0
        self._rows: list[dict[str, Any]] = []
        self._totals: dict[str, _Total] = {}
        self._parquet: pq.ParquetWriter | None = None

    def add(self, episode: EpisodeRecord) -> None:
        """Append one episode as a row group."""
        number, steps = len(self._rows), episode.steps
        columns = episode_columns(episode)
        columns["timestamp"] = (np.arange(steps) / self._spec.fps).astype(np.float32)
        frames = np.arange(steps, dtype=np.int64)
        numbers = (frames, np.full(steps, number), self._frames + frames, np.zeros(steps, np.int64))
        columns.update(zip(_NUMBERS, numbers, strict=True))
        writer, chunk, file = self._data_file()
        arrays = [_arrow_array(columns[name], self._schema.field(name).type) for name in self._schema.names]
        writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        statistics = statistics_of(columns)
        for key, part in statistics.items():
            self._totals.setdefault(key, _Total()).add(part)
        row: dict[str, Any] = {
            "episode_index": number,
            "tasks": [self._spec.task],
            "length": steps,
            "data/chunk_index": chunk,
            "data/file_index": file,
            "dataset_from_index": self._frames,
            "dataset_to_index": self._frames + steps,
        }
        for key, part in statistics.items():
            row.update({f"stats/{key}/{name}": value.tolist() for name, value in part.items()})
        self._rows.append({**row, "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        self._frames += steps

    def _data_file(self) -> tuple[pq.ParquetWriter, int, int]:
        """Return the writer of the present data file, beginning the next one where this one is full."""
        path = self._data_path()
        if self._parquet is not None and path.stat().st_size >= DATA_FILE_MB << 20:
            self._parquet.close()
            self._parquet, self._file = None, self._file + 1
            path = self._data_path()
        if self._parquet is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._parquet = pq.ParquetWriter(path, self._schema)
        return self._parquet, self._file // CHUNKS_SIZE, self._file % CHUNKS_SIZE

    def _data_path(self) -> Path:
        chunk, file = divmod(self._file, CHUNKS_SIZE)
        return self._root / DATA_PATH.format(chunk_index=chunk, file_index=file)

    def close(self) -> int:
        """Write the metadata."""
        if self._parquet is not None:
            self._parquet.close()
        meta = self._root / "meta"
        (meta / "episodes/chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._rows), meta / "episodes/chunk-000/file-000.parquet")
        tasks = pa.table({"task_index": pa.array([0], pa.int64()), "task": pa.array([self._spec.task])})
        pq.write_table(tasks.replace_schema_metadata({"pandas": json.dumps(_TASK_INDEX)}), meta / "tasks.parquet")
        stats = {key: total.result() for key, total in self._totals.items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=4))
        (meta / "info.json").write_text(json.dumps(self._info(), indent=4))
        return self._frames

    def _info(self) -> dict[str, Any]:
        fps = self._spec.fps
        features = dict(self._features)
        features["timestamp"] = {"dtype": "float32", "shape": (1,), "names": None}
        features.update({key: {"dtype": "int64", "shape": (1,), "names": None} for key in _NUMBERS})
        return {
            "codebase_version": "v3.0",
            "fps": int(fps) if fps == int(fps) else fps,
            "features": features,
            "total_episodes": len(self._rows),
            "total_frames": self._frames,
            "total_tasks": 1,
            "chunks_size": CHUNKS_SIZE,
            "data_files_size_in_mb": DATA_FILE_MB,
            "video_files_size_in_mb": VIDEO_FILE_MB,
            "data_path": DATA_PATH,
            "video_path": None,
            "robot_type": self._spec.robot_type,
            "splits": {"train": f"0:{len(self._rows)}"},
        }


_NUMBERS = ("frame_index", "episode_index", "index", "task_index")
_TASK_INDEX = {
    "index_columns": ["task"],
    "column_indexes": [
        {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    ],
    "columns": [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": stored, "metadata": None}
        for name, kind, stored in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ],
    "pandas_version": "2.3.3",
}
"""Tells pandas that the task's text is the table's index, which is where LeRobot looks it up."""


def _arrow_type(feature: dict[str, Any]) -> pa.DataType:
    kind = {"float32": pa.float32(), "bool": pa.bool_()}[feature["dtype"]]
    return kind if feature["shape"] == (1,) else pa.list_(kind, feature["shape"][0])


def _arrow_array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), kind.value_type), kind.list_size)
    return pa.array(values.reshape(-1), kind)
