"""Recordings: what they hold, that stock LeRobot opens them, and that a kill loses nothing."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from regrasp.collect.environment import STATE, CameraSpec, EnvironmentSpec
from regrasp.collect.lerobot_tables import episode_columns, episode_features, statistics_of
from regrasp.collect.recording import Recording, RecordingHeader
from regrasp.collect.rollout import EpisodeRecord
from regrasp.core.errors import ConfigError, DatasetError
from regrasp.core.outcome import Outcome, Source
from regrasp.data.dataset import open_dataset
from regrasp.data.outcomes import read_outcomes

SPEC = EnvironmentSpec(
    name="test",
    task="put the cube in the box",
    state_size=3,
    action_size=2,
    max_episode_steps=50,
    fps=20.0,
    robot_type="testbot",
    state_names=("x", "y", "z"),
    action_names=("dx", "dy"),
)
HEADER = RecordingHeader(
    environment=SPEC, source="rollout", policy="runs/a", policy_fingerprint="0123abcd", settings={"seed": 4}
)


def episode(seed: int, steps: int = 12, spec: EnvironmentSpec = SPEC) -> EpisodeRecord:
    generator = np.random.default_rng(seed)
    seen = {STATE: generator.normal(size=(steps, 3)).astype(np.float32)}
    for camera in spec.cameras:
        shape = (steps, camera.height, camera.width, 3)
        seen[camera.key] = np.full(shape, 20 * (seed + 1), np.uint8)
    return EpisodeRecord(
        seed=seed,
        observations=seen,
        actions=generator.normal(size=(steps, 2)).astype(np.float32),
        rewards=generator.normal(size=steps).astype(np.float32),
        success=seed % 2 == 0,
        interventions=np.arange(steps) < seed,
        notes={"style": f"style{seed}"},
    )


def record(path: Path, episodes: int = 3, header: RecordingHeader = HEADER) -> Path:
    recording = Recording(path, header)
    for number in range(episodes):
        recording.save(number, episode(number, steps=10 + number, spec=header.environment))
    return recording.publish()


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_our_own_reader_gives_back_what_was_recorded(tmp_path: Path):
    dataset = open_dataset(record(tmp_path / "a"), source=Source.ROLLOUT)
    index = dataset.index()
    assert index.length.tolist() == [10, 11, 12]
    assert list(index.task) == [SPEC.task] * 3
    rows = dataset.stream([STATE, "action", "next.reward", "intervention"]).take(33)
    for key in (STATE, "action", "next.reward", "intervention"):
        wanted = np.concatenate([episode_columns(episode(n, steps=10 + n))[key] for n in range(3)])
        np.testing.assert_array_equal(np.asarray(rows[key]).reshape(wanted.shape), wanted)
    assert list(read_outcomes(dataset).by_episode.values()) == [Outcome.SUCCESS, Outcome.FAILURE, Outcome.SUCCESS]


def test_each_attempt_is_recorded_with_its_outcome_and_policy(tmp_path: Path):
    rows = pq.read_table(record(tmp_path / "a") / "meta/attempts.parquet").to_pylist()
    assert rows[1] == {
        "episode_index": 1,
        "outcome": "failure",
        "steps": 11,
        "seed": 1,
        "environment": "test",
        "policy": "runs/a",
        "policy_fingerprint": "0123abcd",
        "style": "style1",
    }


def test_the_end_of_an_episode_is_marked_on_its_last_frame_only():
    won, lost = episode_columns(episode(0)), episode_columns(episode(1))
    assert won["next.done"].tolist() == [False] * 11 + [True]
    assert won["next.success"].tolist() == [False] * 11 + [True]
    assert lost["next.done"].tolist() == [False] * 11 + [True]
    assert not lost["next.success"].any()


def test_stock_lerobot_reads_the_dataset_and_would_have_written_the_same(tmp_path: Path):
    lerobot = pytest.importorskip("lerobot.datasets.lerobot_dataset")
    ours = record(tmp_path / "ours")
    stock = lerobot.LeRobotDataset.create(
        "test/stock",
        fps=20,
        features=episode_features(SPEC),
        root=tmp_path / "stock",
        robot_type="testbot",
        use_videos=False,
    )
    for number in range(3):
        columns = episode_columns(episode(number, steps=10 + number))
        for t in range(10 + number):
            stock.add_frame({**{key: np.atleast_1d(value[t]) for key, value in columns.items()}, "task": SPEC.task})
        stock.save_episode()
    stock.finalize()
    read = lerobot.LeRobotDataset("test/ours", root=ours)
    again = lerobot.LeRobotDataset("test/stock", root=tmp_path / "stock")
    assert len(read) == len(again) == 33
    for t in (0, 9, 10, 32):
        assert read[t].keys() == again[t].keys()
        for key, value in again[t].items():
            assert str(read[t][key]) == str(value), key
    for key, stats in again.meta.stats.items():
        for name, value in stats.items():
            # LeRobot's quantiles come from a histogram, ours are exact: they differ by a bin.
            tolerance = 0.35 if name.startswith("q") else 1e-5
            np.testing.assert_allclose(read.meta.stats[key][name], value, atol=tolerance, err_msg=f"{key} {name}")
    assert_same_schema(ours, tmp_path / "stock")


def assert_same_schema(ours: Path, stock: Path) -> None:
    for name in ("data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet"):
        found, wanted = pq.read_schema(ours / name), pq.read_schema(stock / name)
        assert dict(zip(found.names, found.types, strict=True)) == dict(zip(wanted.names, wanted.types, strict=True))
    found, wanted = (json.loads((root / "meta/info.json").read_text()) for root in (ours, stock))
    assert found == wanted


def test_statistics_of_a_small_episode():
    # 0, 1, 2, 3: mean 1.5, population deviation sqrt(1.25), median 1.5, 10% quantile 0.3.
    found = statistics_of({"a": np.arange(4.0), "b": np.array([[1.0, 2.0]] * 4)})
    assert found["a"]["mean"].tolist() == [1.5]
    assert found["a"]["std"].tolist() == [pytest.approx(1.25**0.5)]
    assert found["a"]["q50"].tolist() == [1.5]
    assert found["a"]["q10"].tolist() == [pytest.approx(0.3)]
    assert found["b"]["max"].tolist() == [1.0, 2.0]
    assert found["b"]["count"].tolist() == [4]


def test_a_dataset_with_a_camera_opens_in_stock_lerobot(tmp_path: Path):
    lerobot = pytest.importorskip("lerobot.datasets.lerobot_dataset")
    spec = replace(SPEC, cameras=(CameraSpec(name="front", height=64, width=64),))
    path = record(tmp_path / "a", episodes=2, header=replace(HEADER, environment=spec))
    read = lerobot.LeRobotDataset("test/a", root=path)
    assert len(read) == 21
    for t, grey in ((0, 20), (20, 40)):
        image = np.asarray(read[t]["observation.images.front"])
        assert image.shape == (3, 64, 64)
        np.testing.assert_allclose(image, grey / 255, atol=0.03)
    assert len(pq.read_table(path / "meta/attempts.parquet")) == 2


def test_cameras_that_the_encoder_cannot_take_are_refused_before_anything_is_recorded(tmp_path: Path):
    spec = replace(SPEC, cameras=(CameraSpec(name="front", height=24, width=64),))
    with pytest.raises(ConfigError, match=r"'front' of test is 24 x 64 pixels.*at least 32 a side"):
        Recording(tmp_path / "a", replace(HEADER, environment=spec))
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.test_recording import HEADER, episode
from regrasp.collect.recording import Recording
recording = Recording(Path(sys.argv[1]), HEADER)
for number in range(2):
    recording.save(number, episode(number, steps=10 + number))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_finished_episodes_survive_a_kill_and_a_rerun_gives_the_same_files(tmp_path: Path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a")], check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "a").exists()
    recording = Recording(tmp_path / "a", HEADER)
    assert recording.finished() == {0: True, 1: False}
    recording.save(2, episode(2, steps=12))
    recording.publish()
    assert files(tmp_path / "a") == files(record(tmp_path / "undisturbed"))
    assert not (tmp_path / "a.recording").exists()


def test_a_kill_while_the_dataset_is_written_leaves_the_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recording = Recording(tmp_path / "a", HEADER)
    for number in range(3):
        recording.save(number, episode(number, steps=10 + number))

    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("regrasp.collect.recording._to_disk", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recording.publish()
    assert not (tmp_path / "a").exists()
    again = Recording(tmp_path / "a", HEADER)
    assert len(again.finished()) == 3
    again.publish()
    assert files(tmp_path / "a") == files(record(tmp_path / "undisturbed"))


def test_a_finished_recording_is_not_made_again(tmp_path: Path):
    path = record(tmp_path / "a")
    before = files(path)
    again = Recording(path, HEADER)
    assert again.complete
    assert again.publish() == path
    assert files(path) == before


def test_other_settings_are_refused_with_what_differs(tmp_path: Path):
    path = record(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"settings\.seed was 4, is 5"):
        Recording(path, replace(HEADER, settings={"seed": 5}))
    Recording(tmp_path / "b", HEADER).save(0, episode(0))
    with pytest.raises(ConfigError, match=r"unfinished recording.*policy was 'runs/a', is 'runs/b'"):
        Recording(tmp_path / "b", replace(HEADER, policy="runs/b"))


def test_a_recording_in_which_nothing_was_saved_is_in_no_one_s_way(tmp_path: Path):
    Recording(tmp_path / "a", HEADER)
    other = replace(HEADER, policy="runs/b")
    assert record(tmp_path / "a", header=other) == tmp_path / "a"
    assert json.loads((tmp_path / "a/meta/recording.json").read_text()) == other.to_json()


def test_a_folder_with_something_else_is_never_written_over(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and was not recorded with these settings"):
        Recording(tmp_path / "a", HEADER)
    assert (tmp_path / "a/notes.txt").read_text() == "mine"


def test_some_of_the_episodes_can_be_chosen(tmp_path: Path):
    recording = Recording(tmp_path / "a", HEADER)
    for number in range(4):
        recording.save(number, episode(number))
    path = recording.publish([0, 2])
    assert [row["seed"] for row in pq.read_table(path / "meta/attempts.parquet").to_pylist()] == [0, 2]
    assert open_dataset(path).index().episode_index.tolist() == [0, 1]


def test_a_recording_without_episodes_is_an_error(tmp_path: Path):
    with pytest.raises(DatasetError, match="no episode to write"):
        Recording(tmp_path / "a", HEADER).publish()


def test_a_full_data_file_is_followed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("regrasp.collect.lerobot_tables.DATA_FILE_MB", 0)
    path = record(tmp_path / "a")
    assert [file.name for file in sorted(path.glob("data/*/*.parquet"))] == [
        "file-000.parquet",
        "file-001.parquet",
        "file-002.parquet",
    ]
    assert open_dataset(path).index().length.tolist() == [10, 11, 12]
