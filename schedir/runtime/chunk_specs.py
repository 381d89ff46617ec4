"""Chunk specs: the dim along which a tensor is cut into microbatches, or "replicate".

They are those of torch.distributed.pipelining; its own objects work too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
from torch import Tensor
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError

ChunkSpec: TypeAlias = Any
"""A dim, or REPLICATE; None for the default; or a tuple, list or dict of these, with the structure
of the argument, or of its outer part."""

REPLICATE = "replicate"
"""Every microbatch gets the whole tensor."""

Dim: TypeAlias = int | None
"""The dim that a tensor is cut along; None if every microbatch gets all of it, as constants."""


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


@attrs.frozen(eq=False)
class Whole:
    """A whole batch as its leaves and their structure, None for a single tensor; `what` names the
    argument."""

    what: str
    batch: Any
    leaves: Sequence[Any]
    structure: pytree.TreeSpec | None = None

    @property
    def numbered(self) -> Any:
        """The structure, with numbers in place of the leaves."""
        if self.structure is None:
            return 0
        return pytree.tree_unflatten(range(len(self.leaves)), self.structure)

    def name(self, number: int) -> str | None:
        """The keyword of a leaf, or of the argument that the leaf is in; None without one."""
        if isinstance(self.batch, Mapping):
            for name, part in self.numbered.items():
                if number in pytree.tree_leaves(part):
                    return str(name)
        return None


@attrs.frozen(eq=False)
class ChunkSpecs:
    """How to cut whole batches: `args` are the specs of `inputs` by position, `kwargs` those of
    keywords by name. Without a spec, inputs and target are cut along `batch_dim`."""

    batch_dim: int
    args: ChunkSpec
    kwargs: Mapping[str, ChunkSpec]

    @property
    def is_plain(self) -> bool:
        """Whether there are no specs, so that inputs and target are cut along `batch_dim`."""
        return self.args is None and not self.kwargs

    def of_inputs(self, whole: Whole) -> list[Dim]:
        """The dims of the leaves of `inputs`."""
        if self.is_plain:
            return self.of_target(whole)
        return [self._dim(leaf, spec) for leaf, spec in self._specified(whole, self.args)]

    def of_target(self, whole: Whole) -> list[Dim]:
        """The dims of the leaves of `target`."""
        return [self.batch_dim if isinstance(leaf, Tensor) else None for leaf in whole.leaves]

    def beside(self, whole: Whole, rows: int | None) -> list[Dim]:
        """The dims of the leaves of `stage_inputs` or `loss_kwargs`; `rows` are the batch's, None
        if this rank does not know them.

        Raises ExecutionError for a tensor without a spec that may hold one entry for each row.
        """
        dims = []
        for number, (leaf, spec) in enumerate(self._specified(whole, None)):
            if spec is None and isinstance(leaf, Tensor):
                lengths = [leaf.shape[dim] for dim in {0, self.batch_dim} if dim < leaf.dim()]
                if lengths and (rows is None or rows in lengths):
                    raise _ambiguous(whole, number, rows)
                spec = REPLICATE
            dims.append(self._dim(leaf, spec))
        return dims

    def _dim(self, leaf: object, spec: Dim | str) -> Dim:
        if not isinstance(leaf, Tensor) or isinstance(spec, str):
            return None
        return self.batch_dim if spec is None else spec

    def _specified(self, whole: Whole, args: ChunkSpec) -> Iterable[tuple[Any, Dim | str]]:
        """Each leaf with its spec, None for the default."""
        specs: list[Dim | str] = [None] * len(whole.leaves)
        if isinstance(whole.batch, Mapping):
            named = whole.numbered if self.kwargs else {}
            parts = [(named[name], spec) for name, spec in self.kwargs.items() if name in named]
        else:
            parts = [] if args is None else [*_positional(whole, args)]
        for part, spec in parts:
            numbers, structure = pytree.tree_flatten(part)
            spread = pytree._broadcast_to_and_flatten(spec, structure)
            if spread is None:
                raise _unlike(whole, spec)
            for number, one in zip(numbers, spread, strict=True):
                specs[number] = one
        return zip(whole.leaves, specs, strict=True)


def _positional(whole: Whole, spec: ChunkSpec) -> Iterator[tuple[Any, ChunkSpec]]:
    """The positional parts of the inputs, numbered, each with its spec."""
    if not isinstance(spec, (tuple, list)):
        yield whole.numbered, spec
        return
    parts = whole.numbered if isinstance(whole.batch, tuple) else [whole.numbered]
    if len(parts) != len(spec):
        raise _unlike(whole, spec)
    yield from zip(parts, spec, strict=True)


def _unlike(whole: Whole, spec: ChunkSpec) -> ExecutionError:
    return ExecutionError(
        f"{whole.what}: its chunk spec {spec!r} has another structure than the batch; pass one dim "
        f'or "{REPLICATE}" for each tensor, or one for all'
    )


def _ambiguous(whole: Whole, number: int, rows: int | None) -> ExecutionError:
    name = whole.name(number)
    has = f"because the batch has {rows} rows"
    if rows is None:
        has = "and this rank has no whole batch to compare with"
    given = "" if name is not None else 'pass it by keyword, {"name": …}, and '
    spec = f'{{"{name or "name"}": 0}}'
    return ExecutionError(
        f"{whole.what}: {f'{name!r}, ' if name is not None else ''}a tensor of shape "
        f"{list(whole.leaves[number].shape)}, may have one entry for each row of the batch, or "
        f"not, {has}; {given}make the Executor "
        f"with kwargs_chunk_spec={spec} to cut it into microbatches along dim 0, or with "
        f'"{REPLICATE}" for 0 to give each microbatch all of it'
    )
