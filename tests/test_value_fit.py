"""Fitting a value model: what it learns from, what it is judged on, and what it leaves behind."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from regrasp.core.errors import CheckpointError, ConfigError, NonFiniteData, SidecarError, StorageError, VideoError
from regrasp.core.scale import ReturnScale
from regrasp.data.dataset import open_dataset
from regrasp.data.frames import iter_episode_frames
from regrasp.learn import image_cache
from regrasp.learn.episode_rows import EpisodeRef, FrameTable, dataset_rows, state_statistics
from regrasp.learn.image_cache import Images, plan_strides
from regrasp.learn.value_checkpoint import load_value_checkpoint, load_value_model
from regrasp.learn.value_objective import ValueObjective, shifted, two_hot_cross_entropy, unit_targets
from regrasp.recap.value_predict import ValuePredictConfig
from regrasp.recap.value_predict import run as run_predict
from regrasp.rl.categorical import two_hot
from tests.datasets import EpisodeSpec, edit_parquet
from tests.value_runs import (
    CAMERA,
    DEMOS,
    LENGTHS,
    ROLLOUTS,
    dataset,
    fit,
    fit_config,
    nothing,
    with_objects,
    with_returns,
)

REAL = Path(__file__).resolve().parents[2] / "shared" / "data"


def record(output: Path) -> dict:
    return json.loads((output / "config.json").read_text())


def reference(episode: int, first_row: int) -> EpisodeRef:
    return EpisodeRef(
        dataset=0,
        episode_index=episode,
        first_row=first_row,
        length=LENGTHS[episode],
        task="t",
        width=1.0,
        success=True,
    )


def test_a_state_that_tells_the_frames_left_beats_the_clock(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos", camera_kind="none", cameras={})
    with_returns(demos)
    result = fit(
        tmp_path / "run", demos, steps=120, checkpoint_every=40, batch_size=32, learning_rate=3e-3, ema_decay=None
    )
    found = record(tmp_path / "run")
    assert found["verdict"] == {"beats_baselines": True, "losses": [], "warning": None}
    assert found["held_out"]["mae_unit"] < 0.5 * found["baselines"]["elapsed-time"]["mae_unit"]
    assert found["held_out"]["spearman_episodes"] > 0.95
    assert any("beats both baselines" in line for line in result.lines)
    assert {path.name for path in result.written} == {
        "model.safetensors",
        "config.json",
        "value_curves.png",
        "calibration.png",
    }
    assert all(path.stat().st_size > 0 for path in result.written)


def test_what_a_simulator_knows_of_its_objects_is_seen(tmp_path: Path) -> None:
    demos = with_objects(dataset(tmp_path / "demos", camera_kind="none", cameras={}, state=nothing))
    with_returns(demos)
    quick = {"steps": 120, "checkpoint_every": 40, "batch_size": 32, "learning_rate": 3e-3, "ema_decay": None}
    result = fit(tmp_path / "run", demos, **quick)
    assert record(tmp_path / "run")["verdict"]["beats_baselines"]
    checkpoint = load_value_checkpoint(tmp_path / "run")
    assert checkpoint.vectors == ["observation.state", "observation.environment_state"]
    assert checkpoint.state_dim == 4 + 2
    assert any("state: observation.state, observation.environment_state;" in line for line in result.lines)
    run_predict(ValuePredictConfig(demos=(demos,), checkpoint=tmp_path / "run", tag="v", workers=1))
    values = pq.read_table(demos / "meta/values_v.parquet")["value"].to_numpy()
    returns = pq.read_table(demos / "meta/returns_base.parquet")["return"].to_numpy()
    assert np.corrcoef(values, returns)[0, 1] > 0.95

    plain = dataset(tmp_path / "plain", camera_kind="none", cameras={})
    with pytest.raises(CheckpointError, match=r"plain' has no observation.environment_state"):
        run_predict(ValuePredictConfig(demos=(plain,), checkpoint=tmp_path / "run", tag="v", workers=1))


def test_objects_that_only_some_datasets_have_are_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demos = with_objects(dataset(tmp_path / "demos", camera_kind="none", cameras={}))
    other = dataset(tmp_path / "other", camera_kind="none", cameras={}, episodes=ROLLOUTS)
    with_returns(demos, rollouts=(other,))
    fit(tmp_path / "run", demos, rollouts=(other,))
    assert load_value_checkpoint(tmp_path / "run").vectors == ["observation.state"]
    assert "other have no observation.environment_state" in capsys.readouterr().err


def test_a_checkpoint_from_before_vectors_were_named_sees_the_state(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos", camera_kind="none", cameras={})
    with_returns(demos)
    fit(tmp_path / "run", demos)
    config = record(tmp_path / "run")
    del config["vectors"]
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    assert load_value_checkpoint(tmp_path / "run").vectors == ["observation.state"]
    run_predict(ValuePredictConfig(demos=(demos,), checkpoint=tmp_path / "run", tag="v", workers=1))


def test_a_model_that_sees_nothing_of_use_is_reported_as_such(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos", camera_kind="none", cameras={}, state=nothing)
    with_returns(demos)
    result = fit(tmp_path / "run", demos)
    verdict = record(tmp_path / "run")["verdict"]
    assert not verdict["beats_baselines"]
    assert verdict["losses"]
    assert verdict["warning"] in result.lines
    assert load_value_checkpoint(tmp_path / "run").warning == verdict["warning"]


def test_the_checkpoint_says_what_it_is_good_for(tmp_path: Path) -> None:
    demos, rollouts = dataset(tmp_path / "demos"), dataset(tmp_path / "rollouts", episodes=ROLLOUTS)
    with_returns(demos, rollouts=(rollouts,))
    fit(tmp_path / "run", demos, rollouts=(rollouts,))
    found = record(tmp_path / "run")
    checkpoint = load_value_checkpoint(tmp_path / "run")
    assert checkpoint.cameras == [CAMERA]
    assert checkpoint.image_size == (32, 32)
    # Successes of up to 34 frames, failures of up to 30 with C = 34: the lowest return is -29 - 34.
    assert checkpoint.scale.for_task(DEMOS[0].task) == ReturnScale(-63.0, 0.0)
    assert [entry["name"] for entry in found["datasets"]] == ["demos", "rollouts"]
    for path, entry in zip((demos, rollouts), found["datasets"], strict=True):
        assert entry["fingerprint"] == open_dataset(path).index().fingerprint
        assert entry["returns"]["tag"] == "base"
        assert entry["returns"]["id"]
    held = [entry["held_out_episodes"] for entry in found["datasets"]]
    # Strata: 9 successes (6 demos, 3 rollouts) give 3, 3 failures (odd rollouts) give 1.
    assert sum(map(len, held)) == 4
    assert len([episode for episode in held[1] if episode % 2]) == 1
    assert set(found["baselines"]) == {"constant", "elapsed-time"}
    assert found["held_out"]["auroc_end"] is not None
    load_value_model(checkpoint, "cpu")


def test_both_layouts_of_a_dataset_give_the_same_weights(tmp_path: Path) -> None:
    weights = []
    for layout in ("v2.1", "v3.0"):
        demos = dataset(tmp_path / layout / "demos", layout=layout, camera_kind="image")
        with_returns(demos)
        fit(tmp_path / layout / "run", demos)
        weights.append((tmp_path / layout / "run/model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the shared recordings are not on this machine")
def test_both_layouts_of_a_real_recording_give_the_same_weights_and_values(tmp_path: Path) -> None:
    found = []
    for name in ("g1_bottle_v21", "g1_bottle_v30"):
        kept = {"sidecars": tmp_path / "sidecars"}
        with_returns(REAL / name, **kept)
        fit(tmp_path / name, REAL / name, steps=20, checkpoint_every=10, workers=2, **kept)
        config = {"demos": (REAL / name,), "checkpoint": tmp_path / name, "tag": "base", **kept}
        run_predict(ValuePredictConfig(**config, device="cpu"))
        values = pq.read_table(tmp_path / "sidecars" / name / "values_base.parquet")
        found.append((load_value_checkpoint(tmp_path / name).sha256, values))
    assert found[0][0] == found[1][0]
    assert found[0][1].equals(found[1][1])


def test_a_fit_stopped_at_any_step_and_resumed_gives_the_same_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demos = dataset(tmp_path / "demos")
    with_returns(demos)
    fit(tmp_path / "whole", demos)
    loss, calls = ValueObjective.loss, []

    def interrupted(self: ValueObjective, model: object, batch: object) -> object:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return loss(self, model, batch)

    monkeypatch.setattr(ValueObjective, "loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "stopped", demos)
    assert not (tmp_path / "stopped/config.json").exists()
    monkeypatch.setattr(image_cache, "iter_episode_frames", None)  # the decoded images are reused
    result = fit(tmp_path / "stopped", demos, resume=True)
    assert any("resumed from step 3" in line for line in result.lines)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    again = fit(tmp_path / "stopped", demos, resume=True)
    assert any("resumed from step 6" in line for line in again.lines)
    assert (tmp_path / "stopped/config.json").read_bytes() == (tmp_path / "whole/config.json").read_bytes()


def test_an_output_folder_that_is_taken_is_kept(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos", camera_kind="none", cameras={})
    with_returns(demos)
    fit(tmp_path / "run", demos)
    before = (tmp_path / "run/config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"holds a value fit already.*--resume.*--overwrite"):
        fit(tmp_path / "run", demos)
    with pytest.raises(ConfigError, match="steps was 6 and is now 9"):
        fit(tmp_path / "run", demos, steps=9, resume=True)
    assert (tmp_path / "run/config.json").read_bytes() == before
    fit(tmp_path / "run", demos, steps=3, overwrite=True)
    assert record(tmp_path / "run")["training"]["steps"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps"),
        ({"holdout": 1.5}, "--holdout"),
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"image_size": 40}, "multiples of 16"),
        ({"model": "smal"}, "no value model 'smal'"),
        ({"cameras": ("front",)}, "No dataset of the run has a camera 'front'"),
        ({"cameras": ("none",), "state": False}, "task text alone"),
        ({"resume": True, "overwrite": True}, "one of them"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(tmp_path: Path, options: dict, message: str) -> None:
    demos = dataset(tmp_path / "demos")
    with_returns(demos)
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path / "run", demos, **options)
    assert not (tmp_path / "run/config.json").exists()


def test_one_episode_is_too_few(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos", episodes=[EpisodeSpec(20)], camera_kind="none", cameras={})
    with_returns(demos)
    with pytest.raises(ConfigError, match="two episodes of one task"):
        fit(tmp_path / "run", demos)


def test_episodes_without_returns_are_left_out(tmp_path: Path) -> None:
    episodes = [*ROLLOUTS[:5], EpisodeSpec(24, success=None)]
    rollouts = dataset(tmp_path / "r", episodes=episodes, camera_kind="none", cameras={}, success_column="is_success")
    with_returns(rollouts=(rollouts,), unknown="exclude")
    result = fit(tmp_path / "run", rollouts=(rollouts,))
    counts = [int(word) for word in result.lines[0].replace(",", "").split() if word.isdigit()][:2]
    assert sum(counts) == 5


def test_states_of_different_dimension_are_named(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos", camera_kind="none", cameras={})
    rollouts = dataset(tmp_path / "rollouts", camera_kind="none", cameras={}, state_dim=7)
    with_returns(demos, rollouts=(rollouts,))
    with pytest.raises(ConfigError, match=r"demos 4 .*rollouts 7"):
        fit(tmp_path / "run", demos, rollouts=(rollouts,))
    with pytest.raises(ConfigError, match="task text alone"):
        fit(tmp_path / "run", demos, rollouts=(rollouts,), state=False, cameras=())
    assert not (tmp_path / "run").exists()


def test_a_state_that_is_no_number_is_located(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos", layout="v2.1", camera_kind="none", cameras={})
    with_returns(demos)

    def spoil(table: pa.Table) -> pa.Table:
        rows = table["observation.state"].to_pylist()
        rows[11][2] = float("nan")
        column = table.schema.get_field_index("observation.state")
        return table.set_column(column, table.schema.field(column), pa.array(rows, table.schema.field(column).type))

    edit_parquet(demos / "data/chunk-000/episode_000002.parquet", spoil)
    with pytest.raises(NonFiniteData, match=r"demos.*'observation.state', episode 2, frame 11"):
        fit(tmp_path / "run", demos)


def test_a_missing_video_is_named_and_the_other_inputs_go_on(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos", layout="v2.1")
    with_returns(demos)
    path = open_dataset(demos).video_span(CAMERA, 3).path
    path.unlink()
    with pytest.raises(VideoError, match=r"episode 3.*--cameras none"):
        fit(tmp_path / "run", demos)
    fit(tmp_path / "run", demos, cameras=("none",), overwrite=True)
    assert load_value_checkpoint(tmp_path / "run").cameras == []


def test_a_camera_that_one_dataset_lacks_is_said_and_masked(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    demos = dataset(tmp_path / "demos")
    rollouts = dataset(tmp_path / "rollouts", cameras={"observation.images.wrist": (48, 64)}, episodes=DEMOS)
    with_returns(demos, rollouts=(rollouts,))
    fit(tmp_path / "run", demos, rollouts=(rollouts,))
    assert load_value_checkpoint(tmp_path / "run").cameras == [CAMERA, "observation.images.wrist"]
    said = capsys.readouterr().err
    assert "demos has no camera 'observation.images.wrist'" in said
    assert "rollouts has no camera 'observation.images.top'" in said


def test_two_fits_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    from regrasp.recap.fit_folder import exclusive

    demos = dataset(tmp_path / "demos", camera_kind="none", cameras={})
    with_returns(demos)
    (tmp_path / "run/training").mkdir(parents=True)
    with exclusive(tmp_path / "run/training", "busy"), pytest.raises(ConfigError, match="Another process is fitting"):
        fit(tmp_path / "run", demos, resume=True)


def test_a_return_outside_its_scale_is_never_clamped() -> None:
    scale = ReturnScale(-100.0, 0.0)
    assert unit_targets(np.float32([-100, -50, 0]), scale, "t", "x").tolist() == [-1.0, -0.5, 0.0]
    assert unit_targets(np.float32([-100.00001]), scale, "t", "x").tolist() == [-1.0]
    for outside in (-100.01, 0.001, float("nan")):
        with pytest.raises(SidecarError, match=r"\[-100, 0\].*'t'|'t' is \[-100, 0\]"):
            unit_targets(np.float32([-50, outside]), scale, "t", "episode 3 of 'd'")


def test_the_loss_is_float32_whatever_the_logits_are() -> None:
    # Uniform logits: ln 201.
    lower, weight = two_hot(np.array([-0.4975, -0.123, -1 / 300]))
    targets = torch.from_numpy(lower), torch.from_numpy(weight.astype(np.float32))
    for kind in (torch.float32, torch.bfloat16):
        loss = two_hot_cross_entropy(torch.zeros(3, 201, dtype=kind), *targets)
        assert loss.dtype == torch.float32
        assert float(loss) == pytest.approx(5.3033, abs=1e-4)


def test_the_loss_is_least_at_the_two_hot_distribution() -> None:
    lower, weight = two_hot(np.array([-0.123]))
    logits = torch.full((1, 201), -40.0)
    logits[0, 175], logits[0, 176] = float(np.log(0.6)), float(np.log(0.4))
    loss = two_hot_cross_entropy(logits, torch.from_numpy(lower), torch.from_numpy(weight.astype(np.float32)))
    assert float(loss) == pytest.approx(-(0.6 * np.log(0.6) + 0.4 * np.log(0.4)), abs=1e-5)


def test_shifting_moves_pixels_and_repeats_edges() -> None:
    torch.manual_seed(1)
    images = torch.arange(5 * 6, dtype=torch.uint8).view(1, 1, 5, 6, 1).expand(40, 2, 5, 6, 3).contiguous()
    moved = shifted(images, 2)
    assert torch.equal(shifted(images, 0), images)

    def at(down: int, right: int) -> np.ndarray:
        rows, columns = np.clip(np.arange(5) + down, 0, 4), np.clip(np.arange(6) + right, 0, 5)
        return np.arange(30).reshape(5, 6)[rows][:, columns]

    seen = set()
    for picture in moved.flatten(0, 1)[..., 0].numpy():
        near = range(-2, 3)
        moves = [(down, right) for down in near for right in near if np.array_equal(picture, at(down, right))]
        assert len(moves) == 1
        seen.update(moves)
    assert len(seen) > 10


def test_strides_fit_frames_into_the_cache() -> None:
    # 10 held-out and 100 training frames of 10 bytes: 1100 bytes hold all of them.
    assert plan_strides([60, 40], [10], 10, 1100.0) == image_cache.Strides(training=1, held_out=1)
    # 600 bytes: held-out 100 <= 150; 500 left hold every second training frame.
    assert plan_strides([60, 40], [10], 10, 600.0) == image_cache.Strides(training=2, held_out=1)
    # 100 bytes: a quarter holds 2 held-out frames of 10, every fifth; 80 left hold 8 frames, and every eighth is 13.
    assert plan_strides([60, 40], [10], 10, 100.0) == image_cache.Strides(training=None, held_out=5)
    assert plan_strides([60, 40], [50_000], 0, 0.0) == image_cache.Strides(training=1, held_out=3)


def test_a_frame_table_finds_each_frame() -> None:
    episodes = [
        EpisodeRef(dataset=d, episode_index=e, first_row=0, length=n, task="t", width=1.0, success=True)
        for d, e, n in ((0, 0, 7), (0, 1, 3), (1, 0, 4))
    ]
    table = FrameTable(episodes, stride=3)
    place, row = table.locate(np.arange(len(table)))
    assert list(zip(place.tolist(), row.tolist(), strict=True)) == [(0, 0), (0, 3), (0, 6), (1, 0), (2, 0), (2, 3)]
    assert table.dataset_sizes(2) == [4, 2]


@pytest.mark.parametrize("kind", ["video", "image"])
def test_training_sees_the_pixels_that_inference_sees(tmp_path: Path, kind: str) -> None:
    opened = open_dataset(dataset(tmp_path / "demos", camera_kind=kind))
    rows = [dataset_rows(opened, tmp_path / "rows", opened.vector_columns(["observation.state"]))]
    offset = opened.index().offset
    episodes = [reference(e, int(offset[e])) for e in range(len(LENGTHS))]
    cached = Images([opened], rows, [CAMERA], (32, 48), tmp_path / "images")
    cached.fill(episodes[:3], 2, 1, lambda work, total: work)
    live = Images([opened], rows, [CAMERA], (32, 48), tmp_path / "none")
    inference = np.stack(list(iter_episode_frames(opened, CAMERA, 1, (32, 48))))
    wanted = np.array([12, 0, 28, 4])
    assert np.array_equal(cached.read(episodes[1], wanted)[:, 0], inference[wanted])
    assert np.array_equal(live.read(episodes[1], wanted)[:, 0], inference[wanted])
    assert not (tmp_path / "none").exists()


def test_a_cache_of_another_size_is_not_used_and_goes(tmp_path: Path) -> None:
    opened = open_dataset(dataset(tmp_path / "demos"))
    rows = [dataset_rows(opened, tmp_path / "rows", [])]
    episode = reference(0, 0)
    for size in ((32, 32), (48, 48)):
        images = Images([opened], rows, [CAMERA], size, tmp_path / "images")
        images.fill([episode], 1, 1, lambda work, total: work)
        images.forget_others()
        assert images.read(episode, np.array([3])).shape == (1, 1, *size, 3)
        assert len(list((tmp_path / "images").iterdir())) == 1


def test_reading_from_the_videos_learns_what_the_cache_would(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos")
    with_returns(demos)
    weights = []
    for gib in (2.0, 0.0):
        fit(tmp_path / f"run{gib}", demos, steps=2, checkpoint_every=2, image_cache_gib=gib, workers=1)
        weights.append(load_value_checkpoint(tmp_path / f"run{gib}").sha256)
    # Without a cache the held-out frames are fewer, but the training frames, and so the weights, are the same.
    assert weights[0] == weights[1]


def test_state_statistics_are_those_of_the_training_frames(tmp_path: Path) -> None:
    opened = open_dataset(dataset(tmp_path / "demos", camera_kind="none", cameras={}))
    rows = [dataset_rows(opened, tmp_path / "rows", opened.vector_columns(["observation.state"]))]
    offset = opened.index().offset
    episodes = [reference(e, int(offset[e])) for e in (1, 3)]
    mean, deviation = state_statistics(rows, episodes)
    frames = np.concatenate([rows[0].states[offset[e] : offset[e + 1]] for e in (1, 3)]).astype(np.float64)
    assert mean == pytest.approx(frames.mean(axis=0))
    assert deviation == pytest.approx(frames.std(axis=0))


def test_a_config_is_frozen_and_names_its_defaults(tmp_path: Path) -> None:
    config = fit_config(tmp_path)
    with pytest.raises(AttributeError):
        config.steps = 3  # type: ignore[misc]


def test_a_folder_of_the_user_s_is_never_emptied(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos", camera_kind="none", cameras={})
    with_returns(demos)
    kept = tmp_path / "project/training/train.py"
    kept.parent.mkdir(parents=True)
    kept.write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="no fit of Regrasp's"):
            fit(tmp_path / "project", demos, overwrite=overwrite)
    assert kept.read_text() == "precious"
    with pytest.raises(ConfigError, match="is a dataset"):
        fit(demos, demos)


def test_a_fit_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos", camera_kind="none", cameras={})
    with_returns(demos)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        fit(tmp_path / "file", demos)


def test_a_refused_overwrite_leaves_the_earlier_fit_as_it_was(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos", camera_kind="none", cameras={})
    with_returns(demos)
    fit(tmp_path / "run", demos)

    def files() -> dict[str, bytes]:
        return {str(f.relative_to(tmp_path)): f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file()}

    before = files()
    with pytest.raises(ConfigError):
        fit(tmp_path / "run", demos, overwrite=True, model="big")
    assert files() == before
    fit(tmp_path / "run", demos, overwrite=True)
    assert not (tmp_path / "run/training.before").exists()


def test_a_refused_fit_leaves_nothing(tmp_path: Path) -> None:
    demos = dataset(tmp_path / "demos", camera_kind="none", cameras={})
    with_returns(demos)
    with pytest.raises(ConfigError):
        fit(tmp_path / "new/run", demos, model="big")
    assert not (tmp_path / "new").exists()
