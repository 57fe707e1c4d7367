"""A rollout under way: steps and transitions are appended, and it becomes trajectories."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from regrasp.collect.chunk_step import ChunkStepResult
from regrasp.collect.trajectory import DATA_FIELDS, Trajectory
from regrasp.collect.tree import RolloutError, join, recorded, stacked, without_none

_TEXT = "task_descriptions"
_WANTED = "model_action"
_OF_A_STEP = tuple(name for name in DATA_FIELDS if name not in ("intervene_flags", "curr_obs", "next_obs"))


@dataclass(kw_only=True, eq=False)
class RolloutResult:
    """Collects the steps of B environments, then gives them as [T, B, …].

    What is appended is copied, so an environment may use its buffers again and nothing here ever writes to a
    caller's data. Numeric arrays become tensors.

    Each list has one item per step, and is empty for a field that is not collected. ``dones``, ``terminations``,
    ``truncations`` and ``prev_values`` may have one item more per rollout epoch (see ``Trajectory``): append a
    ``ChunkStepResult`` without actions to close an epoch.

    Attributes:
        max_episode_length: the longest an episode may be, in environment steps.
        actions: each [B, C·D] or [B, C, D]: chunks of C actions of size D.
        intervene_flags: each bool and shaped like the actions; where a person acted.
        rewards: each [B] or [B, C].
        terminations: each bool [B] or [B, C].
        truncations: each bool [B] or [B, C].
        dones: each bool [B] or [B, C].
        prev_logprobs: each [B, …].
        prev_values: each [B, 1].
        versions: each [B, …]; the version of the weights that acted.
        forward_inputs: tensors [B, …] in dicts and lists of any depth.
        curr_obs: likewise; before the step.
        next_obs: likewise; after the step.
    """

    max_episode_length: int = 0
    actions: list[torch.Tensor] = field(default_factory=list)
    intervene_flags: list[torch.Tensor] = field(default_factory=list)
    rewards: list[torch.Tensor] = field(default_factory=list)
    terminations: list[torch.Tensor] = field(default_factory=list)
    truncations: list[torch.Tensor] = field(default_factory=list)
    dones: list[torch.Tensor] = field(default_factory=list)
    prev_logprobs: list[torch.Tensor] = field(default_factory=list)
    prev_values: list[torch.Tensor] = field(default_factory=list)
    versions: list[torch.Tensor] = field(default_factory=list)
    forward_inputs: list[dict[str, Any]] = field(default_factory=list)
    curr_obs: list[dict[str, Any]] = field(default_factory=list)
    next_obs: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Copy the lists that were given; actions without flags were the policy's own."""
        for name in DATA_FIELDS:
            setattr(self, name, recorded(list(getattr(self, name)), name))
        if not self.intervene_flags:
            self.intervene_flags = [torch.zeros_like(actions, dtype=torch.bool) for actions in self.actions]

    def append_step_result(self, result: ChunkStepResult) -> None:
        """Append the fields of a step that are not None. Actions come with intervene flags that are all False.

        Raises:
            RolloutError: something in ``forward_inputs`` is not a tensor or a numeric array; nothing is appended.
        """
        step = {name: recorded(getattr(result, name), name) for name in _OF_A_STEP}
        for name, value in step.items():
            if value is not None and not (name == "forward_inputs" and not value):
                getattr(self, name).append(value)
        if step["actions"] is not None:
            self.intervene_flags.append(torch.zeros_like(step["actions"], dtype=torch.bool))

    def append_transitions(self, curr_obs: Mapping[str, Any] | None, next_obs: Mapping[str, Any] | None) -> None:
        """Append the observations before and after a step, without their ``task_descriptions``, which are text.

        Raises:
            RolloutError: one is None, or holds something that is neither a tensor nor a numeric array.
        """
        if curr_obs is None or next_obs is None:
            raise RolloutError("A transition has the observations before and after a step; one of them is None.")
        before = recorded({key: value for key, value in curr_obs.items() if key != _TEXT}, "curr_obs")
        after = recorded({key: value for key, value in next_obs.items() if key != _TEXT}, "next_obs")
        self.curr_obs.append(before)
        self.next_obs.append(after)

    def update_last_actions(self, intervene_actions: torch.Tensor, intervene_flags: torch.Tensor) -> None:
        """Record that a person acted in the last step: a·f + old·(1 − f), with the flags f kept beside the actions.

        ``forward_inputs["action"]`` of that step, where present, becomes the same actions, and its
        ``"model_action"`` is dropped. A second call for the same step adds its corrections to the first's.

        Args:
            intervene_actions: a; as many numbers per environment as the last actions have.
            intervene_flags: f; bool [B], [B, C] for chunks of C actions, or one per number.

        Raises:
            RolloutError: no actions were appended yet, or shapes do not fit.
        """
        if not self.actions:
            raise RolloutError("Corrections belong to the last step, but no step with actions was appended yet.")
        old = self.actions[-1]
        given = recorded(intervene_actions, "intervene_actions")
        flags = _flag_per_number(recorded(intervene_flags, "intervene_flags"), old)
        if given.shape[:1] != old.shape[:1] or given.numel() != old.numel():
            raise RolloutError(
                f"'intervene_actions' must hold as many numbers per environment as the last actions, "
                f"{list(old.shape)}; found {list(given.shape)}."
            )
        actions = torch.where(flags, given.reshape(old.shape).to(old.dtype), old)
        if len(self.forward_inputs) == len(self.actions):
            self.forward_inputs[-1] = _corrected_inputs(self.forward_inputs[-1], actions)
        self.actions[-1] = actions
        self.intervene_flags[-1] = self.intervene_flags[-1] | flags

    def to_trajectory(self) -> Trajectory:
        """Return the whole rollout as tensors [T, B, …].

        Keys of observations and forward inputs that are None in every step are left out, as is ``"model_action"``
        once a correction dropped it from some step.

        Raises:
            RolloutError: a field or key was given in some steps only, or its shape changed; it is named.
        """
        data = {
            name: without_none(join(steps, stacked, name, part="step"))
            for name, steps in ((name, self._steps(name)) for name in DATA_FIELDS)
            if steps
        }
        return Trajectory(max_episode_length=self.max_episode_length, **data)

    def to_split_trajectories(self, n: int) -> list[Trajectory]:
        """Return n trajectories that hold the environments in order; sizes differ by at most one.

        All carry the id of the whole rollout's weights.

        Args:
            n: from 1 to B, such as the number of learners.

        Raises:
            RolloutError: n is not in that range, or the rollout cannot become a trajectory.
        """
        return self.to_trajectory().split(n)

    to_splited_trajectories = to_split_trajectories

    def _steps(self, name: str) -> list[Any]:
        steps = getattr(self, name)
        if name == "forward_inputs" and any(_WANTED not in step for step in steps):
            return [{key: value for key, value in step.items() if key != _WANTED} for step in steps]
        return steps


EmbodiedRolloutResult = RolloutResult


def _flag_per_number(flags: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Return flags [B], [B, C] or [B, C·D] as bool of the shape of ``actions``."""
    rows = actions.shape[0]
    numbers = actions[0].numel() if rows else 0
    groups = flags[0].numel() if flags.ndim and flags.shape[0] else 0
    if flags.shape[:1] != actions.shape[:1] or not groups or numbers % groups:
        raise RolloutError(
            f"'intervene_flags' must be one flag per environment, per action of the chunk or per number of the last "
            f"actions, {list(actions.shape)}; found {list(flags.shape)}."
        )
    per_group = flags.bool().reshape(rows, groups, 1)
    return per_group.expand(rows, groups, numbers // groups).reshape(actions.shape)


def _corrected_inputs(inputs: Mapping[str, Any], actions: torch.Tensor) -> dict[str, Any]:
    corrected = {key: value for key, value in inputs.items() if key != _WANTED}
    recorded_action = corrected.get("action")
    if recorded_action is not None:
        if recorded_action.numel() != actions.numel():
            raise RolloutError(
                f"forward_inputs['action'] must hold the numbers of the actions, {list(actions.shape)}, to be "
                f"corrected with them; it is {list(recorded_action.shape)}."
            )
        corrected["action"] = actions.reshape(recorded_action.shape).to(recorded_action.dtype)
    return corrected
