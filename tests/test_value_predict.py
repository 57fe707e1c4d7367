"""Predicting values: every frame, in order, with the pixels of training, whatever stops on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from regrasp.core.errors import CheckpointError, ConfigError, NonFiniteData, SidecarError, VideoError
from regrasp.core.scale import ScaleSet
from regrasp.data.dataset import open_dataset
from regrasp.data.frames import FrameReader, episode_timestamps
from regrasp.data.sidecar import read_provenance
from regrasp.learn import value_predictor
from regrasp.learn.value_checkpoint import load_value_checkpoint, load_value_model
from regrasp.learn.value_predictor import ValuePredictor, expected_values
from regrasp.models.value_model import ValueInputs
from regrasp.recap.value_predict import ValuePredictConfig, run
from tests.datasets import EpisodeSpec, edit_parquet
from tests.value_runs import CAMERA, LENGTHS, ROLLOUTS, dataset, fit, nothing, with_returns


def predict(checkpoint: Path, *demos: Path, rollouts: tuple[Path, ...] = (), **options: object) -> object:
    settings = {"tag": "base", "workers": 1, "device": "cpu", "batch_size": 7} | options
    return run(ValuePredictConfig(demos=demos, rollouts=rollouts, checkpoint=checkpoint, **settings))


def values(path: Path, tag: str = "base") -> pa.Table:
    return pq.read_table(path / f"meta/values_{tag}.parquet")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fit on one dataset with video, state and task."""
    root = tmp_path_factory.mktemp("fitted")
    with_returns(dataset(root / "demos", layout="v2.1"))
    fit(root / "run", root / "demos")
    return root


def demos_of(tmp_path: Path, **options: object) -> Path:
    """A dataset like the fitted one, of this test's own."""
    return dataset(tmp_path / "demos", **({"layout": "v2.1"} | options))


def test_every_frame_has_the_value_that_the_model_gives_it_alone(tmp_path: Path, fitted: Path) -> None:
    demos = demos_of(tmp_path)
    result = predict(fitted / "run", demos)
    table = values(demos)
    assert table["episode_index"].to_pylist() == np.repeat(np.arange(6), LENGTHS).tolist()
    assert table["frame_index"].to_pylist() == [frame for length in LENGTHS for frame in range(length)]
    opened, checkpoint = open_dataset(demos), load_value_checkpoint(fitted / "run")
    model, reader = load_value_model(checkpoint, "cpu"), FrameReader(opened, CAMERA, checkpoint.image_size)
    states = np.concatenate([opened.stream(["observation.state"], [4]).take(LENGTHS[4])["observation.state"]])
    slow = [
        expected_values(
            model,
            ValueInputs(
                images=torch.from_numpy(reader.read(4, [time_s])[:, None]),
                present=torch.ones(1, 1, dtype=torch.bool),
                state=torch.from_numpy(state[None].astype(np.float32)),
                tasks=(opened.index().task[4],),
            ),
        )[0]
        for time_s, state in zip(episode_timestamps(opened, 4), states, strict=True)
    ]
    start = sum(LENGTHS[:4])
    assert table["value"].to_numpy()[start : start + LENGTHS[4]] == pytest.approx(slow, abs=1e-5)
    assert any("Next: regrasp advantages" in line for line in result.lines)
    assert not (fitted / "run/predict").exists()


def test_the_sidecar_says_what_made_it(tmp_path: Path, fitted: Path) -> None:
    demos = demos_of(tmp_path)
    predict(fitted / "run", demos)
    found = read_provenance(demos / "meta/values_base.parquet")
    checkpoint = load_value_checkpoint(fitted / "run")
    assert found is not None
    assert found.inputs == {"checkpoint": checkpoint.sha256}
    assert ScaleSet.from_json(found.scale) == checkpoint.scale
    assert found.fingerprint == open_dataset(demos).index().fingerprint
    value = values(demos)["value"].to_numpy().astype(np.float64)
    assert found.statistics["value"]["mean"] == pytest.approx(value.mean())
    assert found.statistics["value"]["std"] == pytest.approx(value.std())
    assert (found.statistics["value"]["min"], found.statistics["value"]["max"]) == (value.min(), value.max())


def test_several_processes_give_what_one_gives(tmp_path: Path, fitted: Path) -> None:
    demos = demos_of(tmp_path)
    predict(fitted / "run", demos, tag="one")
    predict(fitted / "run", demos, tag="two", workers=2)
    assert values(demos, "one").equals(values(demos, "two"))


def test_both_layouts_get_the_same_values(tmp_path: Path, fitted: Path) -> None:
    tables = []
    for layout in ("v2.1", "v3.0"):
        path = dataset(tmp_path / layout, layout=layout, camera_kind="image")
        predict(fitted / "run", path)
        tables.append(values(path))
    assert tables[0].equals(tables[1])


def test_each_frame_is_decoded_once(tmp_path: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = value_predictor.iter_episode_frames

    def counted(*arguments: object, **options: object) -> object:
        for frame in original(*arguments, **options):
            calls.append(arguments[2])
            yield frame

    monkeypatch.setattr(value_predictor, "iter_episode_frames", counted)
    predict(fitted / "run", demos_of(tmp_path))
    assert calls == np.repeat(np.arange(6), LENGTHS).tolist()


def test_episodes_without_an_outcome_have_values_too(tmp_path: Path, fitted: Path) -> None:
    episodes = [*ROLLOUTS[:5], EpisodeSpec(24, success=None)]
    rollouts = dataset(tmp_path / "rollouts", episodes=episodes, success_column="is_success")
    predict(fitted / "run", rollouts=(rollouts,))
    assert values(rollouts).num_rows == sum(LENGTHS)


def test_a_stopped_run_goes_on_and_leaves_nothing_behind(
    tmp_path: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demos = demos_of(tmp_path)
    predict(fitted / "run", demos, tag="whole")
    original, done = ValuePredictor.predict, []

    def stopping(self: ValuePredictor, job: value_predictor.EpisodeJob) -> np.ndarray:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(job.episode_index)
        return original(self, job)

    monkeypatch.setattr(ValuePredictor, "predict", stopping)
    work = tmp_path / "work"
    with pytest.raises(KeyboardInterrupt):
        predict(fitted / "run", demos, work_dir=work)
    assert not (demos / "meta/values_base.parquet").exists()
    assert done == [0, 1, 2]
    monkeypatch.setattr(
        ValuePredictor, "predict", lambda self, job: (done.append(job.episode_index), original(self, job))[1]
    )
    predict(fitted / "run", demos, work_dir=work)
    assert done == [0, 1, 2, 3, 4, 5]
    assert values(demos).equals(values(demos, "whole"))
    assert not list(work.iterdir())


def test_a_killed_run_goes_on(tmp_path: Path, fitted: Path) -> None:
    demos, work = demos_of(tmp_path), tmp_path / "work"
    code = (
        "import sys, time; from pathlib import Path; from regrasp.learn.value_predictor import ValuePredictor as P\n"
        "from regrasp.recap.value_predict import *\n"
        "slow = P.predict; P.predict = lambda self, job: (time.sleep(0.4), slow(self, job))[1]\n"
        "a, b, c = map(Path, sys.argv[1:])\n"
        "settings = dict(tag='base', workers=1, device='cpu', batch_size=7)\n"
        "run(ValuePredictConfig(demos=(a,), checkpoint=b, work_dir=c, **settings))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(demos), str(fitted / "run"), str(work)])
    for _ in range(1200):
        if len(list(work.rglob("*.f32"))) >= 2:
            break
        assert child.poll() is None, "the run ended before it was killed"
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not list(demos.rglob("*values*"))
    predict(fitted / "run", demos, work_dir=work)
    predict(fitted / "run", demos, tag="whole")
    assert values(demos).equals(values(demos, "whole"))
    assert not list(work.iterdir())


def test_datasets_are_published_together_or_not_at_all(tmp_path: Path, fitted: Path) -> None:
    first, second = dataset(tmp_path / "a", layout="v2.1"), dataset(tmp_path / "b", layout="v2.1")
    path = open_dataset(second).video_span(CAMERA, 5).path
    kept = path.read_bytes()
    path.write_bytes(kept[: len(kept) // 3])
    with pytest.raises(VideoError, match="episode 5 in 'b'"):
        predict(fitted / "run", first, second, work_dir=tmp_path / "work")
    assert not list(tmp_path.rglob("values_*"))
    path.write_bytes(kept)
    predict(fitted / "run", first, second, work_dir=tmp_path / "work")
    assert values(first).num_rows == values(second).num_rows == sum(LENGTHS)


def test_an_existing_tag_is_kept_unless_it_is_to_be_replaced(tmp_path: Path, fitted: Path) -> None:
    demos = demos_of(tmp_path)
    with_returns(demos)
    predict(fitted / "run", demos)
    again = predict(fitted / "run", demos)
    assert again.written == []
    assert "Already there" in again.lines[0]
    fit(tmp_path / "other", demos, steps=2, checkpoint_every=2)
    with pytest.raises(SidecarError, match="exists already"):
        predict(tmp_path / "other", demos)
    predict(tmp_path / "other", demos, overwrite=True)


def test_a_model_that_lost_to_the_baselines_says_so_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    demos = dataset(tmp_path / "demos", camera_kind="none", cameras={}, state=nothing)
    with_returns(demos)
    fit(tmp_path / "run", demos)
    result = predict(tmp_path / "run", demos, returns="base")
    warning = load_value_checkpoint(tmp_path / "run").warning
    assert warning
    assert any("did not beat" in line for line in result.lines)
    assert warning in capsys.readouterr().err
    found = read_provenance(demos / "meta/values_base.parquet")
    assert found is not None
    assert found.notes["warning"] == warning


def copy_of(run_folder: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((run_folder / name).read_bytes())
    return target


def test_a_checkpoint_that_is_not_whole_is_never_an_untrained_model(tmp_path: Path, fitted: Path) -> None:
    demos = demos_of(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="holds no value checkpoint"):
        predict(empty, demos)
    (empty / "training").mkdir()
    with pytest.raises(CheckpointError, match="is not finished"):
        predict(empty, demos)
    bare = copy_of(fitted / "run", tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        predict(bare, demos)
    mixed = copy_of(fitted / "run", tmp_path / "mixed")
    weights = bytearray((mixed / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (mixed / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match="not those that"):
        predict(mixed, demos)
    other = copy_of(fitted / "run", tmp_path / "other")
    (other / "config.json").write_text('{"type": "act"}')
    with pytest.raises(CheckpointError, match="not a value checkpoint's"):
        predict(other, demos)
    (other / "config.json").write_text('{"type": ')
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        predict(other, demos)
    assert not list(demos.rglob("values_*"))


def test_a_checkpoint_for_other_images_is_refused(tmp_path: Path, fitted: Path) -> None:
    older = copy_of(fitted / "run", tmp_path / "older")
    content = json.loads((older / "config.json").read_text())
    (older / "config.json").write_text(json.dumps(content | {"resize": "pillow-1"}))
    with pytest.raises(CheckpointError, match="resized by 'pillow-1'"):
        predict(older, demos_of(tmp_path))


def test_a_task_without_a_scale_is_named(tmp_path: Path, fitted: Path) -> None:
    demos = demos_of(tmp_path, episodes=[EpisodeSpec(9, task="fold the towel")])
    with pytest.raises(CheckpointError, match=r"no return scale for the task.*'fold the towel'.*put the cube"):
        predict(fitted / "run", demos)


def test_returns_of_another_scale_are_refused(tmp_path: Path, fitted: Path) -> None:
    demos, rollouts = demos_of(tmp_path), dataset(tmp_path / "rollouts", episodes=ROLLOUTS)
    with_returns(demos, rollouts=(rollouts,), tag="wide")
    with_returns(demos)
    with pytest.raises(CheckpointError, match=r"another scale.*\[-33, 0\] against \[-63, 0\]"):
        predict(fitted / "run", demos, returns="wide")
    predict(fitted / "run", demos, returns="base")


def test_states_and_cameras_have_to_be_those_of_the_model(tmp_path: Path, fitted: Path) -> None:
    with pytest.raises(CheckpointError, match=r"sees a state of 4 numbers.*has 7"):
        predict(fitted / "run", dataset(tmp_path / "a", state_dim=7))
    with pytest.raises(CheckpointError, match=r"has no observation.state"):
        predict(fitted / "run", dataset(tmp_path / "b", state_key="joints"))
    with pytest.raises(CheckpointError, match=r"has none of them; it has: observation\.images\.front"):
        predict(fitted / "run", dataset(tmp_path / "c", cameras={"observation.images.front": (48, 64)}))


def test_a_state_that_is_no_number_is_located(tmp_path: Path, fitted: Path) -> None:
    demos = demos_of(tmp_path)

    def spoil(table: pa.Table) -> pa.Table:
        rows = table["observation.state"].to_pylist()
        rows[5][0] = float("inf")
        column = table.schema.get_field_index("observation.state")
        return table.set_column(column, table.schema.field(column), pa.array(rows, table.schema.field(column).type))

    edit_parquet(demos / "data/chunk-000/episode_000001.parquet", spoil)
    with pytest.raises(NonFiniteData, match=r"demos.*'observation.state', episode 1, frame 5"):
        predict(fitted / "run", demos, work_dir=tmp_path / "work")
    assert not list(demos.rglob("values_*"))


def test_a_model_that_gives_no_number_is_refused(tmp_path: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_predictor, "expected_values", lambda model, inputs: np.full(len(inputs.tasks), np.nan))
    with pytest.raises(CheckpointError, match="gives nan for frame 0 of episode 0"):
        predict(fitted / "run", demos_of(tmp_path), work_dir=tmp_path / "work")


def test_a_second_process_with_the_same_tag_is_told(tmp_path: Path, fitted: Path) -> None:
    from regrasp.recap.fit_folder import exclusive
    from regrasp.recap.value_predict import _work_folder

    demos = demos_of(tmp_path)
    config = ValuePredictConfig(demos=(demos,), checkpoint=fitted / "run", tag="base", batch_size=7)
    work = _work_folder(config, load_value_checkpoint(fitted / "run"), [open_dataset(demos)])
    work.mkdir(parents=True)
    with exclusive(work, "busy"), pytest.raises(ConfigError, match="Another process is predicting"):
        predict(fitted / "run", demos)


def test_a_command_line_goes_from_returns_to_labels(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from regrasp.cli.main import main

    demos = str(dataset(tmp_path / "demos", camera_kind="none", cameras={}))
    output = str(tmp_path / "run")
    small = ["--steps", "4", "--checkpoint-every", "2", "--batch-size", "8", "--holdout", "0.3"]
    assert main(["returns", "--demos", demos, "--tag", "base"]) == 0
    assert main(["value", "fit", "--demos", demos, "--returns", "base", "--output", output, *small]) == 0
    assert main(["value", "predict", "--demos", demos, "--checkpoint", output, "--tag", "base", "--workers", "1"]) == 0
    assert main(["advantages", "--demos", demos, "--returns", "base", "--values", "base", "--tag", "l"]) == 0
    assert main(["value", "fit", "--demos", demos, "--returns", "base", "--output", output]) == 2
    assert "holds a value fit already" in capsys.readouterr().err
