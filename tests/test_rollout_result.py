from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrasp.collect.chunk_step import ChunkStepResult
from regrasp.collect.rollout_result import EmbodiedRolloutResult, RolloutResult
from regrasp.collect.trajectory import DATA_FIELDS, Trajectory, convert_trajectories_to_batch
from regrasp.collect.tree import RolloutError
from tests.rollout_data import Unchanged, assert_same, rollout, whole_fields


def data_of(trajectory: Trajectory):
    return {name: getattr(trajectory, name) for name in DATA_FIELDS}


def lists_of(result: RolloutResult):
    return {name: getattr(result, name) for name in DATA_FIELDS}


def test_a_chunk_step_makes_tensors_contiguous_and_leaves_the_callers_dicts():
    transposed = torch.arange(6).reshape(2, 3).T
    inputs = {"chain": {"noise": transposed}}
    with Unchanged(inputs):
        step = ChunkStepResult(actions=transposed, forward_inputs=inputs)
    assert step.actions.is_contiguous()
    assert step.forward_inputs["chain"]["noise"].is_contiguous()
    assert inputs["chain"]["noise"] is transposed
    assert ChunkStepResult(forward_inputs=None).forward_inputs == {}
    with pytest.raises(TypeError):
        ChunkStepResult(transposed)


@settings(max_examples=25, deadline=None)
@given(steps=st.integers(1, 4), batch=st.integers(1, 6), epochs=st.integers(0, 2), data=st.data())
def test_what_was_appended_comes_back_whole_and_in_parts(steps: int, batch: int, epochs: int, data: st.DataObject):
    n = data.draw(st.integers(1, batch))
    result = rollout(steps, batch, epochs)
    expected = whole_fields(steps, batch, epochs)
    expected["intervene_flags"] = torch.zeros(steps, batch, 6, dtype=torch.bool)
    with Unchanged(lists_of(result)):
        whole = result.to_trajectory()
        parts = result.to_split_trajectories(n)
    assert whole.max_episode_length == 77
    assert_same(data_of(whole), {name: expected[name] for name in DATA_FIELDS})
    assert all(tensor.is_contiguous() for tensor in data_of(whole).values() if isinstance(tensor, torch.Tensor))
    together = convert_trajectories_to_batch(parts)
    assert_same({name: together[name] for name in DATA_FIELDS}, {name: expected[name] for name in DATA_FIELDS})
    sizes = [part.batch_size for part in parts]
    assert len(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert {part.model_weights_id for part in parts} == {whole.model_weights_id}


def test_more_parts_than_environments_are_refused():
    with pytest.raises(RolloutError, match="1 to 5 parts; 8 were asked"):
        rollout(2, 5).to_split_trajectories(8)
    with pytest.raises(RolloutError, match="of 0 environments"):
        RolloutResult().to_split_trajectories(1)


def test_rlinfs_names_stand_for_the_same():
    assert EmbodiedRolloutResult is RolloutResult
    assert [part.batch_size for part in rollout(1, 5).to_splited_trajectories(4)] == [2, 1, 1, 1]


def test_lists_that_the_constructor_was_given_stay_the_callers():
    actions = [torch.zeros(2, 4)]
    result = RolloutResult(actions=actions)
    result.append_step_result(ChunkStepResult(actions=torch.ones(2, 4)))
    result.update_last_actions(torch.ones(2, 4), torch.ones(2, dtype=torch.bool))
    assert len(actions) == 1
    assert result.to_trajectory().intervene_flags.shape == (2, 2, 4)


def test_a_buffer_that_the_environment_uses_again_does_not_change_the_past():
    buffer, array = torch.zeros(2, 3), np.zeros((2, 3), dtype=np.float32)
    result = RolloutResult()
    for step in range(3):
        buffer.fill_(step)
        array.fill(step)
        result.append_step_result(ChunkStepResult(actions=buffer, forward_inputs={"x": buffer}))
        result.append_transitions({"s": buffer, "a": array}, {"s": buffer, "a": array})
    trajectory = result.to_trajectory()
    for tensor in (trajectory.actions, trajectory.forward_inputs["x"], *trajectory.next_obs.values()):
        assert tensor[:, 0, 0].tolist() == [0, 1, 2]
        assert isinstance(tensor, torch.Tensor)


def test_transitions_leave_out_task_texts_without_taking_them_from_the_caller():
    obs = {"states": torch.zeros(2, 3), "wrist": None, "task_descriptions": ["a", "b"]}
    following = {"states": torch.ones(2, 3), "task_descriptions": ["a", "b"]}
    result = RolloutResult()
    with Unchanged(obs, following):
        result.append_transitions(obs, following)
        trajectory = result.to_trajectory()
    assert trajectory.curr_obs.keys() == trajectory.next_obs.keys() == {"states"}
    assert trajectory.next_obs["states"].eq(1).all()


def test_a_transition_needs_both_sides_and_only_numbers():
    result = RolloutResult()
    with pytest.raises(RolloutError, match="one of them is None"):
        result.append_transitions({"states": torch.zeros(2, 3)}, None)
    for value in ("text", ["a", "b"], np.array(["a", "b"]), 3.0):
        with pytest.raises(RolloutError, match=r"'next_obs\.deep\.task"):
            result.append_transitions({"states": torch.zeros(2, 3)}, {"deep": {"task": value}})
    assert result.curr_obs == result.next_obs == []


@pytest.mark.parametrize("name", ["rewards", "prev_logprobs", "versions", "dones", "prev_values"])
def test_a_field_that_is_none_in_some_steps_is_refused_by_name(name: str):
    result = RolloutResult()
    for step in range(3):
        given = {} if step == 1 else {name: torch.zeros(2, 1)}
        result.append_step_result(ChunkStepResult(actions=torch.zeros(2, 4), **given))
    with pytest.raises(RolloutError, match=f"{name} 2"):
        result.to_trajectory()


def test_forward_inputs_and_observations_given_in_some_steps_only_are_refused_by_name():
    result = RolloutResult()
    result.append_step_result(ChunkStepResult(actions=torch.zeros(2, 4), forward_inputs={"a": torch.zeros(2)}))
    result.append_step_result(ChunkStepResult(actions=torch.zeros(2, 4)))
    with pytest.raises(RolloutError, match=r"forward_inputs\.a 1"):
        result.to_trajectory()
    for second in ({"deep": {"a": None}}, {"deep": {}}):
        result = RolloutResult()
        result.append_transitions({"deep": {"a": torch.zeros(2)}}, {})
        result.append_transitions(second, {})
        with pytest.raises(RolloutError, match=r"'curr_obs\.deep\.a'.* step 1 of 2"):
            result.to_trajectory()


def test_a_shape_that_changes_is_refused_with_the_step():
    result = RolloutResult()
    for batch in (2, 2, 3):
        result.append_step_result(ChunkStepResult(actions=torch.zeros(batch, 4)))
    with pytest.raises(RolloutError, match=r"'actions'.*\[2, 4\] in step 0 and \[3, 4\] in step 2"):
        result.to_trajectory()


def test_rewards_that_come_one_step_late_still_have_one_row_per_step():
    # The order of a chunked rollout: the reset gives no reward, and the closing row has no action.
    result = RolloutResult()
    done = torch.zeros(2, 1, dtype=torch.bool)
    result.append_step_result(ChunkStepResult(actions=torch.zeros(2, 4), dones=done))
    result.append_step_result(
        ChunkStepResult(actions=torch.ones(2, 4), dones=done, rewards=torch.tensor([[1.0], [2.0]]))
    )
    result.append_step_result(ChunkStepResult(dones=~done, rewards=torch.tensor([[3.0], [4.0]])))
    trajectory = result.to_trajectory()
    assert trajectory.rewards[:, :, 0].tolist() == [[1, 2], [3, 4]]
    assert trajectory.dones.shape == (3, 2, 1)


def started(actions: torch.Tensor, **inputs: Any):
    result = RolloutResult()
    result.append_step_result(ChunkStepResult(actions=torch.full_like(actions, -1), forward_inputs=inputs))
    result.append_step_result(ChunkStepResult(actions=actions, forward_inputs=inputs))
    return result


def test_corrections_replace_the_flagged_actions_of_the_last_step_only():
    # Two environments, chunks of C = 2 actions of size D = 2; the first action of environment 1 was corrected.
    actions = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    given = torch.tensor([[90.0, 91.0, 92.0, 93.0], [94.0, 95.0, 96.0, 97.0]])
    flags = torch.tensor([[False, False], [True, False]])
    inputs = {"action": actions, "model_action": actions * 2, "tokens": torch.arange(2)}
    with Unchanged(actions, given, flags, inputs):
        result = started(actions, **inputs)
        result.update_last_actions(given, flags)
        trajectory = result.to_trajectory()
    expected = [[1, 2, 3, 4], [94, 95, 7, 8]]
    assert trajectory.actions.tolist() == [[[-1] * 4] * 2, expected]
    assert trajectory.intervene_flags[0].any().item() is False
    assert trajectory.intervene_flags[1].tolist() == [[False] * 4, [True, True, False, False]]
    assert trajectory.forward_inputs.keys() == {"action", "tokens"}
    assert trajectory.forward_inputs["action"][1].tolist() == expected
    assert trajectory.forward_inputs["action"][0].tolist() == actions.tolist()


def test_a_step_recorded_before_is_not_changed_by_a_correction():
    actions = torch.zeros(2, 4)
    step = ChunkStepResult(actions=actions, forward_inputs={"action": actions, "model_action": actions})
    result = RolloutResult()
    result.append_step_result(step)
    with Unchanged(step.actions, step.forward_inputs):
        result.update_last_actions(torch.ones(2, 4), torch.ones(2, dtype=torch.bool))
    assert step.forward_inputs["model_action"] is not None


def test_the_models_action_stays_where_no_one_corrected():
    assert "model_action" in started(torch.zeros(2, 4), model_action=torch.zeros(2, 4)).to_trajectory().forward_inputs


@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 2)])
@pytest.mark.parametrize("flag_shape", [(2,), (2, 1), (2, 2), (2, 2, 1), (2, 4), (2, 2, 2)])
def test_flags_may_be_per_environment_per_action_or_per_number(shape: tuple[int, ...], flag_shape: tuple[int, ...]):
    actions = torch.arange(8.0).reshape(shape)
    flags = torch.zeros(flag_shape, dtype=torch.bool)
    flags[1] = True
    result = started(actions)
    result.update_last_actions(actions.reshape(2, 4) + 100, flags)
    assert result.actions[-1].flatten().tolist() == [0, 1, 2, 3, 104, 105, 106, 107]
    assert result.actions[-1].shape == result.intervene_flags[-1].shape == shape


def test_a_second_correction_of_a_step_keeps_the_first():
    result = started(torch.zeros(2, 2))
    result.update_last_actions(torch.full((2, 2), 1.0), torch.tensor([True, False]))
    result.update_last_actions(torch.full((2, 2), 2.0), torch.tensor([False, True]))
    assert result.actions[-1].tolist() == [[1, 1], [2, 2]]
    assert result.intervene_flags[-1].all()


def test_what_nobody_did_may_be_nan():
    result = started(torch.zeros(2, 2))
    result.update_last_actions(torch.tensor([[5.0, 5.0], [np.nan, np.nan]]), torch.tensor([True, False]))
    assert result.actions[-1].tolist() == [[5, 5], [0, 0]]


def test_corrections_that_do_not_fit_are_refused():
    flag = torch.ones(2, dtype=torch.bool)
    with pytest.raises(RolloutError, match="no step with actions"):
        RolloutResult().update_last_actions(torch.ones(2, 4), flag)
    result = started(torch.zeros(2, 4), action=torch.zeros(2, 3))
    with pytest.raises(RolloutError, match=r"'intervene_actions'.*\[2, 4\]; found \[2, 3\]"):
        result.update_last_actions(torch.ones(2, 3), flag)
    for wrong in (torch.ones(3), torch.ones(2, 3), torch.ones(())):
        with pytest.raises(RolloutError, match="'intervene_flags'"):
            result.update_last_actions(torch.ones(2, 4), wrong.bool())
    with pytest.raises(RolloutError, match=r"forward_inputs\['action'\]"):
        result.update_last_actions(torch.ones(2, 4), flag)
    assert result.actions[-1].eq(0).all()


def test_an_empty_rollout_gives_an_empty_trajectory():
    trajectory = RolloutResult(max_episode_length=5).to_trajectory()
    assert trajectory.max_episode_length == 5
    assert trajectory.actions is None
    assert trajectory.curr_obs == {}
