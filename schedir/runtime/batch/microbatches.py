"""Cuts a batch into microbatches, and weights each by its share of its OPTIM_STEP's samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from itertools import islice
from numbers import Number
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.chunk_specs import Dim, Whole

Microbatch: TypeAlias = Any
"""One microbatch's tensors, in any structure, with constants among them."""

Batch: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any] | Iterable[Microbatch]
"""A whole batch, or a list or iterator of ready microbatches."""


Count: TypeAlias = float | Tensor
"""A number of samples; a scalar tensor on the device if the host does not know it."""


@attrs.frozen(eq=False)
class Pieces:
    """The microbatches of one argument of a call.

    `rows` are those of the whole batch that was cut; None if nothing was cut, or if the
    microbatches came `ready`. If the batch has fewer rows than microbatches, copies of the last
    piece stand in for the missing ones.
    """

    microbatches: list[Microbatch]
    rows: int | None = None
    ready: bool = False


def is_whole(batch: object) -> bool:
    """Whether it is a batch to be cut, and not ready microbatches."""
    return isinstance(batch, (Tensor, tuple, Mapping))


def cut(
    batch: Batch,
    microbatches: int,
    what: str,
    dims_of: Callable[[Whole], Sequence[Dim]],
    *,
    may_be_short: bool = False,
) -> Pieces:
    """The microbatches of a whole batch, or of a list or iterator of ready microbatches.

    A tensor, or a tuple or mapping of tensors, is a whole batch: `torch.tensor_split` cuts its
    tensors along the dims of `dims_of`. The rest goes to every microbatch. From an iterator exactly
    as many are taken as the schedule has. Only with `may_be_short` a batch may have fewer rows than
    that. Raises ExecutionError if the numbers don't fit, and for an unknown container; `what` names
    the argument.
    """
    if is_whole(batch):
        return _cut_whole(batch, microbatches, what, dims_of, may_be_short)
    unordered = isinstance(batch, (str, bytes, AbstractSet)) or hasattr(batch, "__array__")
    if unordered or not isinstance(batch, Iterable):
        raise ExecutionError(
            f"{what}: expected a tensor, a tuple or mapping of tensors, or a list of "
            f"{microbatches} microbatches, not {type(batch).__name__}"
        )
    endless = isinstance(batch, Iterator)
    ready = list(islice(batch, microbatches if endless else microbatches + 1))
    if len(ready) < microbatches:
        raise ExecutionError(
            f"{what}: {len(ready)} microbatches given, but the schedule has {microbatches}"
        )
    if len(ready) > microbatches:
        raise ExecutionError(
            f"{what}: more than {microbatches} microbatches given, which the schedule has; to take "
            "the next ones at each call, pass an iterator: iter(...), made once"
        )
    return Pieces([_normalised(piece, what) for piece in ready], ready=True)


def _cut_whole(
    batch: Batch,
    microbatches: int,
    what: str,
    dims_of: Callable[[Whole], Sequence[Dim]],
    may_be_short: bool,
) -> Pieces:
    leaves: list[Any] = [batch]
    spec = None
    if not isinstance(batch, Tensor):
        batch = _normalised(batch, what)
        leaves, spec = pytree.tree_flatten(batch)
    dims = dims_of(Whole(what, batch, leaves, spec))
    along = [*zip(leaves, dims, strict=True)]
    rows = {_rows_of_whole(leaf, d, what) for leaf, d in along if d is not None}
    if len(rows) > 1:
        listed = ", ".join(f"{list(t.shape)} in dim {d}" for t, d in along if d is not None)
        raise ExecutionError(
            f"{what}: the tensors that are cut differ in their rows: {listed}; a tensor with other "
            "rows needs its own chunk spec (args_chunk_spec=, kwargs_chunk_spec=)"
        )
    if not rows:
        return Pieces([batch] * microbatches)
    (number,) = rows
    parts = min(number, microbatches)
    if not parts or (parts < microbatches and not may_be_short):
        raise ExecutionError(
            f"{what}: {number} rows can't be split into {microbatches} microbatches; leave a "
            "shorter last batch out (DataLoader(…, drop_last=True))"
        )
    columns = [
        (leaf,) * parts if d is None else torch.tensor_split(leaf, parts, d) for leaf, d in along
    ]
    if spec is None:
        found = list(columns[0])
    else:
        found = [pytree.tree_unflatten(piece, spec) for piece in zip(*columns, strict=True)]
    return Pieces(found + found[-1:] * (microbatches - parts), number)


def _rows_of_whole(leaf: Tensor, dim: int, what: str) -> int:
    if leaf.layout is not torch.strided or leaf.is_nested:
        layout = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
        raise ExecutionError(
            f"{what}: a {layout} tensor can't be split along dim {dim}; pass a list of microbatches"
        )
    if not -leaf.dim() <= dim < leaf.dim():
        raise ExecutionError(
            f"{what}: it is split along dim {dim}, but one of its tensors has the shape "
            f"{list(leaf.shape)}; pass a chunk spec (args_chunk_spec=, kwargs_chunk_spec=), or a "
            "list of microbatches"
        )
    return leaf.shape[dim]


def _normalised(batch: Any, what: str) -> Any:
    """The batch, with a dict for every mapping that torch's pytree does not know.

    Raises ExecutionError for another container that pytree does not know: its tensors would go
    whole to every microbatch.
    """

    def normalised(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return {key: _normalised(value, what) for key, value in leaf.items()}
        if not isinstance(leaf, Tensor) and _holds_something(leaf):
            raise ExecutionError(
                f"{what}: {type(leaf).__name__} is no container that can be cut into microbatches; "
                "pass its tensors in a tuple or a dict, or a list of ready microbatches"
            )
        return leaf

    if isinstance(batch, Tensor):
        return batch
    return pytree.tree_map(normalised, batch, is_leaf=_is_packed)


def _is_packed(value: object) -> bool:
    return isinstance(value, PackedSequence)  # a tuple by type, but its tensors have no rows


_CONSTANTS = (type(None), Number, str, bytes, Enum, type, torch.Size)


def _holds_something(value: object) -> bool:
    """Whether a value may hold tensors, and is not a constant such as a number or a setting."""
    if isinstance(value, _CONSTANTS):
        return False
    kind = type(value)
    return (
        any(hasattr(kind, name) for name in ("__iter__", "__getitem__", "__len__", "__array__"))
        or dataclasses.is_dataclass(value)
        or attrs.has(kind)
        or any(isinstance(held, Tensor) for held in getattr(value, "__dict__", {}).values())
    )


def rows(target: Microbatch, dim: int = 0) -> int:
    """The number of samples in a microbatch: that dim of the target's first tensor."""
    for leaf in (target,) if isinstance(target, Tensor) else pytree.tree_leaves(target):
        if isinstance(leaf, Tensor):
            return leaf.shape[dim] if leaf.dim() > dim else 1
    raise ExecutionError("target: a microbatch holds no tensor, so its samples can't be counted")


def samples(
    count: Callable[[Any], float | Tensor], target: Microbatch, accelerator: Accelerator
) -> Count:
    """The number of samples of a microbatch's mean loss, by `count`."""
    said = count(target)
    if isinstance(said, Tensor) and (said.numel() != 1 or said.is_complex()):
        raise ExecutionError(
            f"count must return a number, or a tensor of one, not {said.dtype}{list(said.shape)}"
        )
    if accelerator.queues and isinstance(said, Tensor) and accelerator.makes(said):
        return said.detach().to(torch.float64).reshape(())
    try:
        found = float(said)
    except (TypeError, ValueError):
        raise ExecutionError(
            f"count must return a number, or a tensor of one, not {type(said).__name__}"
        ) from None
    check_count(found)
    return found


def check_count(found: float) -> None:
    """Raise ExecutionError for a number of samples that is negative or not finite."""
    if not 0 <= found < math.inf:
        raise ExecutionError(
            f"count returns {found:g} for a microbatch; it must be finite, and 0 or more"
        )


def check_total(total: float, together: Sequence[int]) -> None:
    """Raise ExecutionError if microbatches that are accumulated together have no samples."""
    if not total:
        raise ExecutionError(f"target: microbatches {list(together)} hold no samples at all")


def check_alike(counts: Sequence[Count], together: Sequence[int]) -> None:
    """Raise ExecutionError if microbatches of one update of the loss stage, of which another stage
    applies a part, hold different numbers of samples."""
    own = [counts[m] for m in together]
    if len(set(own)) > 1:
        raise ExecutionError(
            f"target: microbatches {list(together)}, after which the loss stage updates, hold "
            f"{', '.join(f'{n:g}' for n in own)} samples, but another stage updates after a part "
            "of them, so they must hold equally many: pass so many rows that all microbatches get "
            "as many, or list the OPTIM_STEPs of all stages after the same microbatches"
        )


def loss_shares(
    counts: Sequence[Count], accumulated: Sequence[Sequence[int]], totals: Sequence[Count]
) -> list[Count]:
    """Each microbatch's share of its OPTIM_STEP's samples.

    `accumulated` are the microbatches of each OPTIM_STEP, `totals` their samples.
    """
    shares: list[Count] = [0.0] * len(counts)
    for together, total in zip(accumulated, totals, strict=True):
        if isinstance(total, Tensor):
            total = total.clamp_min(_LEAST)  # without samples every share is 0; refused later
        else:
            check_total(total, together)
        for m in together:
            shares[m] = counts[m] / total
    return shares


_LEAST = 1e-300
"""Replaces a total of 0 samples on the device, so that it does not divide by 0."""


def placed(pieces: list[Any], device: torch.device, what: str) -> list[Any]:
    """Move microbatches to a device; `what` names the argument.

    Raises ExecutionError for a tensor that is neither there nor on the CPU.
    """
    if device.type == "cpu":  # a stage itself refuses tensors that it can't compute with
        return pieces
    moved: dict[int, Tensor] = {}  # a tensor that all microbatches get is copied once

    def on(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = _on(tensor, device, what)
        return moved[id(tensor)]

    found: list[Any] = pytree.tree_map_only(Tensor, on, pieces)
    return found


def _on(tensor: Tensor, device: torch.device, what: str) -> Tensor:
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu":
        return tensor.to(device, non_blocking=True)
    raise ExecutionError(
        f"{what}: a tensor is on {tensor.device}, but the stages of this rank are on {device}; "
        f'move it there, tensor.to("{device}"), or leave it on the CPU'
    )
