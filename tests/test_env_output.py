from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrasp.collect.env_output import EnvOutput
from regrasp.collect.tree import RolloutError
from tests.rollout_data import Unchanged, assert_same, numbered, rows_of


def observation(batch: int, field: int = 1):
    return {
        "states": numbered(1, batch, 4, field=field)[0],
        "images": {"front": numbered(1, batch, 2, 2, 3, field=field + 1)[0], "wrist": None},
        "task_descriptions": [f"task {field} {b}" for b in range(batch)],
        "array": numbered(1, batch, 2, field=field + 2)[0].numpy(),
    }


def output(batch: int, **changes: Any):
    given = {
        "obs": observation(batch),
        "final_obs": observation(batch, field=10),
        "dones": torch.arange(batch)[:, None] % 2 == 0,
        "terminations": torch.arange(batch)[:, None] % 3 == 0,
        "truncations": torch.arange(batch)[:, None] % 5 == 0,
        "rewards": numbered(1, batch, 3, field=20)[0],
        "env_infos": {"success": torch.arange(batch), "names": [f"env {b}" for b in range(batch)]},
        "intervene_actions": numbered(1, batch, 6, field=21)[0],
        "intervene_flags": torch.arange(batch)[:, None] % 2 == 1,
    }
    return given | changes


def environments(tree: Any, start: int, end: int):
    if isinstance(tree, dict):
        return {key: environments(value, start, end) for key, value in tree.items()}
    return None if tree is None else tree[start:end]


def test_construction_makes_tensors_contiguous_at_any_depth_and_leaves_the_callers_dicts():
    transposed = torch.arange(6).reshape(2, 3).T
    obs = {"states": transposed, "images": {"list": [transposed], "text": "kept"}}
    with Unchanged(obs):
        made = EnvOutput(obs=obs, rewards=transposed)
    assert made.obs["states"].is_contiguous()
    assert made.obs["images"]["list"][0].is_contiguous()
    assert made.rewards.is_contiguous()
    assert made.obs["images"]["text"] == "kept"
    assert obs["states"] is transposed
    assert obs["images"]["list"][0] is transposed
    assert not transposed.is_contiguous()


def test_construction_brings_tensors_without_gradient_history():
    weight = torch.ones(2, 3, requires_grad=True)
    made = EnvOutput(obs={"states": weight * 2}, rewards=weight.sum(1))
    assert not made.obs["states"].requires_grad
    assert not made.rewards.requires_grad


def test_only_keywords_are_taken():
    with pytest.raises(TypeError):
        EnvOutput({"states": torch.zeros(2)})


def test_fields_with_different_numbers_of_environments_are_refused():
    with pytest.raises(RolloutError, match=r"dones 2, .*rewards 3"):
        EnvOutput(obs={}, dones=torch.zeros(2), rewards=torch.zeros(3))


def test_changing_the_dict_of_an_output_leaves_the_output():
    made = EnvOutput(**output(2))
    made.to_dict()["obs"].pop("states")
    assert "states" in made.obs


def test_merging_two_shards_concatenates_tensors_and_flattens_lists_in_order():
    first, second = output(2), output(3, obs=observation(3, field=30))
    merged = EnvOutput.merge_env_outputs([first, second])
    assert torch.equal(merged["obs"]["states"], torch.cat([first["obs"]["states"], second["obs"]["states"]]))
    assert merged["obs"]["task_descriptions"] == ["task 1 0", "task 1 1", "task 30 0", "task 30 1", "task 30 2"]
    assert merged["obs"]["images"]["front"].shape == (5, 2, 2, 3)
    assert merged["obs"]["images"]["wrist"] is None
    assert isinstance(merged["obs"]["array"], np.ndarray)
    assert merged["env_infos"]["success"].tolist() == [0, 1, 0, 1, 2]
    assert merged["env_infos"]["names"] == ["env 0", "env 1", "env 0", "env 1", "env 2"]
    assert merged["rewards"].shape == (5, 3)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 6), max_size=4), absent=st.sets(st.sampled_from(list(output(1))[1:])))
def test_merging_the_shards_of_an_output_gives_the_output(cuts: list[int], absent: set[str]):
    whole = output(6, **dict.fromkeys(absent))
    edges = sorted({0, *cuts, 6})
    shards = [environments(whole, a, b) for a, b in pairwise(edges)]
    with Unchanged(whole, shards):
        merged = EnvOutput.merge_env_outputs(shards)
    assert_same(merged, whole)


def test_obs_stands_in_where_a_shard_has_no_final_obs():
    first, second = output(2, final_obs=None), output(3)
    with Unchanged(first, second):
        merged = EnvOutput.merge_env_outputs([first, second])
    assert torch.equal(
        merged["final_obs"]["states"], torch.cat([first["obs"]["states"], second["final_obs"]["states"]])
    )
    assert merged["final_obs"]["task_descriptions"][:3] == ["task 1 0", "task 1 1", "task 10 0"]
    assert torch.equal(merged["obs"]["states"][2:], second["obs"]["states"])


def test_obs_stands_in_with_the_keys_that_final_obs_has():
    last = {"states": torch.full((3, 4), 5.0, dtype=torch.float64)}
    merged = EnvOutput.merge_env_outputs([output(2, final_obs=None), output(3, final_obs=last)])
    assert merged["final_obs"].keys() == {"states"}
    assert merged["final_obs"]["states"].shape == (5, 4)


@pytest.mark.parametrize("without_dones", [False, True])
def test_missing_interventions_become_zeros_and_false(without_dones: bool):
    nothing = {"intervene_actions": None, "intervene_flags": None}
    every = ("dones", "terminations", "truncations", "rewards")
    changes = dict.fromkeys(every) if without_dones else {}
    first, second = output(2, **nothing, **changes), output(3, **changes)
    merged = EnvOutput.merge_env_outputs([first, second])
    assert merged["intervene_actions"][:2].eq(0).all()
    assert torch.equal(merged["intervene_actions"][2:], second["intervene_actions"])
    assert merged["intervene_actions"].dtype == torch.float64
    assert merged["intervene_flags"].tolist() == [[False], [False], [False], [True], [False]]
    assert merged["intervene_flags"].dtype == torch.bool


@pytest.mark.parametrize("name", ["dones", "terminations", "truncations", "rewards", "env_infos"])
def test_any_other_field_that_only_some_shards_have_is_an_error_that_names_it(name: str):
    with pytest.raises(RolloutError, match=rf"'{name}'.* shard 1 of 2"):
        EnvOutput.merge_env_outputs([output(2), output(3, **{name: None})])


def test_an_observation_that_only_some_shards_have_is_an_error_that_names_it():
    partial = observation(3)
    partial["images"]["front"] = None
    with pytest.raises(ValueError, match=r"'obs\.images\.front'"):
        EnvOutput.merge_env_outputs([output(2), output(3, obs=partial)])
    del partial["images"]["front"]
    with pytest.raises(ValueError, match=r"'obs\.images\.front'"):
        EnvOutput.merge_env_outputs([output(2), output(3, obs=partial)])


def test_a_field_left_out_of_every_shard_is_none():
    merged = EnvOutput.merge_env_outputs([{"obs": {"states": torch.zeros(2, 1)}}] * 2)
    assert [name for name, value in merged.items() if value is not None] == ["obs"]


def test_shards_that_cannot_be_merged_are_refused_with_the_reason():
    with pytest.raises(RolloutError, match="nothing to merge"):
        EnvOutput.merge_env_outputs([])
    with pytest.raises(RolloutError, match="Shard 0 has no 'obs'"):
        EnvOutput.merge_env_outputs([{"dones": torch.zeros(2)}])
    with pytest.raises(RolloutError, match="Did you mean 'rewards'"):
        EnvOutput.merge_env_outputs([output(2) | {"reward": torch.zeros(2)}])
    with pytest.raises(RolloutError, match="'rewards' must have the same shape"):
        EnvOutput.merge_env_outputs([output(2), output(2, rewards=torch.zeros(2, 4))])
    narrow = rows_of({"states": torch.zeros(1, 2, 3)}, 0)
    with pytest.raises(RolloutError, match=r"'obs\.states' must have the same shape"):
        EnvOutput.merge_env_outputs([{"obs": narrow}, {"obs": {"states": torch.zeros(2, 4)}}])
    with pytest.raises(RolloutError, match="number of environments of shard 0"):
        EnvOutput.merge_env_outputs([{"obs": {"text": "?"}}, {"obs": {"text": "?"}, "intervene_flags": torch.ones(1)}])
