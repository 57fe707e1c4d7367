"""A finished rollout: time first, batch second, on the CPU."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from regrasp.collect.tree import RolloutError, concatenated, join, leaves, map_tensors, on_cpu
from regrasp.core.errors import listing, nearest

STEP_FIELDS = (
    "actions",
    "intervene_flags",
    "rewards",
    "prev_logprobs",
    "versions",
    "forward_inputs",
    "curr_obs",
    "next_obs",
)
"""Fields with exactly one row per step."""

DONE_FIELDS = ("terminations", "truncations", "dones")
"""Fields that may have one row more per rollout epoch: the state before its first step, as its first row."""

DATA_FIELDS = (*STEP_FIELDS, *DONE_FIELDS, "prev_values")
"""All fields that hold tensors. ``prev_values`` may have one row more per epoch too: the value after its last step."""


@dataclass(eq=False)
class Trajectory:
    """T chunk steps of B environments, over E rollout epochs of equal length. Tensors are CPU and contiguous.

    A caller's dicts stay as they are. A field that was not collected is None (or an empty dict).

    Attributes:
        max_episode_length: the longest an episode may be, in environment steps.
        model_weights_id: which weights acted; derived from ``versions`` when not given, and then equal for
            rollouts by the same versions, whatever their T and B. Empty when neither is known.
        actions: [T, B, …].
        intervene_flags: bool [T, B, …], shaped like the actions; where a person acted.
        rewards: [T, B, …].
        terminations: bool [T, B, …] or [T + E, B, …]; each epoch's first row precedes its first step.
        truncations: as ``terminations``.
        dones: as ``terminations``.
        prev_logprobs: [T, B, …].
        prev_values: [T, B, …] or [T + E, B, …]; each epoch's last row is the value after its last step.
        versions: [T, B, …]; the version of the weights that chose each action.
        forward_inputs: tensors [T, B, …], in dicts and lists of any depth.
        curr_obs: observations before each step, likewise.
        next_obs: observations after each step, likewise.

    Raises:
        RolloutError: rows or batch sizes do not fit together; the fields are named.
    """

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: torch.Tensor | None = None
    intervene_flags: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    terminations: torch.Tensor | None = None
    truncations: torch.Tensor | None = None
    dones: torch.Tensor | None = None
    prev_logprobs: torch.Tensor | None = None
    prev_values: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    curr_obs: dict[str, Any] = field(default_factory=dict)
    next_obs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Bring the tensors to the CPU, check that they fit together and name the weights."""
        for name in DATA_FIELDS:
            setattr(self, name, on_cpu(getattr(self, name)))
        _check_rows(self)
        _ = self.batch_size
        if not self.model_weights_id and self.versions is not None:
            self.model_weights_id = weights_id(self.versions)

    @property
    def batch_size(self) -> int | None:
        """B, the number of environments; None if no field holds data."""
        sizes = {path: tensor.shape[1] for path, tensor in _tensors(self, DATA_FIELDS)}
        if len(set(sizes.values())) > 1:
            raise RolloutError(
                "The fields of a trajectory are [T, B, …] with one B; found B: "
                f"{listing(f'{path} {size}' for path, size in sizes.items())}."
            )
        return next(iter(sizes.values()), None)

    def split(self, n: int) -> "list[Trajectory]":
        """Return n trajectories that hold the environments in order, the first ones at most one more than the last.

        Args:
            n: from 1 to B.

        Raises:
            RolloutError: n is not in that range.
        """
        batch = self.batch_size or 0
        if not 1 <= n <= batch:
            raise RolloutError(
                f"A trajectory of {batch} environments splits into 1 to {batch} parts; {n} were asked for."
                "  Mend: use fewer learners, or collect with more environments."
            )
        smaller, larger = divmod(batch, n)
        starts = [part * smaller + min(part, larger) for part in range(n + 1)]
        return [self._environments(start, end) for start, end in pairwise(starts)]

    def extract_intervene_traj(self, mode: str = "any") -> "list[Trajectory] | None":
        """Return what a person did: for each environment with corrections, a trajectory of its corrected steps.

        Args:
            mode: ``"any"`` keeps the steps in which at least one intervene flag is true (part of the chunk was
                corrected), ``"all"`` those in which all are.

        Returns:
            For each environment that has such steps, in order, a trajectory [T_i, 1, …] of them. Extra rows stay:
            each epoch's first row of dones, terminations and truncations, and its last of prev_values. None if
            no environment has such steps, or there are no flags.

        Raises:
            RolloutError: the mode is unknown, or the epochs that the extra rows imply do not divide the steps.
        """
        if mode not in ("any", "all"):
            raise RolloutError(f"The mode is 'any' or 'all'; found {mode!r}.{nearest(mode, ('any', 'all'))}")
        if self.intervene_flags is None:
            return None
        flags = self.intervene_flags.bool().reshape(*self.intervene_flags.shape[:2], -1)
        kept = flags.any(dim=-1) if mode == "any" else flags.all(dim=-1)
        corrected = [env for env in range(kept.shape[1]) if bool(kept[:, env].any())]
        return [self._environments(env, env + 1)._steps(kept[:, env]) for env in corrected] or None

    def _environments(self, start: int, end: int) -> "Trajectory":
        """Return environments ``start`` up to ``end``, in their own memory."""
        return replace(
            self, **{name: map_tensors(lambda x: x[:, start:end].clone(), getattr(self, name)) for name in DATA_FIELDS}
        )

    def _steps(self, kept: torch.Tensor) -> "Trajectory":
        """Return the steps where ``kept`` (bool [T]) is true, with the extra rows of every epoch."""
        rows = {name: kept for name in STEP_FIELDS}
        for name in (*DONE_FIELDS, "prev_values"):
            tensor = getattr(self, name)
            extra = 0 if tensor is None else tensor.shape[0] - len(kept)
            rows[name] = _with_extra_rows(kept, extra, name)
        return replace(
            self,
            **{name: map_tensors(lambda x, rows=rows[name]: x[rows], getattr(self, name)) for name in DATA_FIELDS},
        )


def weights_id(versions: torch.Tensor) -> str:
    """Return an id for the set of versions in a tensor of any shape: a UUID that only they determine."""
    distinct = versions.detach().cpu().double().unique().tolist()
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "regrasp weights " + ",".join(map(repr, distinct))))


def convert_trajectories_to_batch(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the data of several trajectories side by side.

    Args:
        trajectories: of one length T and with the same fields; ``split`` gives such a list.

    Returns:
        The fields that hold data, by name: tensors [T, B_1 + B_2 + …, …] in the order given, and for
        ``forward_inputs``, ``curr_obs`` and ``next_obs`` nested dicts of these. Empty for an empty list.

    Raises:
        RolloutError: a field or key is missing in some trajectories only, or lengths or sizes differ.
    """
    batch: dict[str, Any] = {}
    for name in DATA_FIELDS if trajectories else ():
        values = [getattr(trajectory, name) for trajectory in trajectories]
        empty_is_none = [None if isinstance(value, dict) and not value else value for value in values]
        joined = join(empty_is_none, concatenated(1), name, part="trajectory")
        if joined is not None:
            batch[name] = joined
    return batch


def _tensors(trajectory: Trajectory, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name in names:
        for path, leaf in leaves(getattr(trajectory, name), name):
            if leaf is None:
                continue
            if not isinstance(leaf, torch.Tensor) or leaf.ndim < 2:
                shape = list(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise RolloutError(f"The fields of a trajectory are tensors [T, B, …]; {path!r} is {shape}.")
            found.append((path, leaf))
    return found


def _check_rows(trajectory: Trajectory) -> None:
    rows = {path: tensor.shape[0] for path, tensor in _tensors(trajectory, STEP_FIELDS)}
    more = {path: tensor.shape[0] for path, tensor in _tensors(trajectory, (*DONE_FIELDS, "prev_values"))}
    found = listing((f"{path} {count}" for path, count in (rows | more).items()), limit=16)
    if len(set(rows.values())) > 1:
        raise RolloutError(
            f"A trajectory has one row per step in {', '.join(STEP_FIELDS)}; found rows: {found}. A field that is "
            "None in some steps has too few.  Mend: give it in every step, or in none."
        )
    steps = next(iter(rows.values()), min(more.values(), default=0))
    epochs = {count - steps for count in more.values()} - {0}
    if len(epochs) > 1 or any(extra < 0 for extra in epochs):
        raise RolloutError(
            f"Of {steps} steps, {', '.join(DONE_FIELDS)} and prev_values have {steps} rows, or as many more as there "
            f"were rollout epochs; found rows: {found}.  Mend: give each in every step, or in none."
        )


def _with_extra_rows(kept: torch.Tensor, epochs: int, name: str) -> torch.Tensor:
    """Return which rows [T + E] of a field to keep for the steps [T] that are kept."""
    if epochs == 0:
        return kept
    if len(kept) % epochs:
        raise RolloutError(
            f"{name!r} has {epochs} rows more than the {len(kept)} steps, one per rollout epoch, but {len(kept)} "
            f"steps do not divide into {epochs} epochs of one length, so its rows cannot be told apart."
        )
    per_epoch = kept.reshape(epochs, -1)
    always = torch.ones((epochs, 1), dtype=torch.bool)
    parts = [per_epoch, always] if name == "prev_values" else [always, per_epoch]
    return torch.cat(parts, dim=1).flatten()
