"""Recipes: datasets as RLinf users write them, settings of stages, and what is refused in them."""

from pathlib import Path

import pytest
import yaml

from regrasp.core.errors import ConfigError
from regrasp.core.outcome import Source
from regrasp.recap.recipe import read_recipe
from regrasp.recap.selection import Selection, open_datasets
from tests.datasets import EpisodeSpec, write_dataset
from tests.stage_runs import Run, keys, refused, sidecar, snapshot, succeeds, write_run, write_values


def recipe(folder: Path, content: object) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


def entries(run: Run) -> list[dict[str, object]]:
    demos = [{"dataset_path": path.name, "type": "sft", "weight": 2} for path in run.demos]
    return [*demos, *({"dataset_path": path.name, "type": "rollout"} for path in run.rollouts)]


@pytest.mark.parametrize("nested", [False, True])
def test_the_datasets_are_read_as_rlinf_users_write_them(tmp_path: Path, nested: bool) -> None:
    run = write_run(tmp_path)
    paths = {"train_data_paths": entries(run)}
    path = recipe(tmp_path, {"data": paths} if nested else paths)
    opened = open_datasets(Selection(config=path))
    assert [dataset.source for dataset in opened] == [Source.DEMO, Source.ROLLOUT, Source.ROLLOUT]
    assert [dataset.weight for dataset in opened] == [2, 1, 1]
    succeeds("returns", "--config", path, "--tag", "recipe")
    succeeds("returns", *run.flags, "--tag", "flags")
    for dataset in run.datasets:
        one, other = sidecar(dataset, "returns", "recipe"), sidecar(dataset, "returns", "flags")
        assert all(one[name].tolist() == other[name].tolist() for name in one)


def test_flags_go_before_a_recipes_settings_which_go_before_the_defaults(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    settings = {
        "returns": {"tag": "base", "gamma": 0.9, "failure_penalty": 40, "scale": "global"},
        "advantages": {"returns": "base", "values": "base", "tag": "l", "lookahead": 5, "demos-positive": False},
    }
    path = recipe(tmp_path, {"train_data_paths": entries(run), **settings})
    succeeds("returns", "--config", path)
    assert sidecar(run.rollouts[0], "returns", "base")["reward"].min() == -40
    said = succeeds("advantages", "--config", path, "--lookahead", 3)
    assert said.startswith("N 3, gamma 0.9")
    assert "Positive by rule: corrections;" in said
    assert "N 4" in succeeds("advantages", "--lookahead", 4, f"--config={path}", "--tag", "n4")


def test_flags_that_name_datasets_take_the_place_of_the_recipes(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    path = recipe(tmp_path, {"train_data_paths": entries(run), "returns": {"tag": "base"}})
    succeeds("returns", "--config", path, "--rollouts", run.rollouts[1])
    assert (run.rollouts[1] / "meta/returns_base.parquet").is_file()
    assert not (run.rollouts[0] / "meta/returns_base.parquet").exists()


def test_paths_start_from_the_recipes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "run/ends.csv").write_text("dataset,episode_index,outcome\nfirst,0,failure\n")
    settings = {"returns": {"tag": "base", "outcomes": "ends.csv", "sidecars": "beside"}}
    path = recipe(tmp_path / "run", {"train_data_paths": entries(run), **settings})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    succeeds("returns", "--config", path)
    assert (tmp_path / "run/beside/first/returns_base.parquet").is_file()
    assert not list(elsewhere.iterdir())


def test_keys_join_datasets_of_different_robots(tmp_path: Path) -> None:
    plain = write_dataset(tmp_path / "plain", episodes=[EpisodeSpec(4), EpisodeSpec(3, success=False)])
    other = write_dataset(
        tmp_path / "other",
        episodes=[EpisodeSpec(5, task="put the cube in the box"), EpisodeSpec(6, task="another", success=False)],
        state_key="robot.joints",
        cameras={"observation.images.left": (24, 24)},
    )
    add_text_column(other)
    mapped = {"robot.joints": "observation.state", "observation.images.left": "observation.images.top", "words": "task"}
    listed = [
        {"dataset_path": "plain", "type": "rollout"},
        {"dataset_path": "other", "type": "rollout", "keys": mapped, "name": "left arm"},
    ]
    path = recipe(tmp_path, {"train_data_paths": listed})
    first, second = open_datasets(Selection(config=path))
    assert second.name == "left arm"
    assert second.state_key == "robot.joints"
    assert list(second.cameras) == ["observation.images.top"]
    assert second.index().task == ["put the cube in the box", "spelled out"]
    assert first.index().task == ["put the cube in the box"] * 2
    for dataset in (plain, other):
        write_values(dataset, "base")
    succeeds("returns", "--config", path, "--tag", "base")
    assert set(sidecar(other, "returns", "base")["prompt"]) == {"put the cube in the box", "spelled out"}
    said = succeeds("advantages", "--config", path, "--returns", "base", "--values", "base", "--tag", "l")
    assert "'spelled out'" in said
    assert set(sidecar(other, "advantages", "l")["dataset_name"]) == {"left arm"}
    listed[1]["keys"] = {"robot.jonts": "observation.state"}
    said = refused("returns", "--config", recipe(tmp_path, {"train_data_paths": listed}), "--tag", "x")
    assert "Did you mean 'robot.joints'?" in said


def add_text_column(dataset: Path) -> None:
    import json

    import pyarrow.parquet as pq

    for file in dataset.glob("data/*/*.parquet"):
        table = pq.read_table(file)
        words = [
            "put the cube in the box" if number == 0 else "spelled out" for number in table["episode_index"].to_pylist()
        ]
        pq.write_table(table.append_column("words", [words]), file)
    info = json.loads((dataset / "meta/info.json").read_text())
    info["features"]["words"] = {"dtype": "string", "shape": [1], "names": None}
    (dataset / "meta/info.json").write_text(json.dumps(info))
    assert len(keys(dataset)["episode_index"]) == 11


ONE = [{"dataset_path": "first", "type": "rollout"}]
REFUSED = {
    "misspelt section": ({"train_data_path": ONE}, "'train_data_path'. Did you mean 'train_data_paths'?"),
    "misspelt entry": (
        {"train_data_paths": [{**ONE[0], "wieght": 2}]},
        "'train_data_paths.0.wieght'. Did you mean 'weight'?",
    ),
    "misspelt setting": (
        {"train_data_paths": ONE, "returns": {"gama": 1}},
        "'gama' for `returns`. Did you mean 'gamma'?",
    ),
    "misspelt step": ({"train_data_paths": ONE, "value": {"fti": {}}}, "'value.fti'. Did you mean 'fit'?"),
    "a step that is no section": ({"train_data_paths": ONE, "value": {"fit": 3}}, "'value.fit'"),
    "a section without settings": ({"train_data_paths": ONE, "returns": None}, "'returns'"),
    "unknown type": ({"train_data_paths": [{**ONE[0], "type": "rolout"}]}, "Did you mean 'rollout'?"),
    "no type": ({"train_data_paths": [{"dataset_path": "first"}]}, "'train_data_paths.0.type'"),
    "no weight at all": ({"train_data_paths": [{**ONE[0], "weight": 0}]}, "greater than 0"),
    "infinite weight": ({"train_data_paths": [{**ONE[0], "weight": float("inf")}]}, "finite"),
    "a name that leaves its folder": ({"train_data_paths": [{**ONE[0], "name": "../x"}]}, "'train_data_paths.0.name'"),
    "one dataset twice": ({"train_data_paths": [{**ONE[0], "name": "a"}, {**ONE[0], "name": "b"}]}, "one folder"),
    "no datasets": ({"train_data_paths": []}, "No dataset was named"),
    "rlinf's other settings": ({"data": {"train_data_paths": ONE, "gamma": 1}}, "--gamma"),
    "rlinf's penalty of a dataset": (
        {"train_data_paths": [{**ONE[0], "failure_reward": -300}]},
        "--failure-penalty 300",
    ),
    "a key that nothing reads": (
        {"train_data_paths": [{**ONE[0], "keys": {"action": "observation.sate"}}]},
        "'observation.state'",
    ),
    "datasets in two places": ({"train_data_paths": ONE, "data": {"train_data_paths": ONE}}, "twice"),
    "a value out of range": ({"train_data_paths": ONE, "returns": {"gamma": 2}}, "[0, 1]"),
    "a value of another type": ({"train_data_paths": ONE, "returns": {"gamma": "big"}}, "returns.gamma"),
    "a list": ([1, 2], "found list"),
    "a number as key": ({1: 2}, "'1'"),
    "nothing": ("", "NoneType"),
    "not yaml": ("train_data_paths: [", "not YAML"),
    "a tab": ("\tx: 1", "not YAML"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_recipe_gets_wrong_is_named(tmp_path: Path, case: str) -> None:
    write_dataset(tmp_path / "first")
    content, named = REFUSED[case]
    path = recipe(tmp_path, content)
    before = snapshot(tmp_path)
    said = refused("returns", "--config", path, "--tag", "base")
    assert named in said
    assert snapshot(tmp_path) == before


def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "No such file" in refused("returns", "--config", tmp_path / "none.yaml", "--tag", "base")
    assert "Is a directory" in refused("returns", "--config", tmp_path, "--tag", "base")
    (tmp_path / "latin.yaml").write_bytes("näh: 1".encode("latin-1"))
    assert "not YAML" in refused("returns", "--config", tmp_path / "latin.yaml", "--tag", "base")


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_dataset(tmp_path / "first")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = recipe(elsewhere, {"train_data_paths": [{"dataset_path": "~/first", "type": "rollout"}]})
    assert open_datasets(Selection(config=path))[0].path == tmp_path / "first"


def test_a_section_is_found_by_its_command(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"value": {"fit": {"model": "small"}}, "relabel": {"tag": "x"}})
    found = read_recipe(path)
    assert found.section("value fit") == {"model": "small"}
    assert found.section("value predict") == {}
    assert found.section("relabel") == {"tag": "x"}
    assert found.section("inspect") == {}
    with pytest.raises(ConfigError):
        read_recipe(tmp_path / "none.yaml")


def test_commands_that_run_episodes_find_the_environment_in_the_recipe(tmp_path: Path) -> None:
    content = {
        "seed": 3,
        "environment": {"name": "metaworld:reach-v3", "max_episode_steps": 60},
        "demos": {"mix": "clean"},
        "rollout": {"episodes": 4, "seed": 9},
        "evaluation": {"episodes": 5},
    }
    found = read_recipe(recipe(tmp_path, content))
    shared = {"seed": 3, "max_episode_steps": 60, "copies": 32}
    assert found.section("demos") == {**shared, "env": "metaworld:reach-v3", "mix": "clean"}
    assert found.section("rollout") == {**shared, "env": "metaworld:reach-v3", "episodes": 4, "seed": 9}
    assert found.section("evaluate") == {**shared, "env": ["metaworld:reach-v3"], "episodes": 5}


def test_a_recipe_is_enough_for_a_demonstration_and_flags_go_before_it(tmp_path: Path) -> None:
    pytest.importorskip("metaworld", reason="needs the extra metaworld")
    content = {
        "environment": {"name": "metaworld:reach-v3", "max_episode_steps": 60, "copies": 2},
        "demos": {"mix": "clean", "episodes": 2, "keep": "all"},
    }
    words = ("demos", "--config", recipe(tmp_path, content), "--workers", 0, "--record")
    assert "2 demonstrations of metaworld:reach-v3" in succeeds(*words, tmp_path / "a")
    said = succeeds(*words, tmp_path / "b", "metaworld:push-v3", "--episodes", 1)
    assert "1 demonstrations of metaworld:push-v3" in said
    path = recipe(tmp_path, {"rollout": {"episods": 3}})
    assert "Did you mean 'episodes'" in refused("rollout", "nothing", "--config", path, "--record", tmp_path / "c")
