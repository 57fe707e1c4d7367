"""Rollouts in which every number says where it belongs, and comparison of nested data."""

import copy
from typing import Any

import numpy as np
import torch

from regrasp.collect.chunk_step import ChunkStepResult
from regrasp.collect.rollout_result import RolloutResult


def numbered(steps: int, batch: int, *shape: int, field: int):
    """float64 [steps, batch, *shape]; no two entries of any fields are equal: field.step batch position."""
    size = int(np.prod(shape)) if shape else 1
    t = torch.arange(steps, dtype=torch.float64).reshape(-1, 1, 1) * 10_000
    b = torch.arange(batch, dtype=torch.float64).reshape(1, -1, 1) * 100
    position = torch.arange(size, dtype=torch.float64).reshape(1, 1, -1)
    return (field * 1_000_000 + t + b + position).reshape(steps, batch, *shape)


def whole_fields(steps: int, batch: int, epochs: int = 0):
    """What a rollout of RolloutResult.append_* over these must give: every field [T or T + E, B, …]."""
    rows = steps + epochs
    return {
        "actions": numbered(steps, batch, 6, field=1),
        "rewards": numbered(steps, batch, 3, field=2),
        "dones": numbered(rows, batch, 3, field=3),
        "terminations": numbered(rows, batch, 3, field=4),
        "truncations": numbered(rows, batch, 3, field=5),
        "prev_logprobs": numbered(steps, batch, 3, 2, field=6),
        "prev_values": numbered(rows, batch, 1, field=7),
        "versions": numbered(steps, batch, 1, field=8),
        "forward_inputs": {
            "action": numbered(steps, batch, 6, field=1),
            "chain": {"noise": numbered(steps, batch, 2, field=9)},
        },
        "curr_obs": nested(steps, batch, 10),
        "next_obs": nested(steps, batch, 20),
    }


def nested(steps: int, batch: int, field: int):
    return {
        "states": numbered(steps, batch, 4, field=field),
        "images": {
            "wrist": [numbered(steps, batch, 2, 2, field=field + 1)],
            "front": numbered(steps, batch, field=field + 2),
        },
    }


def rows_of(tree: Any, index: Any):
    """The tree with every tensor indexed."""
    if isinstance(tree, dict):
        return {key: rows_of(value, index) for key, value in tree.items()}
    if isinstance(tree, list):
        return [rows_of(value, index) for value in tree]
    return tree[index]


def rollout(steps: int, batch: int, epochs: int = 0):
    """A RolloutResult filled step by step from ``whole_fields``, with its closing rows at the end."""
    whole = whole_fields(steps, batch, epochs)
    result = RolloutResult(max_episode_length=77)
    names = [name for name in whole if name not in ("curr_obs", "next_obs")]
    for t in range(steps):
        result.append_step_result(ChunkStepResult(**{name: rows_of(whole[name], t) for name in names}))
        result.append_transitions(rows_of(whole["curr_obs"], t), rows_of(whole["next_obs"], t))
    for t in range(steps, steps + epochs):
        extra = ("dones", "terminations", "truncations", "prev_values")
        result.append_step_result(ChunkStepResult(**{name: whole[name][t] for name in extra}))
    return result


def assert_same(found: Any, expected: Any, path: str = ""):
    """Fail unless both trees have the same structure, dtypes, shapes and values."""
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}[{i}]")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, path
        assert found.shape == expected.shape, path
        assert torch.equal(found, expected), path
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected, err_msg=path, strict=True)
    else:
        assert found == expected, path


class Unchanged:
    """Within it, the values must stay what they are: a deep copy is compared at the end."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __enter__(self) -> "Unchanged":
        self.before = copy.deepcopy(self.values)
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            assert_same(self.values, self.before)
