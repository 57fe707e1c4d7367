"""`regrasp demos`, `rollout` and `evaluate`, end to end with a small policy."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from regrasp.cli.main import main
from regrasp.collect.collection import episode_seeds
from regrasp.collect.environments import describe_environment
from regrasp.collect.evaluate import Evaluation, compare, compare_all, results_table
from regrasp.core.errors import ConfigError
from tests.policy_checkpoints import write_flow_policy

pytest.importorskip("metaworld", reason="needs the extra metaworld")

SHORT = ("--max-episode-steps", "30", "--copies", "4")
REACH = ("--env", "metaworld:reach-v3", *SHORT, "--workers", "0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A flow policy with random weights, in LeRobot's layout."""
    return write_flow_policy(tmp_path_factory.mktemp("policy") / "flow", {"observation.state": (39,)}, 4)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def rollout(checkpoint: Path, path: Path, workers: int = 0) -> int:
    run = ["rollout", str(checkpoint), "--env", "metaworld:reach-v3", *SHORT, "--workers", str(workers)]
    return main([*run, "--record", str(path), "--episodes", "10"])


def test_a_rollout_is_recorded_with_outcomes_and_the_policy_s_fingerprint(checkpoint: Path, tmp_path: Path):
    assert rollout(checkpoint, tmp_path / "a") == 0
    rows = pq.read_table(tmp_path / "a/meta/attempts.parquet").to_pylist()
    assert [row["seed"] for row in rows] == episode_seeds(0, 10, "rollout")
    assert {row["policy"] for row in rows} == {str(checkpoint)}
    assert len({row["policy_fingerprint"] for row in rows}) == 1
    table = pq.read_table(tmp_path / "a/data/chunk-000/file-000.parquet")
    assert np.isfinite(np.stack(table["action"].to_numpy())).all()


def test_the_same_seeds_give_the_same_files_whatever_the_number_of_workers(checkpoint: Path, tmp_path: Path):
    assert rollout(checkpoint, tmp_path / "a") == 0
    assert rollout(checkpoint, tmp_path / "b", workers=2) == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")


KILLED = """
import os, signal, sys
from regrasp.cli.main import main
from regrasp.collect.recording import Recording
save, left = Recording.save, [6]
def save_and_die(self, number, episode):
    save(self, number, episode)
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
Recording.save = save_and_die
main(sys.argv[1:])
"""


def test_a_killed_rollout_keeps_its_episodes_and_ends_in_the_same_files(checkpoint: Path, tmp_path: Path):
    words = ["rollout", str(checkpoint), *REACH, "--record", str(tmp_path / "a"), "--episodes", "10"]
    assert subprocess.run([sys.executable, "-c", KILLED, *words], check=False).returncode == -9
    assert len(list((tmp_path / "a.recording").glob("episode_*.npz"))) == 6
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "a.recording").glob("episode_*.npz")}
    assert min(before.values()) > 0
    assert main(words) == 0
    rollout(checkpoint, tmp_path / "undisturbed")
    assert files(tmp_path / "a") == files(tmp_path / "undisturbed")


def test_demonstrations_are_successes_and_can_be_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["demos", "metaworld:reach-v3", "--record", str(tmp_path / "a"), "--episodes", "5", "--workers", "0"]
    assert main([*words, "--max-episode-steps", "80"]) == 0
    assert "5 demonstrations" in capsys.readouterr().out
    rows = pq.read_table(tmp_path / "a/meta/attempts.parquet").to_pylist()
    assert [row["outcome"] for row in rows] == ["success"] * 5
    assert main([*words, "--max-episode-steps", "80"]) == 0
    assert "holds this recording already" in capsys.readouterr().out


def test_experts_that_never_succeed_are_reported_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["demos", "metaworld:pick-place-v3", "--record", str(tmp_path / "a"), "--episodes", "2", "--workers", "0"]
    assert main([*words, "--max-episode-steps", "5"]) == 2
    error = capsys.readouterr().err
    assert "0 of 40 attempts" in error
    assert "--max-episode-steps" in error


def test_an_evaluation_gives_the_same_numbers_again_and_compares_on_equal_states(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["evaluate", str(checkpoint), "expert:clean", *REACH, "--episodes", "8"]
    assert main([*words, "--out", str(tmp_path / "a.json")]) == 0
    shown = capsys.readouterr().out
    assert "| expert:clean" in shown
    assert "only first / only second" in shown
    assert main([*words, "--out", str(tmp_path / "b.json")]) == 0
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    ours, expert = json.loads((tmp_path / "a.json").read_text())
    assert ours["seeds"] == expert["seeds"] == episode_seeds(0, 8, "evaluate")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env", "pusht"], r"differ in size: observation.state [39] against [5]"),
        (["--env", "metaworld:reach-v4"], "Did you mean 'metaworld:reach-v3'"),
        ([*REACH, "--guidance-scale", "2", "--condition", "sideways"], ""),
    ],
)
def test_what_does_not_fit_is_refused(
    checkpoint: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    try:
        code = main(["evaluate", str(checkpoint), "--episodes", "1", *words])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", str(tmp_path), *REACH]) == 2
    assert "config.json and model.safetensors are needed; found an empty folder" in capsys.readouterr().err


def test_a_policy_of_images_is_trained_and_evaluated_on_a_drawn_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    drawn = ["--max-episode-steps", "40", "--copies", "3", "--workers", "1", "--cameras", "front", "--image-size", "48"]
    data, policy = tmp_path / "data", tmp_path / "policy"
    rollouts = ["rollout", "expert:slow", "--env", "metaworld:reach-v3", "--episodes", "3", *drawn]
    assert main([*rollouts, "--record", str(data)]) == 0
    fit = ["policy", "fit", "--rollouts", str(data), "--output", str(policy), "--no-state", "--steps", "4"]
    assert main([*fit, "--batch-size", "4", "--checkpoint-every", "4", "--workers", "1", "--device", "cpu"]) == 0
    assert "inputs: observation.images.front;" in capsys.readouterr().out
    words = ["evaluate", str(policy), "--env", "metaworld:reach-v3", *SHORT, "--workers", "1", "--episodes", "2"]
    assert main([*words, "--video", str(tmp_path / "video"), "--videos", "1"]) == 0
    video = next((tmp_path / "video").rglob("*.mp4"))

    import av

    with av.open(str(video)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 31  # of 30 steps
    assert frames[0].shape == (320, 320, 3)
    assert frames[0].std() > 20  # a scene, not a blank
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 50  # in which the arm moved


def test_a_camera_that_the_scene_does_not_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["demos", "metaworld:reach-v3", "--record", str(tmp_path / "a"), "--workers", "1", "--copies", "1"]
    assert main([*words, "--cameras", "frnt"]) == 2
    assert "The scene has no camera 'frnt'. Did you mean 'front'?" in capsys.readouterr().err
    assert main([*words, "--image-size", "64"]) == 2
    assert "--image-size 64 is the size, at least 1, of the --cameras" in capsys.readouterr().err


def changed(checkpoint: Path, path: Path, before: str, after: str) -> Path:
    """A copy of a checkpoint with another config."""
    shutil.copytree(checkpoint, path)
    (path / "config.json").write_text((path / "config.json").read_text().replace(before, after))
    return path


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"regrasp_flow"', '"regrasp_flw"', "is of type 'regrasp_flw', which is not installed here. Did you mean"),
        ('"hidden_dim"', '"hiden_dim"', "cannot be loaded (DecodingError: The fields `hiden_dim` are not valid"),
        ("{", "", "is not JSON"),
        ('"hidden_dim": 16', '"hidden_dim": 32', "weights in"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_refused_with_the_reason(
    checkpoint: Path, tmp_path: Path, before: str, after: str, message: str, capsys: pytest.CaptureFixture[str]
):
    broken = changed(checkpoint, tmp_path / "broken", before, after)
    assert main(["evaluate", str(broken), *REACH, "--episodes", "1"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("CheckpointError: ")
    assert message in error


def test_a_policy_that_gives_nan_is_stopped_and_nothing_is_recorded(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from safetensors.torch import load_file, save_file

    broken = changed(checkpoint, tmp_path / "broken", "", "")
    weights = load_file(broken / "model.safetensors")
    weights["velocity.output.bias"][:] = float("nan")
    save_file(weights, broken / "model.safetensors")
    words = [*REACH, "--record", str(tmp_path / "a"), "--episodes", "4"]
    assert main(["rollout", str(broken), *words]) == 2
    assert "gave NaN or infinite actions for metaworld:reach-v3 in copies 0, 1, 2, 3" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert main(["rollout", str(checkpoint), *words]) == 0  # what was begun is in no one's way


def evaluation(policy: str, *outcomes: int, seeds: int = 0) -> Evaluation:
    success = np.array(outcomes, bool)
    return Evaluation(
        policy=policy,
        task="t",
        seeds=np.arange(len(outcomes)) + seeds,
        success=success,
        steps=np.where(success, 50, 100),
    )


def test_a_comparison_counts_the_episodes_that_differ():
    found = compare(evaluation("a", 1, 1, 1, 0), evaluation("b", 1, 0, 0, 1))
    assert (found.only_first, found.only_second) == (2, 1)
    # 2 of 3 that differ, two-sided: 2 · (C(3,2) + C(3,3)) / 8 = 1.
    assert found.p_value == 1.0
    assert found.difference.value == 0.25


def test_policies_on_other_states_are_not_compared():
    with pytest.raises(ConfigError, match="other seeds"):
        compare(evaluation("a", 1, 0), evaluation("b", 1, 0, seeds=9))


def test_every_policy_is_compared_with_the_first():
    pairs = compare_all([evaluation("a", 1, 0), evaluation("b", 1, 1), evaluation("c", 0, 0)])
    assert [(pair.first, pair.second) for pair in pairs] == [("b", "a"), ("c", "a")]


def test_the_table_says_it_when_nothing_succeeded():
    row = results_table([evaluation("a", 0, 0)]).splitlines()[-1]
    assert "0.000 [0.000, 0.658]" in row  # Wilson of 0 in 2: z² / (2 + z²) = 3.8415 / 5.8415
    assert "none" in row


def test_runs_of_different_purposes_share_no_initial_states():
    demo, rollouts, judged = (set(episode_seeds(0, 500, purpose)) for purpose in ("demo", "rollout", "evaluate"))
    assert not demo & rollouts
    assert not rollouts & judged
    assert episode_seeds(0, 40, "demo") == episode_seeds(0, 500, "demo")[:40]


def test_a_spec_can_be_read_without_starting_anything():
    spec = describe_environment("metaworld:door-open-v3")
    assert (spec.state_size, spec.action_size, spec.max_episode_steps) == (39, 4, 500)
    assert spec.task == "Open a door with a revolving joint"
