"""Rollouts for learners: what happened, row by row, and nothing else through the mask."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrasp.collect.environment import (
    STATE,
    ChunkResult,
    Environment,
    EnvironmentSpec,
    Observation,
    SerialEnvironment,
    Step,
)
from regrasp.collect.environments import describe_environment, start_environment
from regrasp.collect.experience import first_output, gather, loss_mask, next_output
from regrasp.collect.rollout import EpisodeRecord, RolloutPolicy, run_chunks, run_episodes
from regrasp.collect.trajectory import DATA_FIELDS, Trajectory, convert_trajectories_to_batch
from regrasp.collect.tree import RolloutError
from regrasp.collect.workers import WorkerEnvironment
from regrasp.core.errors import ConfigError
from tests.policy_checkpoints import write_flow_policy
from tests.rollout_data import Unchanged, assert_same, rows_of

PAGE = Path(__file__).parent.parent / "docs/rollouts.md"


def count_spec(limit: int) -> EnvironmentSpec:
    return EnvironmentSpec(
        name="count", task="count", state_size=2, action_size=2, max_episode_steps=limit, fps=10.0, robot_type="none"
    )


class Count:
    """Shows its seed and its steps; succeeds after as many as the seed says, and gives up after seed − 100."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec, self._seed, self._steps = spec, 0, 0

    def reset(self, seed: int) -> Observation:
        self._seed, self._steps = seed, 0
        return {STATE: np.array([seed, 0], np.float32)}

    def step(self, action: np.ndarray) -> Step:
        self._steps += 1
        shown = {STATE: np.array([self._seed, self._steps], np.float32)}
        return Step(shown, float(action[0]), self._steps == self._seed, self._steps == self._seed - 100)

    def close(self) -> None:
        pass


class Numbering:
    """Numbers an episode's actions from 1, and beside it says the episode's seed or a random number that follows it.

    It writes its actions into one buffer, and spoils the observations that it was given.
    """

    def __init__(self, *sizes: int, noise: bool = False) -> None:
        self._sizes, self._noise, self._calls = sizes, noise, 0
        self._buffer: np.ndarray | None = None

    def reset(self, seeds: Sequence[int]) -> None:
        self._generators = [np.random.default_rng(seed) for seed in seeds]

    def act(self, observations: Observation) -> np.ndarray:
        seen, size = observations[STATE], self._sizes[min(self._calls, len(self._sizes) - 1)]
        self._calls += 1
        if self._buffer is None or self._buffer.shape[1] != size:
            self._buffer = np.zeros((len(seen), size, 2), np.float32)
        self._buffer[..., 0] = seen[:, 1:] + np.arange(1, size + 1)
        self._buffer[..., 1] = [[g.normal()] for g in self._generators] if self._noise else seen[:, :1]
        seen[:] = -77.0
        return self._buffer


class Reusing:
    """An environment that spoils the arrays that it gave before, and writes what it gives into them."""

    def __init__(self, environment: Environment) -> None:
        self._environment, self._kept = environment, {}
        self.spec, self.copies, self.close = environment.spec, environment.copies, environment.close

    def _same(self, name: str, value: np.ndarray) -> np.ndarray:
        kept = self._kept.setdefault(name, np.empty_like(value))
        kept[...] = value
        return kept

    def reset(self, seeds: Sequence[int | None]) -> Observation:
        return {key: self._same(key, value) for key, value in self._environment.reset(seeds).items()}

    def step(self, actions: np.ndarray) -> ChunkResult:
        result = self._environment.step(actions)
        for kept in self._kept.values():
            kept[...] = 1
        fields = {name: self._same(name, value) for name, value in vars(result).items() if name != "observations"}
        shown = {key: self._same(f"after {key}", value) for key, value in result.observations.items()}
        return ChunkResult(observations=shown, **fields)


def counting(copies: int, limit: int = 5) -> SerialEnvironment:
    return SerialEnvironment([Count(count_spec(limit)) for _ in range(copies)])


def data_of(trajectory: Trajectory) -> dict[str, Any]:
    """The fields that hold data."""
    given = {name: getattr(trajectory, name) for name in DATA_FIELDS}
    return {name: value for name, value in given.items() if value is not None and value != {}}


def assert_holds(found: Trajectory, episodes: Sequence[EpisodeRecord]):
    """Fail unless the trajectory, through its mask, has these episodes frame by frame."""
    mask = loss_mask(found)
    steps, copies, size = mask.shape
    epochs = len(episodes) // copies
    per_epoch = steps // epochs
    for number, episode in enumerate(episodes):
        epoch, copy = divmod(number, copies)
        rows, flags = slice(epoch * per_epoch, (epoch + 1) * per_epoch), slice(epoch * (per_epoch + 1), None)
        ran = mask[rows, copy]
        assert found.actions is not None
        assert found.rewards is not None
        np.testing.assert_array_equal(found.actions[rows, copy][ran].numpy(), episode.actions, strict=True)
        np.testing.assert_array_equal(found.rewards[rows, copy][ran].numpy(), episode.rewards, strict=True)
        assert not found.rewards[rows, copy][~ran].any()
        ends = [getattr(found, name)[flags, copy][per_epoch, -1].item() for name in ("terminations", "truncations")]
        assert ends == [episode.success, not episode.success]
        began = ran.any(dim=1)
        assert not found.actions[rows, copy][~began].any()
        for key, value in episode.observations.items():
            before, after = found.curr_obs[key][rows, copy], found.next_obs[key][rows, copy]
            np.testing.assert_array_equal(before[began].numpy(), value[::size], strict=True)
            assert torch.equal(after[:-1], before[1:])


def test_an_epoch_lies_row_by_row_as_worked_by_hand():
    # Chunks of 2 actions, at most 5 steps: T = 3. Seeds: success after 3 steps; cut off after 5; given up after 1.
    # Rewards are the numbers of the actions that ran; an action of the ended third episode's later chunks is 0.
    rollout = gather(counting(3), Numbering(2), [3, 9, 101], version=7)
    found = rollout.to_trajectory()
    assert found.max_episode_length == 5
    assert found.actions is not None
    assert found.actions[:, :, :, 0].transpose(0, 1).tolist() == [
        [[1, 2], [3, 4], [0, 0]],
        [[1, 2], [3, 4], [5, 6]],
        [[1, 2], [0, 0], [0, 0]],
    ]
    assert found.rewards is not None
    assert found.rewards.transpose(0, 1).tolist() == [
        [[1, 2], [3, 0], [0, 0]],
        [[1, 2], [3, 4], [5, 0]],
        [[1, 0], [0, 0], [0, 0]],
    ]
    no, yes = [False, False], [True, True]
    terminations, truncations, dones = (
        getattr(found, name).transpose(0, 1).tolist() for name in ("terminations", "truncations", "dones")
    )
    assert terminations == [[no, no, yes, yes], [no, no, no, no], [no, no, no, no]]
    assert truncations == [[no, no, no, no], [no, no, no, yes], [no, yes, yes, yes]]
    assert dones == [[no, no, yes, yes], [no, no, no, yes], [no, yes, yes, yes]]
    assert loss_mask(found).transpose(0, 1).tolist() == [
        [yes, [True, False], no],
        [yes, yes, [True, False]],
        [[True, False], no, no],
    ]
    assert found.curr_obs[STATE][:, :, 1].T.tolist() == [[0, 2, 3], [0, 2, 4], [0, 1, 1]]
    assert found.next_obs[STATE][:, :, 1].T.tolist() == [[2, 3, 3], [2, 4, 5], [1, 1, 1]]
    assert found.versions is not None
    assert found.versions.tolist() == [[[7]] * 3] * 3
    assert data_of(found).keys() == {
        *("actions", "intervene_flags", "rewards", "versions", "curr_obs", "next_obs"),
        *("dones", "terminations", "truncations"),
    }


def test_every_epoch_has_as_many_rows_and_its_own_first_one():
    # The second epoch's episodes all end in its first chunk, at the first and at the second of its two actions.
    found = gather(counting(2), Numbering(2), [9, 3, 1, 2, 102, 9]).to_trajectory()
    assert found.actions is not None
    assert found.dones is not None
    assert found.actions.shape == (9, 2, 2, 2)
    assert found.dones.shape == (12, 2, 2)
    assert not found.dones[[0, 4, 8]].any()
    assert loss_mask(found)[3:6].transpose(0, 1).tolist() == [
        [[True, False], [False, False], [False, False]],
        [[True, True], [False, False], [False, False]],
    ]
    assert found.curr_obs[STATE][::3, :, 0].tolist() == [[9, 3], [1, 2], [102, 9]]


episode_ends = st.one_of(st.integers(1, 12), st.integers(101, 112))


@settings(max_examples=60)
@given(
    seeds=st.lists(episode_ends, min_size=1, max_size=9),
    copies=st.integers(1, 4),
    size=st.integers(1, 7),
    limit=st.integers(1, 9),
)
def test_through_the_mask_a_rollout_has_the_episodes_that_run_episodes_gives(
    seeds: list[int], copies: int, size: int, limit: int
):
    seeds = (seeds * copies)[: max(1, len(seeds) // copies) * copies]
    found = gather(counting(copies, limit), Numbering(size, noise=True), seeds).to_trajectory()
    expected = list(run_episodes(counting(copies, limit), Numbering(size, noise=True), seeds))
    assert len(found.actions if found.actions is not None else ()) == len(seeds) // copies * -(-limit // size)
    assert int(loss_mask(found).sum()) == sum(episode.steps for episode in expected)
    assert_holds(found, expected)


def test_environments_and_policies_may_use_their_arrays_again():
    seeds = [3, 9, 101, 2, 1, 4]
    expected = gather(counting(3), Numbering(2), seeds).to_trajectory()
    with Unchanged(seeds):
        found = gather(Reusing(counting(3)), Numbering(2), seeds).to_trajectory()
    assert_same(data_of(found), data_of(expected))


def test_worker_processes_give_the_same_trajectory():
    seeds = [3, 9, 101, 2, 1, 4]
    expected = gather(counting(3), Numbering(2, noise=True), seeds).to_trajectory()
    workers = WorkerEnvironment(count_spec(5), copies=3, workers=2, start=Count)
    found = gather(workers, Numbering(2, noise=True), seeds).to_trajectory()
    workers.close()
    assert_same(data_of(found), data_of(expected))


def test_parts_for_several_learners_are_the_whole_when_joined():
    rollout = gather(counting(5), Numbering(2, noise=True), [3, 9, 101, 2, 1, 4, 9, 1, 1, 102])
    whole = rollout.to_trajectory()
    parts = rollout.to_split_trajectories(3)
    assert [part.batch_size for part in parts] == [2, 2, 1]
    assert_same(convert_trajectories_to_batch(parts), data_of(whole))
    assert torch.equal(torch.cat([loss_mask(part) for part in parts], dim=1), loss_mask(whole))
    assert torch.equal(loss_mask(Trajectory(**convert_trajectories_to_batch(parts))), loss_mask(whole))


def test_corrections_of_the_last_chunk_are_kept_beside_what_the_policy_did():
    rollout = gather(counting(2), Numbering(2), [9, 3])
    flags = torch.tensor([[True, False], [False, False]])  # the first action of the first copy, number 5 of its episode
    rollout.update_last_actions(torch.full((2, 2, 2), 50.0), flags)
    found = rollout.to_trajectory()
    assert found.actions is not None
    assert found.actions[-1].tolist() == [[[50, 50], [6, 9]], [[0, 0], [0, 0]]]
    corrected = found.extract_intervene_traj()
    assert corrected is not None
    assert [(part.actions if part.actions is not None else torch.empty(0)).tolist() for part in corrected] == [
        [[[[50, 50], [6, 9]]]]
    ]


def test_an_output_shows_the_last_observations_where_episodes_ended_and_keeps_its_flags():
    spec = count_spec(5)
    chunks = list(run_chunks(counting(2), Numbering(2), [3, 5]))
    outputs = [first_output(spec, chunks[0].before, 2)]
    for chunk in chunks:
        outputs.append(next_output(spec, outputs[-1], chunk))
    steps = [[1.0 * n for n in output.obs[STATE][:, 1].tolist()] for output in outputs]
    assert steps == [[0, 0], [2, 2], [3, 4], [3, 5]]
    assert [output.final_obs is None for output in outputs] == [True, True, False, False]
    assert_same(outputs[2].final_obs, outputs[2].obs)
    assert outputs[3].obs["task_descriptions"] == ["count", "count"]
    assert [rows_of(output.dones, 0).tolist() for output in outputs] == [[False] * 2] * 2 + [[True] * 2] * 2
    assert outputs[0].rewards is None


def test_the_mask_is_the_same_where_dones_are_set_at_the_end_alone():
    found = gather(counting(3), Numbering(2), [3, 9, 101, 2, 1, 4]).to_trajectory()
    assert found.dones is not None
    epochs = found.dones.reshape(2, 4, 3, 2).transpose(1, 2).flatten(2)
    ends = torch.cat((epochs[:, :, :1], epochs[:, :, 1:] & ~epochs[:, :, :-1]), dim=2)
    at_end = Trajectory(actions=found.actions, dones=ends.reshape(2, 3, 4, 2).transpose(1, 2).reshape(8, 3, 2))
    assert not torch.equal(at_end.dones if at_end.dones is not None else ends, found.dones)
    assert torch.equal(loss_mask(at_end), loss_mask(found))


def test_what_cannot_be_gathered_is_refused():
    for seeds in ([], [1], [1, 2, 3]):
        with pytest.raises(ConfigError, match=rf"multiple of 2; found {len(seeds)}"):
            gather(counting(2), Numbering(2), seeds)
    with pytest.raises(RolloutError, match=r"gave 2 actions, and then 3"):
        gather(counting(1), Numbering(2, 3), [9])
    with pytest.raises(RolloutError, match=r"gave 2 actions, and then 3"):
        gather(counting(1), Numbering(2, 3), [1, 9])

    class Narrow(Numbering):
        def act(self, observations: Observation) -> np.ndarray:
            return super().act(observations)[..., :1]

    with pytest.raises(ConfigError, match=r"count takes 2 numbers per action"):
        gather(counting(1), Narrow(2), [9])


def test_a_mask_needs_the_rows_before_each_epoch():
    actions, dones = torch.zeros(6, 2, 3, 1), torch.zeros(8, 2, 3, dtype=torch.bool)
    assert loss_mask(Trajectory(actions=actions, dones=dones)).all()
    with pytest.raises(RolloutError, match=r"found dones None"):
        loss_mask(Trajectory(actions=actions))
    with pytest.raises(RolloutError, match=r"found no actions"):
        loss_mask(Trajectory(dones=dones))
    with pytest.raises(RolloutError, match=r"found dones \[8, 2\]"):
        loss_mask(Trajectory(actions=actions, dones=dones[:, :, 0]))
    for rows in (6, 10):
        with pytest.raises(RolloutError, match=rf"found 6 steps and {rows} rows of dones"):
            loss_mask(Trajectory(actions=actions, dones=torch.zeros(rows, 2, 3, dtype=torch.bool)))


def checkpoint_policy(path: Path, spec: EnvironmentSpec, *, mean: float, scale: float) -> RolloutPolicy:
    from regrasp.collect.checkpoint_policy import CheckpointPolicy

    write_flow_policy(path, {STATE: (spec.state_size,)}, spec.action_size, mean=mean, scale=scale)
    return CheckpointPolicy(path, spec)


def assert_real(spec: EnvironmentSpec, policy: RolloutPolicy, seeds: list[int], copies: int) -> Trajectory:
    """Fail unless the copies of an environment give the episodes of ``run_episodes``, in worker processes too."""
    serial = start_environment(spec, copies=copies, workers=0)
    found = gather(serial, policy, seeds).to_trajectory()
    assert_holds(found, list(run_episodes(serial, policy, seeds)))
    serial.close()
    workers = start_environment(spec, copies=copies, workers=2)
    assert_same(data_of(gather(workers, policy, seeds).to_trajectory()), data_of(found))
    workers.close()
    return found


def test_experience_in_metaworld_is_that_of_run_episodes_with_successes_and_cut_offs():
    pytest.importorskip("metaworld", reason="needs the extra metaworld")
    from regrasp.collect.experts import MIXES, ExpertPolicy

    spec = describe_environment("metaworld:pick-place-v3", max_episode_steps=70)
    found = assert_real(spec, ExpertPolicy(spec, MIXES["slow"]), list(range(8)), copies=4)
    assert found.terminations is not None
    successes = found.terminations.any(dim=2).reshape(2, 71, 4)[:, -1]
    assert 0 < int(successes.sum()) < 8


def test_experience_of_a_checkpoint_in_pusht_is_that_of_run_episodes(tmp_path: Path):
    pytest.importorskip("gym_pusht", reason="needs the extra pusht")
    spec = describe_environment("pusht", max_episode_steps=12)
    policy = checkpoint_policy(tmp_path / "policy", spec, mean=256.0, scale=80.0)
    found = assert_real(spec, policy, [5, 6, 7, 8, 9, 10], copies=3)
    assert found.actions is not None
    assert found.actions.shape == (6, 3, 5, 2)
    assert loss_mask(found)[2].tolist() == [[True, True, False, False, False]] * 3


def test_the_page_s_example_runs(tmp_path: Path):
    pytest.importorskip("metaworld", reason="needs the extra metaworld")
    write_flow_policy(tmp_path / "runs/pick/policy", {STATE: (39,)}, 4)
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    script = tmp_path / "fresh.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Chunks of 5 actions: 2 epochs of 30 steps, 4 of the copies each. An untrained policy never succeeds.
    said = "0 of 8 episodes succeeded, 1200 of 1200 actions ran, sum of rewards 0.0"
    assert done.stdout.splitlines() == [f"learner {number}: {said}" for number in (0, 1)]
