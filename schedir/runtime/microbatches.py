"""Cuts a batch into microbatches.

A chunk spec says along which dim a tensor is cut. Those of torch.distributed.pipelining work too.
"""

from __future__ import annotations

import dataclasses
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

Microbatch: TypeAlias = Any
"""One microbatch's tensors, in any structure, with constants among them."""

Batch: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any] | Iterable[Microbatch]
"""A whole batch, or a list or iterator of ready microbatches."""

ChunkSpec: TypeAlias = Any
"""A dim, or REPLICATE; None for the default; or a tuple, list or dict of these, with the structure
of the argument, or of its outer part."""

REPLICATE = "replicate"
"""Every microbatch gets the whole tensor."""

Dim: TypeAlias = int | None
"""The dim that a tensor is cut along; None if every microbatch gets all of it, as constants."""


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


DimsOf: TypeAlias = Callable[[Batch, str], Sequence[Dim]]
"""Gives the dims of the leaves of a batch; the name of the argument is for errors."""


def is_whole(batch: object) -> bool:
    """Whether it is a batch to be cut, and not ready microbatches."""
    return isinstance(batch, (Tensor, tuple, Mapping))


def cut(
    batch: Batch,
    microbatches: int,
    what: str,
    dims_of: DimsOf,
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
    return Pieces([_normalised(piece) for piece in ready], ready=True)


def _cut_whole(
    batch: Batch, microbatches: int, what: str, dims_of: DimsOf, may_be_short: bool
) -> Pieces:
    batch = _normalised(batch)
    leaves, structure = pytree.tree_flatten(batch, is_leaf=_is_packed)
    for leaf in filter(is_opaque, leaves):  # its tensors would go whole to every microbatch
        raise ExecutionError(
            f"{what}: {type(leaf).__name__} is no container that can be cut into microbatches; "
            "pass its tensors in a tuple or a dict, or a list of ready microbatches"
        )
    along = [*zip(leaves, dims_of(batch, what), strict=True)]
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
    found = [*columns[0]]
    if not isinstance(batch, Tensor):
        found = [pytree.tree_unflatten(piece, structure) for piece in zip(*columns, strict=True)]
    return Pieces(found + found[-1:] * (microbatches - parts), number)


@attrs.frozen(eq=False)
class ChunkSpecs:
    """How to cut whole batches: `args` are the specs of a batch by position, `kwargs` those of
    keywords by name. Without a spec, inputs and target are cut along `batch_dim`."""

    batch_dim: int
    args: ChunkSpec = None
    kwargs: Mapping[str, ChunkSpec] = {}

    def along(self, batch: Batch, what: str) -> Sequence[Dim]:
        """The dims of the leaves of inputs or target."""
        return self._dims(batch, what, self.args, lambda _: self.batch_dim)

    def beside(self, batch: Batch, what: str, rows: int | None) -> Sequence[Dim]:
        """The dims of the leaves of `stage_inputs` or `loss_kwargs`; `rows` are the batch's, None
        if this rank does not know them.

        Raises ExecutionError for a tensor without a spec that may hold one entry for each row.
        """

        def whole(leaf: Tensor) -> Dim:
            lengths = [leaf.shape[dim] for dim in {0, self.batch_dim} if dim < leaf.dim()]
            if lengths and (rows is None or rows in lengths):
                raise _ambiguous(what, batch, leaf, rows)
            return None

        return self._dims(batch, what, None, whole)

    def _dims(
        self, batch: Batch, what: str, spec: ChunkSpec, default: Callable[[Tensor], Dim]
    ) -> Sequence[Dim]:
        """The dims of the leaves; `default` gives that of a tensor without a spec."""
        if isinstance(batch, Mapping):
            batch, spec = {**batch}, {name: self.kwargs.get(name) for name in batch}
        elif isinstance(spec, (tuple, list)):
            batch, spec = (*batch,) if isinstance(batch, tuple) else (batch,), (*spec,)
        leaves, structure = pytree.tree_flatten(batch)
        every: list[Any] | None = [None] * len(leaves)
        if spec is not None:
            every = pytree._broadcast_to_and_flatten(spec, structure)
        if every is None:
            raise ExecutionError(
                f"{what}: its chunk spec {spec!r} has another structure than the batch; pass one "
                f'dim or "{REPLICATE}" for each tensor, or one for all'
            )
        dims: list[Dim] = []
        for leaf, dim in zip(leaves, every, strict=True):
            if not isinstance(leaf, Tensor) or dim == REPLICATE:
                dims.append(None)
            else:
                dims.append(default(leaf) if dim is None else dim)
        return dims


def _ambiguous(what: str, batch: Batch, leaf: Tensor, rows: int | None) -> ExecutionError:
    parts = batch.items() if isinstance(batch, Mapping) else ()
    names = [name for name, part in parts if any(x is leaf for x in pytree.tree_leaves(part))]
    name = next(map(str, names), None)
    has = f"because the batch has {rows} rows"
    if rows is None:
        has = "and this rank has no whole batch to compare with"
    given = "" if name is not None else 'pass it by keyword, {"name": …}, and '
    spec = f'{{"{name or "name"}": 0}}'
    return ExecutionError(
        f"{what}: {f'{name!r}, ' if name is not None else ''}a tensor of shape "
        f"{list(leaf.shape)}, may have one entry for each row of the batch, or "
        f"not, {has}; {given}make the Executor "
        f"with kwargs_chunk_spec={spec} to cut it into microbatches along dim 0, or with "
        f'"{REPLICATE}" for 0 to give each microbatch all of it'
    )


def checked(spec: ChunkSpec, what: str) -> ChunkSpec:
    """The spec, with dims and REPLICATE in place of torch's own objects.

    Raises ExecutionError for anything else; `what` names the argument.
    """
    return pytree.tree_map(lambda leaf: _checked_leaf(leaf, what), spec)


def _checked_leaf(leaf: object, what: str) -> Dim | str:
    if leaf is None or leaf == REPLICATE or (isinstance(leaf, int) and not isinstance(leaf, bool)):
        return leaf
    # Imported here because it takes long; a user who passes its objects has imported it already.
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    if isinstance(leaf, TensorChunkSpec):
        return _checked_leaf(leaf.split_dim, what)
    if leaf is _Replicate or isinstance(leaf, _Replicate):
        return REPLICATE
    raise ExecutionError(f'{what}: a chunk spec is a dim, an int, or "{REPLICATE}", not {leaf!r}')


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


def _normalised(batch: Any) -> Any:
    """The batch, with a dict for every mapping that torch's pytree does not know."""

    def normalised(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return {key: _normalised(value) for key, value in leaf.items()}
        return leaf

    if isinstance(batch, Tensor):
        return batch
    # A PackedSequence is a tuple by type, but its tensors have no rows.
    return pytree.tree_map(normalised, batch, is_leaf=_is_packed)


def _is_packed(value: object) -> bool:
    return isinstance(value, PackedSequence)


_CONSTANTS = (type(None), Number, str, bytes, Enum, type, torch.Size)


def is_opaque(value: object) -> bool:
    """Whether a leaf may hold tensors that torch's pytree does not know of, as a BlockMask does: it
    is neither a tensor nor a constant, such as a number or a setting."""
    if isinstance(value, (Tensor, *_CONSTANTS)):
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


def placed(pieces: list[Any], device: torch.device, what: str) -> list[Any]:
    """Move microbatches to a device; `what` names the argument.

    Raises ExecutionError for a tensor that is neither there nor on the CPU.
    """
    if device.type == "cpu":  # a stage itself refuses tensors that it can't compute with
        return pieces
    moved: dict[int, Tensor] = {}  # a tensor that all microbatches get is copied once

    def on(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" and tensor.device != device:
            raise ExecutionError(
                f"{what}: a tensor is on {tensor.device}, but the stages of this rank are on "
                f'{device}; move it there, tensor.to("{device}"), or leave it on the CPU'
            )
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device, non_blocking=True)
        return moved[id(tensor)]

    found: list[Any] = pytree.tree_map_only(Tensor, on, pieces)
    return found
