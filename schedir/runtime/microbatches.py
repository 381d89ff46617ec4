"""Cuts a batch into microbatches, and weighs each by its share of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError

Microbatch: TypeAlias = Any
"""One microbatch's tensors, in any structure, with constants among them."""

Batch: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any] | Iterable[Microbatch]
"""A whole batch, or a list or iterator of ready microbatches."""


def split(batch: Batch, microbatches: int, what: str) -> list[Microbatch]:
    """The microbatches of a whole batch, or of a list or iterator that holds them ready-made.

    A tensor, or a tuple or dict of tensors, is a whole batch: `torch.tensor_split` cuts each of
    its tensors along dim 0. What is no tensor goes to every microbatch. Raises ExecutionError
    where the numbers don't fit; `what` names the argument.
    """
    if isinstance(batch, Tensor) and batch.dim() and len(batch) >= microbatches:
        return list(torch.tensor_split(batch, microbatches))
    if isinstance(batch, (Tensor, tuple, Mapping)):
        leaves, spec = pytree.tree_flatten(batch)
        rows = {_rows(leaf, what) for leaf in leaves if isinstance(leaf, Tensor)}
        if len(rows) > 1:
            raise ExecutionError(f"{what}: the tensors differ in dim 0: {sorted(rows)}")
        if rows and min(rows) < microbatches:
            raise ExecutionError(
                f"{what}: {min(rows)} rows can't be split into {microbatches} microbatches"
            )
        if not leaves:
            return [batch] * microbatches
        pieces = [
            torch.tensor_split(leaf, microbatches)
            if isinstance(leaf, Tensor)
            else (leaf,) * microbatches
            for leaf in leaves
        ]
        return [pytree.tree_unflatten(piece, spec) for piece in zip(*pieces, strict=True)]
    if not isinstance(batch, Iterable) or hasattr(batch, "__array__"):
        raise ExecutionError(
            f"{what}: expected a tensor, a tuple or dict of tensors, or a list of {microbatches} "
            f"microbatches, not {type(batch).__name__}"
        )
    ready = list(islice(batch, microbatches + 1))
    if len(ready) != microbatches:
        count = f"{len(ready)}" if len(ready) < microbatches else f"more than {microbatches}"
        raise ExecutionError(
            f"{what}: {count} microbatches given, but the schedule has {microbatches}"
        )
    return ready


def rows(target: Microbatch) -> int:
    """The number of samples in a microbatch: dim 0 of the target's first tensor."""
    for leaf in (target,) if isinstance(target, Tensor) else pytree.tree_leaves(target):
        if isinstance(leaf, Tensor):
            return leaf.shape[0] if leaf.dim() else 1
    raise ExecutionError("target: a microbatch holds no tensor, so its samples can't be counted")


def samples(count: Callable[[Any], float | Tensor], target: Microbatch) -> float:
    """How many samples a microbatch's mean loss is over, as `count` says."""
    found = float(count(target))
    if not 0 <= found < math.inf:
        raise ExecutionError(f"count says {found:g} of a microbatch; it must be 0 or more")
    return found


def weights(
    counts: Sequence[float], groups: Sequence[Sequence[int]], totals: Sequence[float]
) -> list[float]:
    """Each microbatch's share of the `totals` samples of its group, those of one OPTIM_STEP."""
    shares = [0.0] * len(counts)
    for group, total in zip(groups, totals, strict=True):
        if not total:
            raise ExecutionError(f"target: microbatches {list(group)} hold no samples at all")
        for m in group:
            shares[m] = counts[m] / total
    return shares


def _rows(leaf: Tensor, what: str) -> int:
    if not leaf.dim():
        raise ExecutionError(
            f"{what}: a batch is split along dim 0, but one of its tensors has no dimensions"
        )
    return leaf.shape[0]
