"""Judges' settings out of a recipe."""

from pathlib import Path

import pytest
import yaml

from regrasp.recap import annotate
from tests.datasets import EpisodeSpec, write_dataset
from tests.judge_engine import ScriptedEngine
from tests.stage_runs import refused, sidecar, succeeds


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe beside its dataset, read from another folder, with a scripted judge."""
    write_dataset(tmp_path / "run/pick", cameras={"top": (48, 72)}, episodes=[EpisodeSpec(4)], success_column=None)
    made: list[ScriptedEngine] = []

    def make(config: annotate.JudgeConfig, model: str) -> ScriptedEngine:
        made.append(ScriptedEngine(model=model))
        return made[-1]

    monkeypatch.setattr(annotate, "make_engine", make)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    settings = {
        "annotate": {
            "judge": {"dataset": "pick", "model": "shared", "tag": "j", "concurrency": 2},
            "dense": {"model": "own", "frame-scores": True},
        },
        "outcomes": {"dataset": "pick", "from": "terminal:j", "success_at": 2},
        "returns": {"tag": "x", "outcomes_tag": "j", "failure_penalty": 9},
        "train_data_paths": [{"dataset_path": "pick", "type": "rollout"}],
    }
    path = tmp_path / "run/recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_the_stages_from_judging_to_returns_take_their_settings_from_a_recipe(recipe: Path):
    for command in (["annotate", "terminal"], ["annotate", "dense"], ["outcomes"], ["returns"]):
        succeeds(*command, "--config", recipe)
    pick = recipe.parent / "pick"
    assert '"model": "shared"' in (pick / "meta/terminal_j.jsonl").read_text()
    dense = (pick / "meta/dense_j.jsonl").read_text()
    assert '"model": "own"' in dense
    assert '"frame_scores": [' in dense
    assert len(sidecar(pick, "returns", "x")["return"]) == 4


def test_flags_go_before_a_recipes_settings_of_judges(recipe: Path):
    succeeds("annotate", "terminal", "--config", recipe, "--model", "flag", "--tag", "k")
    assert '"model": "flag"' in (recipe.parent / "pick/meta/terminal_k.jsonl").read_text()


@pytest.mark.parametrize(
    ("text", "command", "words"),
    [
        ("annotate: {judge: {modle: m}}", "dense", "unknown key 'modle' for `annotate dense`. Did you mean 'model'?"),
        ("annotate: {terminal: {num_samples: 3}}", "terminal", "unknown key 'num_samples'"),
        ("annotate: {terminl: {}}", "terminal", "unknown key 'annotate.terminl'. Did you mean 'terminal'?"),
        ("annotate: {judge: {concurrency: many}}", "terminal", "annotate terminal.concurrency"),
    ],
)
def test_settings_of_judges_that_are_not_known_are_refused(tmp_path: Path, text: str, command: str, words: str):
    (tmp_path / "recipe.yaml").write_text(text)
    assert words in refused("annotate", command, "--config", tmp_path / "recipe.yaml")
