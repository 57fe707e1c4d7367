"""What a batch of environments gave for one chunk of actions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from regrasp.collect.tree import RolloutError, concatenated, join, leaves, map_leaves, on_cpu
from regrasp.core.errors import listing, nearest

_INTERVENTION = ("intervene_actions", "intervene_flags")
_PER_ENVIRONMENT = ("dones", "terminations", "truncations", "rewards", *_INTERVENTION)


@dataclass(kw_only=True, eq=False)
class EnvOutput:
    """One chunk step of B environments. C is the number of actions in the chunk, D the size of one.

    Tensors, at any depth, are made CPU, contiguous and free of gradient history. The caller's dicts stay as they
    are; a tensor that needed nothing is shared, not copied.

    Attributes:
        obs: what the environments show now (after a reset, where one followed). Tensors and arrays [B, …], lists
            with one item per environment (task texts), dicts of these.
        final_obs: the same, with the last observation of the episodes that ended. None if none did.
        dones: bool [B] or [B, C].
        terminations: bool [B] or [B, C]; the task ended.
        truncations: bool [B] or [B, C]; the time ran out.
        rewards: [B] or [B, C].
        env_infos: whatever else the environments told.
        intervene_actions: [B, C·D]; what a person did in place of the policy.
        intervene_flags: bool [B] or [B, C]; where a person did.

    Raises:
        RolloutError: the fields have different numbers of environments.
    """

    obs: dict[str, Any]
    final_obs: dict[str, Any] | None = None
    dones: torch.Tensor | None = None
    terminations: torch.Tensor | None = None
    truncations: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    env_infos: Any = None
    intervene_actions: torch.Tensor | None = None
    intervene_flags: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Bring the tensors to the CPU and check that they are of one batch."""
        for field in fields(self):
            setattr(self, field.name, on_cpu(getattr(self, field.name)))
        rows = {name: _rows(getattr(self, name)) for name in _PER_ENVIRONMENT}
        given = {name: count for name, count in rows.items() if count is not None}
        if len(set(given.values())) > 1:
            found = listing(f"{name} {count}" for name, count in given.items())
            raise RolloutError(f"The fields of an EnvOutput have one row per environment; found rows: {found}.")

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, in new dicts and lists that share the tensors."""
        return {field.name: map_leaves(lambda leaf: leaf, getattr(self, field.name)) for field in fields(self)}

    @staticmethod
    def merge_env_outputs(env_outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one output of all environments from the outputs of several shards, in the order given.

        Tensors and arrays are concatenated along the batch, lists strung together, dicts merged key by key, and
        what is None in every shard stays None. Other values (texts, numbers) become a list with one item per shard.
        Where only some shards have a ``final_obs``, the ``obs`` of the others stands in, with the keys of the former.
        Where only some have ``intervene_actions`` or ``intervene_flags``, the others get zeros or False.

        Args:
            env_outputs: at least one dict as ``to_dict`` gives it; a field left out is None.

        Returns:
            The fields by name, as ``to_dict`` gives them.

        Raises:
            RolloutError: there is no shard, a shard has no ``obs`` or an unknown field, any other field or key
                is None or missing in some shards only, or shapes do not fit. The field is named.
        """
        if not env_outputs:
            raise RolloutError("There is nothing to merge: merge_env_outputs needs the output of at least one shard.")
        shards = [_read(shard, position) for position, shard in enumerate(env_outputs)]
        _stand_in_for_final_obs(shards)
        for name in _INTERVENTION:
            _fill_missing(shards, name)
        merged = {
            field.name: join(
                [getattr(shard, field.name) for shard in shards],
                _merged_leaf,
                field.name,
                part="shard",
                flatten_lists=True,
            )
            for field in fields(EnvOutput)
        }
        return EnvOutput(**merged).to_dict()


def _read(shard: Mapping[str, Any], position: int) -> EnvOutput:
    known = [field.name for field in fields(EnvOutput)]
    for name in shard:
        if name not in known:
            raise RolloutError(
                f"Shard {position} has a field {name!r}, which an EnvOutput has not.{nearest(name, known)}"
                f"  Known: {', '.join(known)}."
            )
    if shard.get("obs") is None:
        raise RolloutError(f"Shard {position} has no 'obs'; every shard must give its observations.")
    return EnvOutput(**shard)


def _stand_in_for_final_obs(shards: Sequence[EnvOutput]) -> None:
    given = next((shard.final_obs for shard in shards if shard.final_obs is not None), None)
    for shard in shards:
        if given is not None and shard.final_obs is None:
            shard.final_obs = {key: value for key, value in shard.obs.items() if key in given}


def _fill_missing(shards: Sequence[EnvOutput], name: str) -> None:
    like = next((getattr(shard, name) for shard in shards if getattr(shard, name) is not None), None)
    if like is None:
        return
    for position, shard in enumerate(shards):
        if getattr(shard, name) is None:
            rows = _batch_size(shard, position)
            setattr(shard, name, torch.zeros((rows, *like.shape[1:]), dtype=like.dtype))


def _batch_size(shard: EnvOutput, position: int) -> int:
    """Return B from the first field that shows it; lists count their items."""
    candidates = [getattr(shard, name) for name in _PER_ENVIRONMENT]
    unread = [*candidates, shard.obs]
    while unread:
        value = unread.pop(0)
        if isinstance(value, dict):
            unread.extend(value.values())
            continue
        rows = len(value) if isinstance(value, list | tuple) else _rows(value)
        if rows is not None:
            return rows
    paths = listing(path for path, _ in leaves(shard.obs, "obs")) or "an empty obs"
    raise RolloutError(
        f"The number of environments of shard {position} cannot be told from {paths}, and its intervention fields, "
        "which other shards have, must be filled.  Mend: give it dones or rewards."
    )


def _rows(value: object) -> int | None:
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0:
        return value.shape[0]
    return None


def _merged_leaf(values: Sequence[object], where: str) -> object:
    if any(_rows(value) is None for value in values):
        return list(values)
    if isinstance(values[0], torch.Tensor):
        return concatenated(0)(values, where)
    arrays = [np.asarray(value) for value in values]
    if len({array.shape[1:] for array in arrays}) > 1:
        shapes = listing(list(array.shape) for array in arrays)
        raise RolloutError(f"{where!r} must have the same shape in every shard except its rows; found {shapes}.")
    return np.concatenate(arrays)
