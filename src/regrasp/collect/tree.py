"""Nested data: dicts and lists of any depth with tensors at their leaves, mapped, walked and joined in one way.

Nothing here changes what it is given: dicts and lists are built anew.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch

from regrasp.core.errors import RegraspError, listing

type Combine = Callable[[Sequence[object], str], object]


class RolloutError(RegraspError, ValueError):
    """Rollout data whose fields, shapes, steps or shards do not fit together."""


def map_leaves[Tree](function: Callable[[object], object], tree: Tree) -> Tree:
    """Return a tree of the same dicts, lists and tuples with ``function`` applied to everything else."""
    if isinstance(tree, dict):
        result: object = {key: map_leaves(function, value) for key, value in tree.items()}
    elif isinstance(tree, list | tuple):
        items = [map_leaves(function, value) for value in tree]
        result = items if isinstance(tree, list) else tuple(items)
    else:
        result = function(tree)
    return cast("Tree", result)


def leaves(tree: object, where: str) -> Iterator[tuple[str, object]]:
    """Yield every leaf with its path, such as ``('obs.images[0]', tensor)`` for ``where='obs'``."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{where}.{key}")
    elif isinstance(tree, list | tuple):
        for position, value in enumerate(tree):
            yield from leaves(value, f"{where}[{position}]")
    else:
        yield where, tree


def map_tensors[Tree](function: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
    """Return a tree of the same structure with ``function`` applied to its tensors; other leaves stay as they are."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def on_cpu[Tree](tree: Tree) -> Tree:
    """Return the tree with its tensors on the CPU, contiguous and without gradient history.

    A tensor that is all of this already shares its memory with the result.
    """
    return map_tensors(lambda tensor: tensor.detach().cpu().contiguous(), tree)


def without_none[Tree](tree: Tree) -> Tree:
    """Return the tree without the dict keys whose value is None, at any depth."""
    if isinstance(tree, dict):
        return cast("Tree", {key: without_none(value) for key, value in tree.items() if value is not None})
    if isinstance(tree, list):
        return cast("Tree", [without_none(value) for value in tree])
    return tree


def recorded[Tree](tree: Tree, where: str) -> Tree:
    """Return a copy of the tree on the CPU, sharing no memory with it, with numeric arrays made tensors.

    Raises:
        RolloutError: a leaf is neither a tensor, a numeric array nor None; its path is named.
    """
    for path, leaf in leaves(tree, where):
        numeric = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"
        if not (leaf is None or numeric or isinstance(leaf, torch.Tensor)):
            raise RolloutError(
                f"A rollout holds tensors with one row per environment (in nested dicts and lists); {path!r} is "
                f"{type(leaf).__name__}: {leaf!r:.60}.  Mend: encode it as a tensor, or leave it out."
            )
    return map_leaves(_copy_of, tree)


def _copy_of(leaf: object) -> object:
    if isinstance(leaf, np.ndarray):
        return torch.from_numpy(np.array(leaf, order="C", copy=True))
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to("cpu", copy=True).contiguous()
    return leaf


def join[Tree](trees: Sequence[Tree], combine: Combine, where: str, *, part: str, flatten_lists: bool = False) -> Tree:
    """Return one tree made of several of the same structure.

    Args:
        trees: at least one. Dicts are joined key by key; None everywhere stays None.
        combine: makes one leaf of the leaves at a path, given them and the path.
        where: the name of the trees, for errors.
        part: what one tree is (``"shard"``, ``"step"``), for errors.
        flatten_lists: lists are strung together in order (a list has one item per environment); otherwise
            they are joined item by item.

    Raises:
        RolloutError: something is None, or missing, or of another kind in some of the trees; it is named.
    """
    absent = [position for position, tree in enumerate(trees) if tree is None]
    if len(absent) == len(trees):
        return trees[0]
    if absent:
        raise RolloutError(
            f"{where!r} must be given by every {part} or by none; it is None in {part} {listing(absent)} "
            f"of {len(trees)} (counted from 0).  Mend: give it there, or leave it out everywhere."
        )
    kinds = {_kind(tree) for tree in trees}
    if len(kinds) > 1:
        raise RolloutError(f"{where!r} must be of one kind in every {part}; found {listing(sorted(kinds))}.")
    if isinstance(trees[0], dict):
        dicts = cast("Sequence[dict[str, object]]", trees)
        _require_same_keys(dicts, where, part)
        joined: object = {
            key: join([tree[key] for tree in dicts], combine, f"{where}.{key}", part=part, flatten_lists=flatten_lists)
            for key in dicts[0]
        }
    elif isinstance(trees[0], list | tuple):
        lists = cast("Sequence[Sequence[object]]", trees)
        joined = [item for one in lists for item in one] if flatten_lists else _join_items(lists, combine, where, part)
    else:
        joined = combine(trees, where)
    return cast("Tree", joined)


def _kind(tree: object) -> str:
    for kind in (dict, list, tuple, torch.Tensor, np.ndarray):
        if isinstance(tree, kind):
            return "list" if kind is tuple else kind.__name__
    return "value"


def _require_same_keys(dicts: Sequence[dict[str, object]], where: str, part: str) -> None:
    every = {key: None for one in dicts for key in one}
    for key in every:
        lacking = [position for position, one in enumerate(dicts) if key not in one]
        if lacking:
            raise RolloutError(
                f"{f'{where}.{key}'!r} must be given by every {part} or by none; it is missing in {part} "
                f"{listing(lacking)} of {len(dicts)} (counted from 0).  Mend: give it there, or nowhere."
            )


def _join_items(lists: Sequence[Sequence[object]], combine: Combine, where: str, part: str) -> list[object]:
    lengths = sorted({len(one) for one in lists})
    if len(lengths) > 1:
        raise RolloutError(f"The list {where!r} must be as long in every {part}; found lengths {listing(lengths)}.")
    return [join([one[i] for one in lists], combine, f"{where}[{i}]", part=part) for i in range(lengths[0])]


def stacked(values: Sequence[object], where: str) -> torch.Tensor:
    """Return tensors of one shape [B, …] stacked to [T, B, …]. Raises RolloutError where shapes differ."""
    tensors = _tensors(values, where)
    for step, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            raise RolloutError(
                f"{where!r} must have one shape in every step; it is {list(tensors[0].shape)} in step 0 and "
                f"{list(tensor.shape)} in step {step}.  Mend: keep the number of environments and the sizes fixed "
                "within one rollout."
            )
    return torch.stack(tensors)


def concatenated(dim: int) -> Combine:
    """Return a rule for ``join`` that concatenates tensors along ``dim``; other dimensions must agree."""

    def combine(values: Sequence[object], where: str) -> torch.Tensor:
        tensors = _tensors(values, where)
        shapes = [list(tensor.shape) for tensor in tensors]
        if len({len(shape) > dim and tuple(shape[:dim] + shape[dim + 1 :]) for shape in shapes}) > 1:
            raise RolloutError(
                f"{where!r} must have the same shape in every part except along dimension {dim}, the batch; "
                f"found {listing(shapes)}."
            )
        return torch.cat(tensors, dim=dim)

    return combine


def _tensors(values: Sequence[object], where: str) -> list[torch.Tensor]:
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise RolloutError(f"{where!r} must be a tensor; found {type(value).__name__}: {value!r:.60}.")
    return cast("list[torch.Tensor]", list(values))
