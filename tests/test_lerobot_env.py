"""LeRobot's environments: what they show is what LeRobot's own evaluation shows, and errors name things."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from regrasp.cli.main import main
from regrasp.collect.environments import describe_environment, start_environment
from regrasp.core.errors import ConfigError
from regrasp.data.dataset import open_dataset
from tests.policy_checkpoints import STATE, write_flow_policy
from tests.toy_lerobot import install

ENVIRONMENT_STATE = "observation.environment_state"
TOY = "lerobot:toy_point"
PUSHT = "lerobot:pusht,obs_type=environment_state_agent_pos"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the plugin."""
    install(tmp_path / "plugin", monkeypatch)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("settings", ["obs_type=environment_state_agent_pos", "obs_type=pixels_agent_pos"])
def test_an_environment_shows_and_does_what_lerobot_s_evaluation_has(settings: str):
    pytest.importorskip("gym_pusht", reason="needs the extra pusht")
    from lerobot.envs import make_env, preprocess_observation
    from lerobot.envs.configs import PushtEnv

    name = f"lerobot:pusht,{settings},episode_length=15"
    cameras = describe_environment("lerobot:pusht").cameras
    spec = describe_environment(name, cameras=cameras)
    images = "pixels" in settings
    if images:
        from regrasp.collect.environment import CameraSpec

        spec = describe_environment(name, cameras=(CameraSpec(name="observation.image"),))
        assert (spec.cameras[0].height, spec.cameras[0].width) == (96, 96)  # not the 384 of LeRobot's config
    ours = start_environment(spec, copies=1, workers=0)
    config = PushtEnv(obs_type=settings.removeprefix("obs_type="), episode_length=15)
    stock = make_env(config, n_envs=1)["pusht"][0]
    seen, (raw, _) = ours.reset([7]), stock.reset(seed=[7])
    actions = np.random.default_rng(0).uniform(100, 400, (15, 2)).astype(np.float32)
    result = ours.step(actions[None])
    for number in range(15):
        expected = preprocess_observation(raw)
        for key, value in seen.items():
            found = value[0] if value.ndim < 3 else value[0].transpose(2, 0, 1) / np.float32(255)
            np.testing.assert_array_equal(found, expected[key][0].numpy(), err_msg=key)
        raw, reward, terminated, truncated, _ = stock.step(actions[number : number + 1])
        assert result.rewards[0, number] == np.float32(reward[0])
        assert (bool(terminated[0]), bool(truncated[0])) == (False, number == 14)
        seen = {key: value[:, number] for key, value in result.observations.items()}
    assert result.truncated[0].tolist() == [False] * 14 + [True]
    assert set(seen) == {STATE, "observation.image" if images else ENVIRONMENT_STATE}
    ours.close()
    stock.close()


def test_a_rollout_of_pusht_is_a_dataset_of_stock_lerobot_for_any_number_of_workers(tmp_path: Path):
    pytest.importorskip("gym_pusht", reason="needs the extra pusht")
    policy = write_flow_policy(tmp_path / "p", {STATE: (2,), ENVIRONMENT_STATE: (16,)}, 2, mean=256.0, scale=80.0)
    words = ["rollout", str(policy), "--env", PUSHT, "--episodes", "5", "--copies", "3", "--max-episode-steps", "8"]
    assert main([*words, "--record", str(tmp_path / "a"), "--workers", "0"]) == 0
    assert main([*words, "--record", str(tmp_path / "b"), "--workers", "2"]) == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")

    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("r/a", root=tmp_path / "a")
    assert dataset.num_episodes == 5
    assert dataset.features[ENVIRONMENT_STATE]["shape"] == (16,)
    assert dataset[3][STATE].shape == (2,)
    assert dataset[3]["task"] == "PushT-v0"
    assert open_dataset(tmp_path / "a").index().total == 40
    assert main(["inspect", str(tmp_path / "a")]) == 0


def stock(command: str, folder: Path, **flags: object) -> None:
    """Run one of LeRobot's own commands."""
    words = [f"--{name.replace('__', '.')}={value}" for name, value in flags.items()]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command_line = [sys.executable, "-m", f"lerobot.scripts.lerobot_{command}", *words]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, env=quiet, cwd=folder, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_stock_lerobot_trains_on_a_recording_and_evaluates_what_regrasp_trained_on_it(tmp_path: Path):
    pytest.importorskip("gym_pusht", reason="needs the extra pusht")
    first = write_flow_policy(tmp_path / "p", {STATE: (2,), ENVIRONMENT_STATE: (16,)}, 2, mean=256.0, scale=80.0)
    data, policy = tmp_path / "data", tmp_path / "policy"
    rollout = ["rollout", str(first), "--env", PUSHT, "--episodes", "5", "--copies", "5", "--max-episode-steps", "12"]
    assert main([*rollout, "--workers", "0", "--record", str(data)]) == 0
    act = {"type": "act", "device": "cpu", "push_to_hub": "false", "dim_model": 32, "dim_feedforward": 32, "n_heads": 2}
    stock(
        "train",
        tmp_path,
        **{f"policy__{name}": value for name, value in act.items()},
        dataset__repo_id="regrasp/data",
        dataset__root=data,
        steps=1,
        batch_size=4,
        num_workers=0,
        output_dir=tmp_path / "act",
    )
    last = tmp_path / "act" / "checkpoints" / "last" / "pretrained_model"
    assert main(["evaluate", str(last), "--env", PUSHT, "--episodes", "2", "--copies", "2", "--workers", "0"]) == 0

    fit = ["policy", "fit", "--rollouts", str(data), "--output", str(policy), "--steps", "4", "--batch-size", "8"]
    assert main([*fit, "--checkpoint-every", "4", "--device", "cpu"]) == 0
    stock(
        "eval",
        tmp_path,
        discover_packages_path="regrasp.models.flow_policy",
        policy__path=policy,
        policy__noise_scale=0.5,
        env__type="pusht",
        env__obs_type="environment_state_agent_pos",
        env__episode_length=10,
        eval__n_episodes=2,
        eval__use_async_envs="false",
        output_dir=tmp_path / "eval",
    )
    assert json.loads((tmp_path / "eval" / "eval_info.json").read_text())["overall"]["n_episodes"] == 2


def test_a_plugin_s_environment_is_found_and_its_cameras_are_recorded_by_name(tmp_path: Path, toy: None):
    spec = describe_environment(TOY)
    assert (spec.task, spec.state_size, spec.vectors) == ("reach one", 2, ((ENVIRONMENT_STATE, 3),))
    assert (spec.max_episode_steps, spec.fps, spec.robot_type) == (12, 10.0, "toy_point")
    policy = write_flow_policy(tmp_path / "p", {STATE: (2,), "observation.images.wrist": (3, 64, 64)}, 2)
    run = ["rollout", str(policy), "--env", f"{TOY},note=a,b", "--episodes", "2", "--copies", "2", "--workers", "0"]
    assert main([*run, "--cameras", "top", "--record", str(tmp_path / "a")]) == 0
    cameras = open_dataset(tmp_path / "a").cameras
    assert {name: (one.height, one.width) for name, one in cameras.items()} == {
        "observation.images.wrist": (64, 64),
        "observation.images.top": (64, 96),
    }


def test_an_episode_that_the_environment_gives_up_is_a_failure_and_ends(toy: None):
    environment = start_environment(describe_environment(TOY), copies=2, workers=0)
    environment.reset([1, 2])
    actions = np.stack([np.full((12, 2), 1.0), np.full((12, 2), -1.0)]).astype(np.float32)
    result = environment.step(actions)
    assert result.success[0].any()
    assert not result.success[1].any()
    assert result.truncated[1, result.count[1] - 1]
    assert (result.count < 12).all()


def test_what_comes_after_the_last_action_is_the_end_of_that_episode_and_not_the_next_one():
    pytest.importorskip("gym_pusht", reason="needs the extra pusht")
    long = start_environment(describe_environment(PUSHT, max_episode_steps=6), copies=1, workers=0)
    short = start_environment(describe_environment(PUSHT, max_episode_steps=5), copies=1, workers=0)
    actions = np.full((1, 5, 2), 300.0, np.float32)
    for environment in (long, short):
        environment.reset([3])
    a, b = long.step(actions), short.step(actions)
    np.testing.assert_array_equal(a.observations[STATE], b.observations[STATE])
    assert b.truncated[0, 4]
    assert not a.truncated.any()


def test_initial_states_that_are_counted_follow_from_the_seed(toy: None):
    environment = start_environment(describe_environment(TOY), copies=2, workers=0)
    assert environment.reset([5, 9])[ENVIRONMENT_STATE][:, 2].tolist() == [5.0, 9.0]
    assert environment.reset([9, None])[ENVIRONMENT_STATE][0, 2] == 9.0


def test_an_environment_that_does_not_follow_its_seed_is_reported(toy: None, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "regrasp"):
        describe_environment(f"{TOY},forgetful=true")
    assert "does not start the same episode from the same seed" in caplog.text
    caplog.clear()
    describe_environment(TOY)
    assert not caplog.text


def test_an_environment_without_outcomes_is_refused_and_never_counted_as_a_failure(toy: None):
    environment = start_environment(describe_environment(f"{TOY},silent=true"), copies=1, workers=0)
    environment.reset([1])
    with pytest.raises(ConfigError, match="no 'is_success' in its info, so its outcome is not known"):
        environment.step(np.ones((1, 12, 2), np.float32))


def test_a_worker_that_dies_is_named_and_its_episodes_are_run_again(
    tmp_path: Path, toy: None, caplog: pytest.LogCaptureFixture
):
    policy = write_flow_policy(tmp_path / "p", {STATE: (2,)}, 2)
    run = ["rollout", str(policy), "--episodes", "4", "--copies", "4", "--workers", "2"]
    mark = tmp_path / "died"
    assert main([*run, "--env", f"{TOY},dies={mark}", "--record", str(tmp_path / "a")]) == 0
    assert mark.exists()
    assert "these episodes are run again" in caplog.text
    assert "killed by signal 9), which ran the episodes of seeds" in caplog.text
    assert main([*run, "--env", TOY, "--record", str(tmp_path / "b")]) == 0
    data = "data/chunk-000/file-000.parquet"
    assert pq.read_table(tmp_path / "a" / data) == pq.read_table(tmp_path / "b" / data)


def test_a_policy_learns_from_what_the_simulator_knew_and_runs_where_it_was_recorded(
    tmp_path: Path, toy: None, capsys: pytest.CaptureFixture[str]
):
    first = write_flow_policy(tmp_path / "first", {STATE: (2,)}, 2)
    record = ["rollout", str(first), "--env", TOY, "--episodes", "6", "--copies", "6", "--workers", "0"]
    assert main([*record, "--record", str(tmp_path / "data")]) == 0
    fit = ["policy", "fit", "--rollouts", str(tmp_path / "data"), "--output", str(tmp_path / "second"), "--steps", "4"]
    assert main([*fit, "--batch-size", "8", "--checkpoint-every", "4", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert f"inputs: {STATE}, {ENVIRONMENT_STATE};" in shown
    assert f"Next: regrasp evaluate {tmp_path / 'second'} --env {TOY}" in shown
    stored = json.loads((tmp_path / "second" / "config.json").read_text())["input_features"]
    assert stored[ENVIRONMENT_STATE] == {"type": "ENV", "shape": [3]}
    assert main(["evaluate", str(tmp_path / "second"), "--env", TOY, "--episodes", "2", "--workers", "0"]) == 0


def test_an_evaluation_writes_videos_of_what_the_environment_draws(tmp_path: Path, toy: None):
    import av

    policy = write_flow_policy(tmp_path / "p", {STATE: (2,)}, 2)
    words = ["evaluate", str(policy), "--env", TOY, "--episodes", "3", "--copies", "3", "--workers", "0"]
    assert main([*words, "--video", str(tmp_path / "v"), "--videos", "1", "--out", str(tmp_path / "e.json")]) == 0
    result = json.loads((tmp_path / "e.json").read_text())[0]
    video = next((tmp_path / "v").rglob("*_01.mp4"))
    with av.open(str(video)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    first = result["outcomes"].index(video.name.startswith("success"))
    assert len(frames) == result["steps"][first] + 1
    assert frames[0].shape == (32, 48, 3)  # of a picture 33 high
    assert [round(frame.mean() / 10) for frame in frames[:4]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lerobot:push", "has no environment of type 'push'. Did you mean 'pusht'"),
        ("lerobot", "has no environment of type ''. Known are: aloha"),
        ("lerobt:pusht", "Did you mean 'lerobot'"),
        ("lerobot:pusht,obs_typ=pixels", "has no setting 'obs_typ'. Did you mean 'obs_type'"),
        ("lerobot:pusht,episode_length=many", "Couldn't parse 'many' into an int"),
        ("lerobot:pusht,task=PushT-v1", "Did you mean 'PushT-v0'"),
        ("lerobot:pusht,obs_type=state", "shows a bare array"),
        (f"{TOY},tasks=3", "names 3 tasks (toy 0, toy 1, toy 2), and rollouts are of one"),
        ("lerobot:robocasa", "No module named 'robocasa'. Mend: install what LeRobot's documentation"),
    ],
)
def test_names_that_cannot_be_used_are_refused(name: str, message: str, toy: None):
    with pytest.raises(ConfigError) as refused:
        describe_environment(name)
    assert message in str(refused.value)


def test_cameras_and_lengths_that_it_does_not_have_are_refused(toy: None):
    from regrasp.collect.environment import CameraSpec

    with pytest.raises(ConfigError, match=r"shows no camera 'tpo'. Did you mean 'top'\? It shows: top, wrist"):
        describe_environment(TOY, cameras=(CameraSpec(name="tpo"),))
    with pytest.raises(ConfigError, match=r"--max-episode-steps is 0"):
        describe_environment(TOY, max_episode_steps=0)
