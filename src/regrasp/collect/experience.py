"""Fresh experience for a learner: a policy runs in copies of an environment, and what happened becomes a rollout.

An epoch is one episode in each of B copies. Every epoch has as many steps as the longest episode there can be,
ceil(max_episode_steps / C) chunks of C actions, and E epochs are T steps. So rollouts of one task and one chunk length
fit beside each other, whoever collected them. Steps after an episode's end are filled, and ``loss_mask`` tells them
from what happened.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from math import ceil

import numpy as np
import torch

from regrasp.collect.chunk_step import ChunkStepResult
from regrasp.collect.env_output import EnvOutput
from regrasp.collect.environment import Environment, EnvironmentSpec, Observation, empty_result
from regrasp.collect.rollout import Chunk, RolloutPolicy, run_chunks
from regrasp.collect.rollout_result import RolloutResult
from regrasp.collect.trajectory import Trajectory
from regrasp.collect.tree import RolloutError
from regrasp.core.errors import ConfigError


def gather(environment: Environment, policy: RolloutPolicy, seeds: Sequence[int], *, version: int = 0) -> RolloutResult:
    """Run one episode for each seed, as ``run_episodes`` does, and return what a learner needs of them.

    Every step has ``actions`` float32 [B, C, D], ``rewards`` float32 [B, C], ``versions`` int64 [B, 1], and the
    observations before and after the chunk by key (vectors float32 [B, S], cameras uint8 [B, H, W, 3]). ``dones``,
    ``terminations`` (success) and ``truncations`` (ended without it), bool [B, C], have one row more for each epoch,
    all False, before its first step.

    The three flags say what holds after an action, and stay True once they are: an action ran where ``dones`` is False
    just before it. Other actions, in the middle of a chunk too, have reward 0. A chunk that begins after the end has
    actions of zeros and the episode's last observation, before and after it.

    Args:
        environment: B copies.
        policy: what acts, in chunks of one length.
        seeds: of the episodes: B for each epoch, one epoch after the other.
        version: of the policy's weights.

    Returns:
        The rollout of ``len(seeds) / B`` epochs. Nothing in it shares memory with the environment or the policy.

    Raises:
        ConfigError: the seeds do not fill whole epochs, or the policy's actions do not fit the environment.
        RolloutError: the policy gave chunks of several lengths.
    """
    copies = environment.copies
    if not seeds or len(seeds) % copies:
        raise ConfigError(
            f"Each epoch runs one episode in each of the environment's {copies} copies, so that the number of seeds "
            f"must be a multiple of {copies}; found {len(seeds)}. Give more or fewer seeds, or start another number "
            "of copies."
        )
    rollout = RolloutResult(max_episode_length=environment.spec.max_episode_steps)
    for start in range(0, len(seeds), copies):
        _append_epoch(rollout, environment, policy, seeds[start : start + copies], version)
    return rollout


def run_epoch(environment: Environment, policy: RolloutPolicy, seeds: Sequence[int]) -> Iterator[Chunk]:
    """Run one episode for each seed and yield ceil(max_episode_steps / C) chunks of C actions.

    The chunks in which an episode ran come first (see ``run_chunks``), then ones in which nothing did.

    Args:
        environment: B copies.
        policy: what acts, in chunks of one length C.
        seeds: B of them.
    """
    rows, last = 0, None
    for last in run_chunks(environment, policy, seeds):
        rows += 1
        yield last
    assert last is not None, "an epoch has episodes, and an episode has a step"
    copies, size, _ = last.actions.shape
    nothing = empty_result(environment.spec, copies, size)
    idle = Chunk(before=last.after, actions=np.zeros_like(last.actions), result=nothing, after=last.after)
    yield from repeat(idle, ceil(environment.spec.max_episode_steps / size) - rows)


def first_output(spec: EnvironmentSpec, observations: Observation, actions: int) -> EnvOutput:
    """Return what copies of an environment show after their reset, with no flag set.

    Args:
        spec: of the environment; its task is in ``obs["task_descriptions"]``.
        observations: [B, ...].
        actions: C, the length of the chunks that will follow.
    """
    copies = len(next(iter(observations.values())))
    dones, terminations, truncations = torch.zeros((3, copies, actions), dtype=torch.bool)
    obs = _shown(spec, observations)
    return EnvOutput(obs=obs, dones=dones, terminations=terminations, truncations=truncations)


def next_output(spec: EnvironmentSpec, before: EnvOutput, chunk: Chunk) -> EnvOutput:
    """Return what one chunk of actions gave, in a group without idle copies.

    Args:
        spec: of the environment.
        before: the output before this chunk, whose flags stay set.
        chunk: of B episodes and C actions.

    Returns:
        The output, with flags and rewards [B, C]. Within an epoch no reset follows, so an episode that ended
        goes on showing its last observation, in ``obs`` as in ``final_obs``.
    """
    terminations = _held(before.terminations, chunk.result.success)
    truncations = _held(before.truncations, chunk.result.truncated)
    obs = _shown(spec, chunk.after)
    return EnvOutput(
        obs=obs,
        final_obs=obs if chunk.result.ended.any() else None,
        dones=terminations | truncations,
        terminations=terminations,
        truncations=truncations,
        rewards=torch.tensor(chunk.result.rewards),
    )


def loss_mask(trajectory: Trajectory) -> torch.Tensor:
    """Return which actions ran, bool [T, B, C]: a learner's loss and advantages must leave out all others.

    An action ran where no action before it in its epoch ended the episode. ``loss_mask(trajectory).any(dim=-1)`` are
    the chunks [T, B] that began while the episode ran.

    Args:
        trajectory: with ``actions`` and ``dones`` [T + E, B, C], of E epochs with one episode in each environment:
            that of ``gather``, parts of it by ``split``, or ``Trajectory(**batch)`` of parts that were joined.
            ``dones`` may also be True at an episode's end only.

    Raises:
        RolloutError: there are no actions or dones, or not one row of dones more per epoch.
    """
    actions, dones = trajectory.actions, trajectory.dones
    if actions is None or dones is None or dones.ndim != 3:
        found = "no actions" if actions is None else f"dones {None if dones is None else list(dones.shape)}"
        raise RolloutError(f"Which actions ran is read from 'actions' and from 'dones' [T + E, B, C]; found {found}.")
    steps, epochs = len(actions), len(dones) - len(actions)
    if epochs < 1 or steps % epochs:
        raise RolloutError(
            f"Which actions ran is read from 'dones' with one row more than the steps for each epoch of equal length; "
            f"found {steps} steps and {len(dones)} rows of dones.  Mend: use a whole trajectory, or a split of one."
        )
    _, copies, size = dones.shape
    in_order = dones.bool().reshape(epochs, -1, copies, size).transpose(1, 2).flatten(start_dim=2)
    over = in_order.cumsum(dim=2)[:, :, size - 1 : -1] > 0
    return ~over.reshape(epochs, copies, -1, size).transpose(1, 2).reshape(steps, copies, size)


def _append_epoch(
    rollout: RolloutResult, environment: Environment, policy: RolloutPolicy, seeds: Sequence[int], version: int
) -> None:
    versions = torch.full((len(seeds), 1), version, dtype=torch.int64)
    before: EnvOutput | None = None
    for chunk in run_epoch(environment, policy, seeds):
        size = chunk.actions.shape[1]
        if rollout.actions and rollout.actions[0].shape[1] != size:
            raise RolloutError(
                f"A rollout has chunks of one length; the policy gave {rollout.actions[0].shape[1]} actions, and then "
                f"{size}.  Mend: have it carry out a fixed number of actions before it looks again."
            )
        if before is None:
            before = first_output(environment.spec, chunk.before, size)
            rollout.append_step_result(_step_result(before))
        after = next_output(environment.spec, before, chunk)
        over = _flags(before.dones)[:, -1].numpy()
        actions = np.where(over[:, None, None], np.float32(0.0), chunk.actions)
        rollout.append_step_result(_step_result(after, torch.from_numpy(actions), versions))
        rollout.append_transitions(before.obs, after.obs)
        before = after


def _step_result(
    output: EnvOutput, actions: torch.Tensor | None = None, versions: torch.Tensor | None = None
) -> ChunkStepResult:
    return ChunkStepResult(
        actions=actions,
        rewards=output.rewards,
        dones=output.dones,
        terminations=output.terminations,
        truncations=output.truncations,
        versions=versions,
    )


def _shown(spec: EnvironmentSpec, observations: Observation) -> dict[str, object]:
    copies = len(next(iter(observations.values())))
    tensors = {key: torch.from_numpy(value) for key, value in observations.items()}
    return {**tensors, "task_descriptions": [spec.task] * copies}


def _held(before: torch.Tensor | None, now: np.ndarray) -> torch.Tensor:
    """Return flags [B, C] that stay set once they are, from those of the chunk before and the events ``now``."""
    return _flags(before)[:, -1:] | (torch.tensor(now).cumsum(dim=1) > 0)


def _flags(flags: torch.Tensor | None) -> torch.Tensor:
    assert flags is not None, "an output of this module has all its flags"
    return flags
