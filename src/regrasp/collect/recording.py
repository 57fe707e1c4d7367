"""Recordings of episodes that survive a kill and become LeRobot datasets.

While a recording runs, every finished episode is a file of its own in ``NAME.recording`` beside the dataset to be,
and a rerun with the same settings keeps them. When all are there, the dataset is written and appears whole.
"""

import io
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from regrasp.collect.environment import EnvironmentSpec
from regrasp.collect.lerobot_tables import write_tables
from regrasp.collect.lerobot_videos import check_cameras, write_with_videos
from regrasp.collect.rollout import EpisodeRecord
from regrasp.core.errors import ConfigError, DatasetError
from regrasp.data.storage import write_bytes_atomic, write_json_atomic

HEADER = "recording.json"
ATTEMPTS = "attempts.parquet"


@dataclass(frozen=True, kw_only=True)
class RecordingHeader:
    """What a recording is of. Two recordings with equal headers hold the same episodes."""

    environment: EnvironmentSpec
    source: str
    """``demo`` or ``rollout``."""
    policy: str
    """What acted, in words: a checkpoint's path or an expert's mix."""
    policy_fingerprint: str
    """Digest of the policy's weights and settings."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Whatever else decides the episodes: seed, number of episodes, noise scale, β."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON; of an environment that shows no vector beside its state, none is mentioned."""
        content = json.loads(json.dumps(asdict(self)))
        if not self.environment.vectors:
            del content["environment"]["vectors"]
        return content


class Recording:
    """One recording, begun or taken up again."""

    def __init__(self, path: Path, header: RecordingHeader) -> None:
        """Begin the recording that becomes the dataset ``path``, or take up what is left of it.

        Raises:
            ConfigError: ``path`` holds something else, its unfinished recording was begun with other settings, or a
                camera is too small to be recorded.
        """
        check_cameras(header.environment)
        self.path, self.header = Path(path), header
        self._folder = self.path.with_name(self.path.name + ".recording")
        self.complete = self._is_complete()
        if self.complete:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(
                f"'{self.path}' exists and was not recorded with these settings, and nothing is ever written over. "
                f"{_differences(_read_header(self.path / 'meta' / HEADER), header.to_json())} Give another path to "
                f"--record, or remove this one."
            )
        found = _read_header(self._folder / HEADER)
        if found is not None and found != header.to_json() and self.finished():
            raise ConfigError(
                f"'{self._folder}' is an unfinished recording that was begun with other settings. "
                f"{_differences(found, header.to_json())} Run that one again to finish it, or remove the folder."
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self._folder / HEADER, header.to_json())

    def _is_complete(self) -> bool:
        return _read_header(self.path / "meta" / HEADER) == self.header.to_json()

    def finished(self) -> dict[int, bool]:
        """Return the numbers of the episodes that are saved, and whether each was a success."""
        found: dict[int, bool] = {}
        for file in sorted(self._folder.glob("episode_*.npz")):
            _, number, outcome = file.stem.split("_")
            found[int(number)] = outcome == "success"
        return found

    def save(self, number: int, episode: EpisodeRecord) -> None:
        """Save a finished episode; it is on disk when this returns."""
        content = io.BytesIO()
        observations = {f"seen/{key}": value for key, value in episode.observations.items()}
        np.savez(
            content,
            allow_pickle=False,
            seed=np.array(episode.seed),
            actions=episode.actions,
            rewards=episode.rewards,
            interventions=episode.interventions,
            notes=np.array(json.dumps(episode.notes)),
            **observations,
        )
        write_bytes_atomic(self._file(number, episode.success), content.getvalue())

    def _file(self, number: int, success: bool) -> Path:
        return self._folder / f"episode_{number:06d}_{'success' if success else 'failure'}.npz"

    def load(self, number: int, success: bool) -> EpisodeRecord:
        """Return a saved episode."""
        with np.load(self._file(number, success), allow_pickle=False) as file:
            return EpisodeRecord(
                seed=int(file["seed"]),
                observations={key.partition("/")[2]: file[key] for key in file.files if key.startswith("seen/")},
                actions=file["actions"],
                rewards=file["rewards"],
                success=success,
                interventions=file["interventions"],
                notes=json.loads(str(file["notes"])),
            )

    def publish(self, numbers: Sequence[int] | None = None) -> Path:
        """Write the dataset of the saved episodes and remove the recording's own files.

        Args:
            numbers: which episodes, in the dataset's order; all by number if not given.

        Returns:
            The dataset's path. Besides LeRobot's files it holds ``meta/recording.json``, the header, and
            ``meta/attempts.parquet``, one row per episode: outcome, steps, seed, policy and its fingerprint, notes.

        Raises:
            DatasetError: there is no episode to write.
        """
        if self.complete:
            return self.path
        outcomes = self.finished()
        chosen = sorted(outcomes) if numbers is None else list(numbers)
        if not chosen:
            raise DatasetError(f"There is no episode to write to '{self.path}'.")
        building = self._folder / "dataset"
        shutil.rmtree(building, ignore_errors=True)
        attempts: list[dict[str, Any]] = []
        write = write_with_videos if self.header.environment.cameras else write_tables
        write(building, self.header.environment, self._read(chosen, outcomes, attempts))
        pq.write_table(pa.Table.from_pylist(attempts), building / "meta" / ATTEMPTS)
        (building / "meta" / HEADER).write_text(json.dumps(self.header.to_json(), indent=2) + "\n")
        _to_disk(building)
        if self.path.exists():
            self.path.rmdir()
        building.replace(self.path)
        shutil.rmtree(self._folder)
        self.complete = True
        return self.path

    def _read(
        self, numbers: Sequence[int], outcomes: dict[int, bool], attempts: list[dict[str, Any]]
    ) -> Iterator[EpisodeRecord]:
        """Yield the chosen episodes, noting each in ``attempts``."""
        for index, number in enumerate(numbers):
            episode = self.load(number, outcomes[number])
            attempts.append(
                {
                    "episode_index": index,
                    "outcome": "success" if episode.success else "failure",
                    "steps": episode.steps,
                    "seed": episode.seed,
                    "environment": self.header.environment.name,
                    "policy": self.header.policy,
                    "policy_fingerprint": self.header.policy_fingerprint,
                    **episode.notes,
                }
            )
            yield episode


def _read_header(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def _differences(found: dict[str, Any] | None, wanted: dict[str, Any]) -> str:
    """Say in words what two headers differ in."""
    if found is None:
        return "It does not say how it was made."
    was, now = _flat(found), _flat(wanted)
    changed = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    return "It differs in: " + "; ".join(f"{key} was {was.get(key)!r}, is {now.get(key)!r}" for key in changed) + "."


def _flat(header: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in header.items():
        flat.update(
            {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
        )
    return flat


def _to_disk(folder: Path) -> None:
    """Wait until every file of a folder is on disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
