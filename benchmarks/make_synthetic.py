"""Write a large synthetic LeRobot v3.0 dataset, laid out as LeRobot's writer lays it out.

    python benchmarks/make_synthetic.py OUT_DIR --frames 10000000

One row group per episode (160 to 489 frames), snappy and dictionaries, a new file every 1.25 million frames, ten
tasks in turn at random, three of four episodes a success (``next.success`` at the last frame). Rows are narrower
than a robot's: one state of 8 numbers, no action, no cameras. The stages skip those columns, so only the
bytes between the columns that they read would differ.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FPS = 30
TASKS = [f"pick up object {number} and place it in the basket" for number in range(10)]
FRAMES_PER_FILE = 1_250_000
STATE = 8
SCALARS = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64"}
SCALARS |= {"task_index": "int64", "next.success": "bool"}
TASK_INDEX = {
    "index_columns": ["task"],
    "column_indexes": [],
    "columns": [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": stored, "metadata": None}
        for name, kind, stored in [("task_index", "int64", "int64"), ("task", "unicode", "object")]
    ],
    "pandas_version": "2.3.3",
}


def draw_episodes(frames: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw length, task and success of as many episodes as make up ``frames``; arrays over episodes."""
    length = rng.integers(160, 490, size=frames // 160 + 1)
    count = int(np.searchsorted(np.cumsum(length), frames)) + 1
    length = length[:count]
    length[-1] -= length.sum() - frames
    offset = np.concatenate([[0], np.cumsum(length)])
    task, success = rng.integers(0, len(TASKS), size=count), rng.random(count) < 0.75
    return {
        "length": length,
        "offset": offset,
        "task": task,
        "success": success,
        "file": offset[:-1] // FRAMES_PER_FILE,
    }


def rows_of(episodes: dict[str, np.ndarray], which: np.ndarray, rng: np.random.Generator) -> pa.Table:
    """Make the rows of the episodes numbered ``which``, in order."""
    length = episodes["length"][which]
    total, starts = int(length.sum()), np.cumsum(length) - length
    frame = np.arange(total) - np.repeat(starts, length)
    success = np.zeros(total, dtype=bool)
    success[starts + length - 1] = episodes["success"][which]
    state = pa.array(rng.standard_normal(total * STATE, dtype=np.float32))
    lists = pa.ListArray.from_arrays(pa.array(np.arange(0, total * STATE + 1, STATE, dtype=np.int32)), state)
    columns = {"observation.state": lists, "timestamp": (frame / FPS).astype(np.float32), "frame_index": frame}
    columns |= {"episode_index": np.repeat(which, length), "index": episodes["offset"][which[0]] + np.arange(total)}
    return pa.table(columns | {"task_index": np.repeat(episodes["task"][which], length), "next.success": success})


def write_data(root: Path, episodes: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Write the data files, one row group per episode."""
    (root / "data/chunk-000").mkdir(parents=True)
    for file in np.unique(episodes["file"]):
        which = np.flatnonzero(episodes["file"] == file)
        table = rows_of(episodes, which, rng)
        path = root / f"data/chunk-000/file-{file:03d}.parquet"
        with pq.ParquetWriter(path, table.schema, compression="snappy", use_dictionary=True) as writer:
            start = 0
            for length in episodes["length"][which].tolist():
                writer.write_table(table.slice(start, length))
                start += length


def write_meta(root: Path, episodes: dict[str, np.ndarray]) -> None:
    """Write info.json, the tasks and the episodes' metadata."""
    count, frames = len(episodes["length"]), int(episodes["offset"][-1])
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    zeros = np.zeros(count, dtype=np.int64)
    table = {"episode_index": np.arange(count), "tasks": [[TASKS[task]] for task in episodes["task"]]}
    table |= {"length": episodes["length"], "data/chunk_index": zeros, "data/file_index": episodes["file"]}
    table |= {"dataset_from_index": episodes["offset"][:-1], "dataset_to_index": episodes["offset"][1:]}
    table |= {"meta/episodes/chunk_index": zeros, "meta/episodes/file_index": zeros}
    pq.write_table(pa.table(table), root / "meta/episodes/chunk-000/file-000.parquet")
    tasks = pa.table({"task_index": pa.array(range(len(TASKS)), pa.int64()), "task": TASKS})
    pq.write_table(tasks.replace_schema_metadata({"pandas": json.dumps(TASK_INDEX)}), root / "meta/tasks.parquet")
    features = {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in SCALARS.items()}
    features["observation.state"] = {"dtype": "float32", "shape": [STATE], "names": None}
    info = {"codebase_version": "v3.0", "robot_type": "synthetic", "fps": FPS, "features": features}
    info |= {"total_episodes": count, "total_frames": frames, "total_tasks": len(TASKS), "chunks_size": 1000}
    info |= {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200, "splits": {"train": f"0:{count}"}}
    info |= {"data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", "video_path": None}
    (root / "meta/info.json").write_text(json.dumps(info, indent=4))


def make_synthetic(root: Path, frames: int, seed: int = 0) -> None:
    """Write the dataset of ``frames`` frames into the new folder ``root``, whole or not at all."""
    rng = np.random.default_rng(seed)
    episodes = draw_episodes(frames, rng)
    unfinished = root.with_name(root.name + ".unfinished")
    unfinished.mkdir(parents=True)
    write_data(unfinished, episodes, rng)
    write_meta(unfinished, episodes)
    unfinished.rename(root)


def main() -> None:
    """Write one dataset and say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    make_synthetic(options.out_dir, options.frames, options.seed)
    print(f"{options.out_dir}: {options.frames} frames in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
