"""Episodes of a policy in an environment, each named by its seed.

Episodes run in groups of as many as the environment has copies. A group starts together and ends when its last
episode does, so that what a policy is given never depends on what ran before: the same seeds give the same episodes,
also when a run is interrupted and only the groups that were not finished are run again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from regrasp.collect.environment import ChunkResult, Environment, Observation
from regrasp.core.errors import ConfigError


@runtime_checkable
class RolloutPolicy(Protocol):
    """What can act in an environment."""

    def reset(self, seeds: Sequence[int]) -> None:
        """A group of ``len(seeds)`` new episodes begins; all that is random must follow from their seeds."""
        ...

    def act(self, observations: Observation) -> np.ndarray:
        """Return the next N >= 1 actions of each episode of the group.

        Args:
            observations: of all B episodes. One that has ended is shown its last observation, and its actions are not
                used.

        Returns:
            float32 [B, N, A]. All N are carried out before the next call.
        """
        ...


@runtime_checkable
class Annotating(Protocol):
    """A policy that has something to record about each episode of the present group."""

    def notes(self) -> list[dict[str, str]]:
        """Short texts by name, one dictionary for each episode."""
        ...


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """One finished episode of T frames."""

    seed: int
    observations: Observation
    """What the policy saw before each action: [T, ...]."""
    actions: np.ndarray
    """float32 [T, A]."""
    rewards: np.ndarray
    """float32 [T], the environment's own reward for each action."""
    success: bool
    interventions: np.ndarray
    """bool [T]: a person drove this frame."""
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """T."""
        return len(self.actions)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of N actions in a group of B episodes."""

    before: Observation
    """What each episode showed before it, [B, ...]."""
    actions: np.ndarray
    """float32 [B, N, A]; episode b ran its first ``result.count[b]`` of them."""
    result: ChunkResult
    """What they gave; copies without an episode have rows of zeros at the end."""
    after: Observation
    """What each episode shows now, [B, ...]; one that has ended, its last observation."""


class _Running:
    """The frames so far of one episode."""

    def __init__(self, seed: int) -> None:
        self.seed, self.success = seed, False
        self._seen: list[Observation] = []
        self._actions: list[np.ndarray] = []
        self._rewards: list[np.ndarray] = []

    def add(self, chunk: Chunk, row: int) -> None:
        """Take over the steps that one chunk gave."""
        result, count = chunk.result, int(chunk.result.count[row])
        if count == 0:
            return
        after = {key: value[row, : count - 1] for key, value in result.observations.items()}
        self._seen.append({key: np.concatenate((chunk.before[key][row][None], value)) for key, value in after.items()})
        self._actions.append(chunk.actions[row, :count])
        self._rewards.append(result.rewards[row, :count])
        self.success = bool(result.success[row].any())

    def record(self, notes: dict[str, str]) -> EpisodeRecord:
        """Return the finished episode."""
        actions = np.concatenate(self._actions)
        return EpisodeRecord(
            seed=self.seed,
            observations={key: np.concatenate([part[key] for part in self._seen]) for key in self._seen[0]},
            actions=actions,
            rewards=np.concatenate(self._rewards),
            success=self.success,
            interventions=np.zeros(len(actions), bool),
            notes=notes,
        )


def run_episodes(environment: Environment, policy: RolloutPolicy, seeds: Sequence[int]) -> Iterator[EpisodeRecord]:
    """Run one episode for each seed and yield them group by group, in the order of ``seeds``.

    Args:
        environment: B copies; the group size.
        policy: what acts.
        seeds: of the episodes. A seed fixes the initial state, and the policy's randomness where the policy keeps to
            its protocol.
    """
    for start in range(0, len(seeds), environment.copies):
        yield from run_group(environment, policy, seeds[start : start + environment.copies])


def run_group(environment: Environment, policy: RolloutPolicy, seeds: Sequence[int]) -> list[EpisodeRecord]:
    """Run at most B episodes together until the last one ends, and return them in the order of ``seeds``."""
    running = [_Running(seed) for seed in seeds]
    for chunk in run_chunks(environment, policy, seeds):
        for row, episode in enumerate(running):
            episode.add(chunk, row)
    notes = policy.notes() if isinstance(policy, Annotating) else [{} for _ in seeds]
    return [episode.record(note) for episode, note in zip(running, notes, strict=True)]


def run_chunks(environment: Environment, policy: RolloutPolicy, seeds: Sequence[int]) -> Iterator[Chunk]:
    """Run at most B episodes together, one for each seed, and yield every chunk until the last episode ends.

    Raises:
        ConfigError: the policy's actions do not fit the environment.
    """
    episodes, idle = len(seeds), environment.copies - len(seeds)
    first = environment.reset([*seeds, *[None] * idle])
    policy.reset(seeds)
    seen = {key: value[:episodes].copy() for key, value in first.items()}
    ended = np.zeros(episodes, bool)
    while not ended.all():
        actions = _checked(policy.act({key: value.copy() for key, value in seen.items()}), environment, episodes)
        padded = np.concatenate((actions, np.zeros((idle, *actions.shape[1:]), np.float32)))
        result = environment.step(padded)
        after = {
            key: _last(value[:episodes], result.count[:episodes], seen[key])
            for key, value in result.observations.items()
        }
        yield Chunk(before=seen, actions=padded[:episodes], result=result, after=after)
        seen, ended = after, ended | result.ended[:episodes]


def _last(after: np.ndarray, count: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return what episodes show [B, ...] after ``count`` [B] of the steps ``after`` [B, N, ...]."""
    last = before.copy()
    ran = np.flatnonzero(count)
    last[ran] = after[ran, count[ran] - 1]
    return last


def _checked(actions: np.ndarray, environment: Environment, episodes: int) -> np.ndarray:
    size = environment.spec.action_size
    if actions.ndim != 3 or actions.shape[0] != episodes or actions.shape[2] != size:
        raise ConfigError(
            f"{environment.spec.name} takes {size} numbers per action, [{episodes}, N, {size}] for this group; the "
            f"policy gave {list(actions.shape)}. Use a policy that was trained for this environment."
        )
    return actions.astype(np.float32, copy=False)
