from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrasp.collect.trajectory import DATA_FIELDS, Trajectory, convert_trajectories_to_batch
from regrasp.collect.tree import RolloutError
from tests.rollout_data import Unchanged, assert_same, rows_of, whole_fields


def has_data(value: Any):
    return value is not None and not (isinstance(value, dict) and not value)


def data_of(trajectory: Trajectory):
    return {name: getattr(trajectory, name) for name in DATA_FIELDS if has_data(getattr(trajectory, name))}


def test_construction_makes_tensors_contiguous_at_any_depth_and_leaves_the_callers_dicts():
    transposed = torch.arange(24).reshape(2, 3, 4).transpose(0, 1)
    obs = {"images": {"front": transposed}}
    with Unchanged(obs):
        made = Trajectory(actions=transposed, curr_obs=obs)
    assert made.actions.is_contiguous()
    assert made.curr_obs["images"]["front"].is_contiguous()
    assert obs["images"]["front"] is transposed
    assert not transposed.is_contiguous()


def test_fields_may_be_given_in_the_order_that_rlinf_users_know():
    flags = torch.zeros((2, 3, 4), dtype=torch.bool)
    found = Trajectory(50, "weights", torch.ones((2, 3, 4)), flags)
    assert (found.max_episode_length, found.model_weights_id, found.batch_size) == (50, "weights", 3)
    assert torch.equal(found.intervene_flags, flags)


def test_nothing_is_collected_by_default():
    empty = Trajectory()
    assert empty.max_episode_length == 0
    assert empty.model_weights_id == ""
    assert empty.batch_size is None
    assert data_of(empty) == {}


def test_the_weights_id_tells_versions_apart_and_nothing_else():
    def name(*versions: float, batch: int = 2):
        return Trajectory(versions=torch.tensor(versions).reshape(-1, 1, 1).expand(-1, batch, 1)).model_weights_id

    assert name(3.0) == name(3.0, 3.0, batch=5) == name(3)
    assert name(3.0) != name(4.0)
    assert name(3.0, 4.0) != name(3.0)
    assert Trajectory(model_weights_id="mine", versions=torch.ones(1, 1)).model_weights_id == "mine"


def test_rows_and_batches_that_do_not_fit_are_refused_by_name():
    with pytest.raises(RolloutError, match=r"actions 4, .*rewards 3"):
        Trajectory(actions=torch.zeros(4, 2, 1), rewards=torch.zeros(3, 2))
    with pytest.raises(RolloutError, match=r"Of 4 steps.*dones 3"):
        Trajectory(actions=torch.zeros(4, 2, 1), dones=torch.zeros(3, 2))
    with pytest.raises(RolloutError, match=r"dones 5, prev_values 6"):
        Trajectory(actions=torch.zeros(4, 2, 1), dones=torch.zeros(5, 2), prev_values=torch.zeros(6, 2))
    with pytest.raises(RolloutError, match=r"actions 2, curr_obs\.a\.b 3"):
        Trajectory(actions=torch.zeros(4, 2, 1), curr_obs={"a": {"b": torch.zeros(4, 3)}})
    with pytest.raises(RolloutError, match=r"'curr_obs\.a' is str"):
        Trajectory(curr_obs={"a": "text"})


def test_five_environments_split_in_three_are_two_two_and_one():
    fields = whole_fields(3, 5)
    parts = Trajectory(max_episode_length=9, **fields).split(3)
    assert [part.batch_size for part in parts] == [2, 2, 1]
    assert torch.equal(parts[1].actions, fields["actions"][:, 2:4])
    assert torch.equal(parts[2].curr_obs["images"]["wrist"][0], fields["curr_obs"]["images"]["wrist"][0][:, 4:])
    assert all(part.actions.is_contiguous() for part in parts)
    assert {part.max_episode_length for part in parts} == {9}
    assert len({part.model_weights_id for part in parts}) == 1


@settings(max_examples=30, deadline=None)
@given(steps=st.integers(1, 4), batch=st.integers(1, 7), epochs=st.integers(0, 2), data=st.data())
def test_splitting_then_converting_to_a_batch_gives_everything_back(
    steps: int, batch: int, epochs: int, data: st.DataObject
):
    n = data.draw(st.integers(1, batch))
    fields = whole_fields(steps, batch, epochs)
    whole = Trajectory(**fields)
    with Unchanged(fields, data_of(whole)):
        parts = whole.split(n)
    sizes = [part.batch_size for part in parts]
    assert len(parts) == n
    assert sum(sizes) == batch
    assert max(sizes) - min(sizes) <= 1
    with Unchanged([data_of(part) for part in parts]):
        batch_of_all = convert_trajectories_to_batch(parts)
    assert_same({name: batch_of_all[name] for name in fields}, fields)
    assert batch_of_all.keys() == fields.keys()


@pytest.mark.parametrize("n", [0, -1, 4])
def test_a_split_into_more_parts_than_environments_or_none_is_refused(n: int):
    with pytest.raises(RolloutError, match=f"1 to 3 parts; {n} were asked"):
        Trajectory(actions=torch.zeros(2, 3, 1)).split(n)


def test_parts_share_no_memory_with_the_whole():
    whole = Trajectory(actions=torch.zeros(2, 3, 1))
    for n in (1, 3):
        whole.split(n)[0].actions += 1
    assert whole.actions.eq(0).all()


def test_converting_refuses_what_only_some_trajectories_have():
    one = Trajectory(actions=torch.zeros(2, 3, 1), curr_obs={"a": torch.zeros(2, 3)})
    with pytest.raises(RolloutError, match=r"'rewards'.* trajectory 0 of 2"):
        convert_trajectories_to_batch([one, Trajectory(actions=torch.zeros(2, 3, 1), rewards=torch.zeros(2, 3))])
    with pytest.raises(RolloutError, match=r"'curr_obs'.* trajectory 1 of 2"):
        convert_trajectories_to_batch([one, Trajectory(actions=torch.zeros(2, 3, 1))])
    with pytest.raises(RolloutError, match=r"'curr_obs\.a'"):
        other = {"b": torch.zeros(2, 3)}
        convert_trajectories_to_batch([one, Trajectory(actions=torch.zeros(2, 3, 1), curr_obs=other)])
    with pytest.raises(RolloutError, match=r"'actions' must have the same shape"):
        convert_trajectories_to_batch([Trajectory(actions=torch.zeros(t, 3, 1)) for t in (2, 3)])


def test_converting_no_trajectories_gives_an_empty_batch():
    assert convert_trajectories_to_batch([]) == {}


def corrected_trajectory(epochs: int = 0):
    """4 steps of 3 environments; chunk of two flags. Environment 1 is never corrected."""
    flags = torch.zeros(4, 3, 2, dtype=torch.bool)
    flags[1, 0, 0] = True  # in part
    flags[2, 0] = True  # whole
    flags[3, 2, 1] = True  # in part
    fields = whole_fields(4, 3, epochs)
    return fields, Trajectory(max_episode_length=9, intervene_flags=flags, **fields)


def test_any_keeps_the_steps_with_one_flag_and_all_those_with_every_flag():
    fields, trajectory = corrected_trajectory()
    with Unchanged(fields, data_of(trajectory)):
        first, second = trajectory.extract_intervene_traj(mode="any")
        (only,) = trajectory.extract_intervene_traj(mode="all")
    expected = {name: rows_of(value, (slice(1, 3), slice(0, 1))) for name, value in fields.items()}
    found = data_of(first)
    assert found.pop("intervene_flags").tolist() == [[[True, False]], [[True, True]]]
    assert_same(found | {}, {name: expected[name] for name in found})
    assert found.keys() == expected.keys()
    assert torch.equal(second.actions, fields["actions"][3:, 2:])
    assert torch.equal(only.actions, fields["actions"][2:3, :1])
    assert torch.equal(only.next_obs["images"]["wrist"][0], fields["next_obs"]["images"]["wrist"][0][2:3, :1])
    assert first.max_episode_length == 9
    assert first.model_weights_id == trajectory.model_weights_id
    assert first.actions.is_contiguous()


def test_any_is_the_default_mode():
    _, trajectory = corrected_trajectory()
    assert len(trajectory.extract_intervene_traj()) == 2


def test_extraction_keeps_the_first_done_row_and_the_last_value_row_of_each_epoch():
    # Two epochs of two steps: rows 0 | 1 2 || 3 | 4 5 of dones belong to
    # (start, step 0, step 1, start, step 2, step 3),
    # rows 0 1 | 2 || 3 4 | 5 of prev_values to (step 0, step 1, end, step 2, step 3, end). Steps 1 and 2 are corrected.
    fields, trajectory = corrected_trajectory(epochs=2)
    corrected = trajectory.extract_intervene_traj()[0]
    for name in ("dones", "terminations", "truncations"):
        assert torch.equal(getattr(corrected, name), fields[name][[0, 2, 3, 4], :1])
    assert torch.equal(corrected.prev_values, fields["prev_values"][[1, 2, 3, 5], :1])
    assert torch.equal(corrected.rewards, fields["rewards"][[1, 2], :1])


def test_flags_of_one_number_per_step_are_read_too():
    trajectory = Trajectory(
        actions=torch.arange(6).reshape(3, 2, 1),
        intervene_flags=torch.tensor([[0, 0], [0, 1], [0, 1]], dtype=torch.bool),
    )
    (only,) = trajectory.extract_intervene_traj(mode="all")
    assert only.actions.flatten().tolist() == [3, 5]


def test_without_corrections_there_is_nothing_to_extract():
    assert Trajectory(actions=torch.zeros(2, 3, 1)).extract_intervene_traj() is None
    flags = torch.zeros(2, 3, 1, dtype=torch.bool)
    assert Trajectory(actions=torch.zeros(2, 3, 1), intervene_flags=flags).extract_intervene_traj() is None


def test_an_unknown_mode_and_uneven_epochs_are_refused():
    _, trajectory = corrected_trajectory()
    with pytest.raises(RolloutError, match=r"'any' or 'all'; found 'al'.*'all'"):
        trajectory.extract_intervene_traj(mode="al")
    _, uneven = corrected_trajectory(epochs=3)
    with pytest.raises(RolloutError, match="4 steps do not divide into 3 epochs"):
        uneven.extract_intervene_traj()
