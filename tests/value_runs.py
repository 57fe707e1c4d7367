"""Small datasets with returns, and value fits on them that take a second or two."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from regrasp.recap.returns import ReturnsConfig
from regrasp.recap.returns import run as run_returns
from regrasp.recap.value_fit import ValueFitConfig
from regrasp.recap.value_fit import run as run_fit
from tests.datasets import EpisodeSpec, edit_info, edit_parquet, write_dataset

CAMERA = "observation.images.top"
LENGTHS = (22, 30, 26, 18, 34, 24)
DEMOS = [EpisodeSpec(length) for length in LENGTHS]
ROLLOUTS = [EpisodeSpec(length, success=place % 2 == 0) for place, length in enumerate(LENGTHS)]


def remaining(episode: int, frame: int, dimension: int) -> np.ndarray:
    """A state that tells how many frames are left, which elapsed time does not."""
    return np.full(dimension, float(LENGTHS[episode] - frame))


def nothing(episode: int, frame: int, dimension: int) -> np.ndarray:
    """A state that tells nothing."""
    return np.zeros(dimension)


def dataset(path: Path, **options: Any) -> Path:
    settings = {"episodes": DEMOS, "cameras": {CAMERA: (48, 64)}, "state": remaining} | options
    return write_dataset(path, **settings)


def with_objects(path: Path) -> Path:
    """Add what a simulator knows of its objects to a dataset without video: how many frames are left."""

    def add(table: pa.Table) -> pa.Table:
        rows = zip(table["episode_index"].to_pylist(), table["frame_index"].to_pylist(), strict=True)
        left = [[float(LENGTHS[episode] - frame), 1.0] for episode, frame in rows]
        return table.append_column("observation.environment_state", pa.array(left, pa.list_(pa.float32())))

    for file in sorted((path / "data").rglob("*.parquet")):
        edit_parquet(file, add)
    features = json.loads((path / "meta/info.json").read_text())["features"]
    names = {"dtype": "float32", "shape": [2], "names": None}
    edit_info(path, features=features | {"observation.environment_state": names})
    return path


def with_returns(*demos: Path, rollouts: tuple[Path, ...] = (), tag: str = "base", **options: Any) -> None:
    run_returns(ReturnsConfig(demos=demos, rollouts=rollouts, tag=tag, **options))


def fit_config(output: Path, *demos: Path, rollouts: tuple[Path, ...] = (), **options: Any) -> ValueFitConfig:
    settings = {"returns": "base", "image_size": 32, "steps": 6, "checkpoint_every": 3, "batch_size": 8, "workers": 1}
    settings |= {"holdout": 0.3, "device": "cpu"} | options
    return ValueFitConfig(demos=demos, rollouts=rollouts, output=output, **settings)


def fit(output: Path, *demos: Path, **options: Any) -> Any:
    return run_fit(fit_config(output, *demos, **options))
