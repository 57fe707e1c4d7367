"""The loop: every stage in order, only what changed again, and the same files after any kill."""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import regrasp.learn.loop
import regrasp.models.flow_policy  # noqa: F401 - loaded before processes fork, which then need not load it again
from regrasp.core.errors import ConfigError
from regrasp.recap.advantages import AdvantagesConfig
from regrasp.recap.improve import ImproveConfig, run
from regrasp.recap.run_folder import RunFolder
from regrasp.recap.selection import StageResult
from tests.datasets import EpisodeSpec, write_dataset

POLICY = {"steps": 8, "batch_size": 16, "checkpoint_every": 4, "hidden_dim": 16, "chunk_size": 8, "holdout": 0}
ONLINE: dict[str, Any] = {
    "environment": {"name": "metaworld:reach-v3", "max_episode_steps": 40, "copies": 4},
    "demos": {"mix": "clean", "episodes": 4, "keep": "all"},
    "rollout": {"episodes": 6},
    "value": {"fit": {"steps": 8, "batch_size": 16, "checkpoint_every": 4, "holdout": 0.4}},
    "advantages": {"lookahead": 8, "positive_fraction": 0.4},
    "policy": {"fit": POLICY},
    "baselines": ["sft", "filtered_bc"],
    "evaluation": {"episodes": 4, "noise_scales": [0.5], "conditions": ["negative"]},
}
STAGES = [
    "demos",
    "policy fit sft",
    "rollout round1",
    "returns round1",
    "value fit round1",
    "value predict round1",
    "advantages round1",
    "policy fit recap_round1",
    "policy fit filtered_bc_round1",
    "evaluate sft_t0.5",
    "evaluate recap_round1_b1_positive_t0.5",
    "evaluate recap_round1_b1_negative_t0.5",
    "evaluate filtered_bc_round1_t0.5",
]


def write_recipe(folder: Path, content: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))


def improve(folder: Path, **settings: object) -> StageResult:
    """Run ``recipe.yaml`` of a folder into its ``run``, from inside it, so that no path differs between folders."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return run(ImproveConfig(recipe=Path("recipe.yaml"), output=Path("run"), workers=0, **settings))  # type: ignore[arg-type]
    finally:
        os.chdir(before)


def final_files(folder: Path) -> dict[str, str]:
    """The digest of every file of a run but what only serves going on with it."""
    left_out = {"states", "rows", "trackers", "lock"}
    files = [p for p in (folder / "run").rglob("*") if p.is_file() and not left_out & set(p.parts)]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}


def plan(folder: Path) -> dict[str, str]:
    lines = improve(folder, dry_run=True).lines
    return {line.rpartition("  ")[0].strip(): line.rpartition("  ")[2] for line in lines}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_recipe(folder, ONLINE)
    improve(folder)
    return folder


def test_a_run_makes_every_artefact_and_a_table(undisturbed: Path):
    made = undisturbed / "run"
    summary = json.loads((made / "summary.json").read_text())
    assert [one["policy"] for one in summary["policies"]] == [
        "SFT on demonstrations",
        "RECAP, β 1",
        "RECAP, asked for negative",
        "filtered BC",
    ]
    assert [(one["first"], one["second"]) for one in summary["comparisons"]] == [
        ("RECAP, β 1", "SFT on demonstrations"),
        ("RECAP, β 1", "filtered BC"),
    ]
    assert summary["policies"][1]["trained_on"] == (
        "4 of 4 episodes of demos (demos), 6 of 6 episodes of round1 (rollouts), conditioned on round1"
    )
    assert (made / "policies.png").stat().st_size > 1000
    assert (made / "value_curves.png").is_file()
    assert "RECAP, β 1" in (made / "table.md").read_text()
    assert (made / "data" / "round1" / "meta" / "info.json").is_file()
    assert (made / "sidecars" / "round1" / "advantages_round1.parquet").is_file()


def test_a_second_run_does_nothing_and_changes_nothing(undisturbed: Path):
    before = final_files(undisturbed)
    assert plan(undisturbed) == dict.fromkeys(STAGES, "cached")
    improve(undisturbed)
    assert final_files(undisturbed) == before


def test_only_what_depends_on_a_change_is_to_do(undisturbed: Path, tmp_path: Path):
    changed = {**ONLINE, "advantages": {"lookahead": 4, "positive_fraction": 0.4}}
    write_recipe(tmp_path, changed)
    (tmp_path / "run").symlink_to(undisturbed / "run")
    todo = {name for name, state in plan(tmp_path).items() if state == "to do"}
    assert todo == {
        "advantages round1",
        "policy fit recap_round1",
        "evaluate recap_round1_b1_positive_t0.5",
        "evaluate recap_round1_b1_negative_t0.5",
    }


def test_defaults_count_as_settings_and_the_machine_does_not(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spelled = {**ONLINE, "advantages": {"lookahead": 8, "positive_fraction": 0.4, "demos_positive": True}}
    spelled["value"] = {"fit": ONLINE["value"]["fit"] | {"tracker": "none", "threads": 2}, "predict": {"workers": 1}}
    write_recipe(tmp_path, spelled)
    (tmp_path / "run").symlink_to(undisturbed / "run")
    assert plan(tmp_path) == dict.fromkeys(STAGES, "cached")

    @dataclass(frozen=True, kw_only=True)
    class OtherDefault(AdvantagesConfig):
        demos_positive: bool = False

    monkeypatch.setattr("regrasp.recap.advantages.AdvantagesConfig", OtherDefault)
    assert plan(undisturbed)["advantages round1"] == "to do"
    assert plan(undisturbed)["value predict round1"] == "cached"


def test_a_second_round_learns_from_all_the_data_and_from_fresh_weights(tmp_path: Path):
    write_recipe(tmp_path, {**ONLINE, "rounds": 2, "baselines": [], "evaluation": {"episodes": 2}})
    improve(tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(one["policy"], one["round"]) for one in summary["policies"]] == [
        ("SFT on demonstrations", 0),
        ("RECAP, round 1, β 1", 1),
        ("RECAP, round 2, β 1", 2),
    ]
    assert "round1 (rollouts), 6 of 6 episodes of round2 (rollouts)" in summary["policies"][2]["trained_on"]
    assert [one["first"] for one in summary["comparisons"]] == ["RECAP, round 2, β 1"]
    recorded = json.loads((tmp_path / "run" / "data" / "round2" / "meta" / "recording.json").read_text())
    assert recorded["policy"] == "run/policies/recap_round1"
    assert len(summary["values"]) == 2


def test_a_dry_run_of_a_new_recipe_leaves_no_trace(tmp_path: Path):
    write_recipe(tmp_path, {**ONLINE, "rounds": 2})
    stages = plan(tmp_path)
    assert set(stages.values()) == {"to do"}
    assert {"rollout round2", "value fit round2", "policy fit recap_round2"} <= set(stages)
    assert not (tmp_path / "run").exists()


def _killed_at_random(folder: Path, undisturbed: Path, kills: int, seed: int) -> None:
    """Kill runs after random times until one finishes, and compare with a run that was let alone."""
    write_recipe(folder, ONLINE)
    draw, context = random.Random(seed), multiprocessing.get_context("fork")
    killed = 0
    for kill in range(kills):
        process = context.Process(target=improve, args=(folder,))
        process.start()
        process.join(draw.uniform(0.2, 2.0) if kill else 0.3)  # a whole run takes two seconds on an idle machine
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            killed += 1
        process.join()
        time.sleep(0.05)
    assert killed
    improve(folder)
    assert final_files(folder) == final_files(undisturbed)


def test_a_run_that_was_killed_at_random_ends_with_the_same_files(tmp_path: Path, undisturbed: Path):
    _killed_at_random(tmp_path, undisturbed, kills=4, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_runs_that_were_killed_often_end_with_the_same_files(tmp_path: Path, undisturbed: Path, seed: int):
    _killed_at_random(tmp_path, undisturbed, kills=12, seed=seed)


# --- offline


def test_without_an_environment_new_datasets_start_the_next_round(tmp_path: Path):
    episodes = [EpisodeSpec(12), EpisodeSpec(9, success=False), EpisodeSpec(10), EpisodeSpec(8, success=False)]
    for name in ("demos", "one", "two"):
        write_dataset(tmp_path / name, episodes=episodes, camera_kind="none")
    paths = [{"dataset_path": "demos", "type": "demo"}, {"dataset_path": "one", "type": "rollout"}]
    offline = {key: ONLINE[key] for key in ("value", "advantages", "policy")}
    write_recipe(tmp_path, {**offline, "train_data_paths": paths})
    result = improve(tmp_path)
    assert "regrasp rollout run/policies/recap_round1" in result.lines[-1]
    assert plan(tmp_path)["policy fit recap_round1"] == "cached"
    first = (tmp_path / "run" / "policies" / "recap_round1" / "model.safetensors").read_bytes()

    paths.append({"dataset_path": "two", "type": "rollout"})
    write_recipe(tmp_path, {**offline, "train_data_paths": paths})
    assert plan(tmp_path)["policy fit recap_round2"] == "to do"
    result = improve(tmp_path)
    assert "4 of 4 episodes of two (rollouts), conditioned on round2" in result.lines[-2]
    assert (tmp_path / "run" / "policies" / "recap_round1" / "model.safetensors").read_bytes() == first
    assert not list((tmp_path / "one" / "meta").glob("returns*"))  # nothing is written into the user's data


# --- the folder


def test_what_changed_is_moved_aside_and_not_removed(tmp_path: Path):
    def work(text: str) -> StageResult:
        (tmp_path / "made.txt").write_text(text)
        return StageResult(lines=[], written=[])

    for text in ("first", "second"):
        RunFolder(tmp_path).stage("a stage", [text], [tmp_path / "made.txt"], lambda t=text: work(t))
    assert (tmp_path / "made.txt").read_text() == "second"
    assert [path.read_text() for path in (tmp_path / "replaced").rglob("made.txt")] == ["first"]


def test_a_stage_that_failed_is_begun_again(tmp_path: Path):
    calls: list[int] = []

    def work() -> StageResult:
        calls.append(1)
        if len(calls) == 1:
            raise ConfigError("refused")
        (tmp_path / "made.txt").write_text("")
        return StageResult(lines=[], written=[])

    with pytest.raises(ConfigError):
        RunFolder(tmp_path).stage("a stage", [], [tmp_path / "made.txt"], work)
    assert RunFolder(tmp_path, dry_run=True).stage("a stage", [], [tmp_path / "made.txt"], work)
    for _ in range(2):
        RunFolder(tmp_path).stage("a stage", [], [tmp_path / "made.txt"], work)
    assert len(calls) == 2


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"polcy": {}}, "unknown key 'polcy'.*Did you mean 'policy'"),
        ({"environment": {"nam": "pusht"}}, "environment"),
        ({"policy": {"fit": {"stepz": 3}}}, "unknown key 'stepz' for `policy fit`.*Did you mean 'steps'"),
        ({"policy": {"fit": {"steps": "many"}}}, "policy fit.steps"),
        ({"policy": {"fit": {"labels": "base"}}}, "sets labels of `policy fit`"),
        ({"environment": {"name": "metaworld:reach-v9"}}, "Did you mean 'metaworld:reach-v3'"),
        ({"environment": None}, "`demos:` and no `environment:`"),
        ({"baselines": ["ppo"]}, "baselines"),
        ({"advantages": {"lokahead": 3}}, "unknown key 'lokahead' for `advantages`.*Did you mean 'lookahead'"),
        ({"rollout": {"env": "pusht"}}, "sets env of `rollout`, which `regrasp improve` decides"),
    ],
)
def test_recipes_that_cannot_be_run_are_refused_before_anything_is_run(
    tmp_path: Path, changes: dict[str, object], message: str
):
    write_recipe(tmp_path, {**ONLINE, **changes})
    with pytest.raises(ConfigError, match=message):
        improve(tmp_path)
    assert not (tmp_path / "run" / "stages").exists()


def test_a_dataset_of_other_sizes_than_the_environment_is_refused_before_anything_is_run(tmp_path: Path):
    write_dataset(tmp_path / "mine", episodes=[EpisodeSpec(9)] * 3, camera_kind="none", action_dim=4)
    given = {"train_data_paths": [{"dataset_path": "mine", "type": "demo"}]}
    write_recipe(tmp_path, {**ONLINE, **given})
    with pytest.raises(
        ConfigError, match=r"mine' and metaworld:reach-v3, which differ in size: observation.state \d+ "
    ):
        improve(tmp_path)
    write_recipe(tmp_path, {**ONLINE, **given, "policy": {"fit": {**POLICY, "state": False}}})
    assert improve(tmp_path, dry_run=True).lines
    assert not (tmp_path / "run" / "stages").exists()


def test_a_recipe_of_nothing_is_refused(tmp_path: Path):
    write_recipe(tmp_path, {"seed": 1})
    with pytest.raises(ConfigError, match="neither datasets nor an environment"):
        improve(tmp_path)
