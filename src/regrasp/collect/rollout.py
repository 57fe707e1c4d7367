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


class _Running:
    """The frames so far of one episode."""

    def __init__(self, seed: int, first: Observation) -> None:
        self.seed, self.now, self.ended, self.success = seed, first, False, False
        self._seen: list[Observation] = []
        self._actions: list[np.ndarray] = []
        self._rewards: list[np.ndarray] = []

    def add(self, actions: np.ndarray, result: ChunkResult, row: int) -> None:
        """Take over the steps that one chunk gave."""
        count = int(result.count[row])
        if count == 0:
            return
        after = {key: value[row, :count] for key, value in result.observations.items()}
        self._seen.append({key: np.concatenate((self.now[key][None], value[:-1])) for key, value in after.items()})
        self._actions.append(actions[row, :count])
        self._rewards.append(result.rewards[row, :count])
        self.now = {key: value[-1] for key, value in after.items()}
        self.ended = bool(result.ended[row])
        self.success = bool(result.success[row].any())

    def record(self, notes: dict[str, str]) -> EpisodeRecord:
        """Return the finished episode."""
        actions = np.concatenate(self._actions)
        return EpisodeRecord(
            seed=self.seed,
            observations={key: np.concatenate([part[key] for part in self._seen]) for key in self.now},
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
    idle = environment.copies - len(seeds)
    first = environment.reset([*seeds, *[None] * idle])
    policy.reset(seeds)
    running = [_Running(seed, {key: value[row] for key, value in first.items()}) for row, seed in enumerate(seeds)]
    while not all(episode.ended for episode in running):
        seen = {key: np.stack([episode.now[key] for episode in running]) for key in first}
        actions = _checked(policy.act(seen), environment, len(seeds))
        padded = np.concatenate((actions, np.zeros((idle, *actions.shape[1:]), np.float32)))
        result = environment.step(padded)
        for row, episode in enumerate(running):
            episode.add(padded, result, row)
    notes = policy.notes() if isinstance(policy, Annotating) else [{} for _ in seeds]
    return [episode.record(note) for episode, note in zip(running, notes, strict=True)]


def _checked(actions: np.ndarray, environment: Environment, episodes: int) -> np.ndarray:
    size = environment.spec.action_size
    if actions.ndim != 3 or actions.shape[0] != episodes or actions.shape[2] != size:
        raise ConfigError(
            f"{environment.spec.name} takes {size} numbers per action, [{episodes}, N, {size}] for this group; the "
            f"policy gave {list(actions.shape)}. Use a policy that was trained for this environment."
        )
    return actions.astype(np.float32, copy=False)
