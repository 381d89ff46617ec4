"""What a step keeps, in bytes, by stage: an observer of the first step of each input shape.

A forward leaves to its backward what autograd saves, which tells of it (`saved_tensors_hooks`), and
the stage's input. Of that an I leaves to its W what nodes of the graph still have, and gradients
that came to them; hooks would have it do more (`split_backward`), so it is another microbatch that
this is seen of. Memory that several tensors share counts once; that of weights, and of what the
user has given, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from schedir.ir import Kind
from schedir.runtime.program.instruction import Bound, Instruction
from schedir.runtime.stage.activations import Cell, Cells
from schedir.runtime.stage.stage import Stage

_Saved: TypeAlias = tuple[Tensor, int]
"""What autograd has saved, and its version then."""


@attrs.define(eq=False)
class Gauge:
    """Measures what the stages here keep, in bytes by stage, while a call is made.

    `boundary` is what one microbatch sends to the next stage, `input` what it needs to be run
    again, `activation` all that its forward leaves to its backward, with its input, and `deferred`
    what of it is left between I and W. `gradient` is what has been accumulated before an
    OPTIM_STEP, or when the call ends.
    """

    boundary: dict[int, int] = attrs.field(factory=dict)
    input: dict[int, int] = attrs.field(factory=dict)
    activation: dict[int, int] = attrs.field(factory=dict)
    deferred: dict[int, int] = attrs.field(factory=dict)
    gradient: dict[int, int] = attrs.field(factory=dict)
    finished: bool = False
    _seen: set[tuple[int, Kind]] = attrs.field(factory=set)
    _hooked: set[Cell] = attrs.field(factory=set)

    def __call__(self, instruction: Instruction) -> Instruction:
        """Observe an instruction."""
        kind, stage, cell, run = (
            instruction.action.kind,
            instruction.stage,
            instruction.cell,
            instruction.run,
        )
        if stage is None:
            return instruction
        if kind is Kind.OPTIM_STEP:
            run = self._before_step(stage, run)
        elif cell is not None and kind in (Kind.FORWARD, Kind.RECOMPUTE):
            run = self._weighed(kind, stage, cell, run)
        elif cell is not None and kind is Kind.BACKWARD_INPUT:
            run = self._split(stage, cell, run)
        return attrs.evolve(instruction, run=run)

    def _weighed(self, kind: Kind, stage: Stage, cell: Cell, run: Bound) -> Bound:
        """Around the first forward of a stage, and the first that is run again: no microbatch has
        more rows."""
        key = stage.index, kind

        def weighed() -> None:
            if key in self._seen:
                run()
                return
            self._seen.add(key)
            self._hooked.add(cell)
            inputs = _memory(cell.leaves)
            saved: dict[int, int] = {}

            def save(tensor: Tensor) -> _Saved:
                saved.update(_memory([tensor]))
                # By the tensor itself autograd would hold itself.
                return tensor.detach(), tensor._version

            with saved_tensors_hooks(save, _as_it_was):
                run()
            others = _not_counted(stage, cell)
            kept = sum((saved | inputs)[m] for m in (saved | inputs).keys() - others)
            self.input[stage.index] = max(self.input.get(stage.index, 0), sum(inputs.values()))
            self.activation[stage.index] = max(self.activation.get(stage.index, 0), kept)

        return weighed

    def _split(self, stage: Stage, cell: Cell, run: Bound) -> Bound:
        """Around the first I of a stage whose forward was not weighed."""

        def weighed() -> None:
            if stage.index in self.deferred or cell in self._hooked:
                run()
                return
            roots = [
                root.node if isinstance(root, GradientEdge) else get_gradient_edge(root).node
                for root in cell.outputs
                if root is not None and (isinstance(root, GradientEdge) or root.requires_grad)
            ]
            run()
            part = cell.weight_part
            arrived = [] if part is None else part.kept()
            others = _not_counted(stage, cell)
            kept = _memory([*arrived, *_still_saved(roots)])
            self.deferred[stage.index] = sum(kept[m] for m in kept.keys() - others)

        return weighed

    def _before_step(self, stage: Stage, run: Bound) -> Bound:
        def weighed() -> None:
            self._gradients_of(stage)
            run()

        return weighed

    def _gradients_of(self, stage: Stage) -> None:
        grads = (p.grad for p in stage.weights.newest)
        self.gradient.setdefault(stage.index, sum(_memory(grads).values()))

    def finish(self, stages: Mapping[int, Stage], cells: Cells) -> None:
        """The call has ended."""
        self.finished = True
        for stage in stages.values():
            self._gradients_of(stage)
        for cell in cells:
            sent = cell.learned.after.nbytes
            self.boundary[cell.stage] = max(self.boundary.get(cell.stage, 0), sent)


def weight_bytes(stage: Stage) -> int:
    """Of the parameters and buffers of a stage."""
    return sum(_memory(_held(stage.modules)).values())


def optimizer_bytes(stage: Stage) -> int:
    """Of what the optimiser of a stage keeps from step to step."""
    states = [] if stage.optimizer is None else stage.optimizer.state.values()
    return sum(_memory(tree_leaves(list(states))).values())


def _not_counted(stage: Stage, cell: Cell) -> dict[int, int]:
    """The memory of the weights, and of what the user has given."""
    beside = (cell.batch, cell.extra, cell.target, cell.loss_keywords)
    return _memory([*_held(stage.modules), *tree_leaves(beside)])


def _still_saved(roots: Iterable[Node]) -> Iterator[Tensor]:
    """What the nodes of a graph have saved, and not freed."""
    nodes, seen = list(roots), set(roots)
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                with suppress(RuntimeError):  # it is freed
                    found = getattr(node, name)
                    yield from found if isinstance(found, tuple) else (found,)
        below = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= below
        nodes += below


def _held(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _as_it_was(saved: _Saved) -> Tensor:
    """What was saved. Raises RuntimeError where that has changed since, as torch does, but not
    where hooks have it."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {list(tensor.shape)} of {tensor.dtype} is at version {tensor._version}; "
            f"expected version {version} instead"
        )
    return tensor


def _memory(values: Iterable[Any]) -> dict[int, int]:
    """The memory of the tensors among these: its bytes, each piece of it once."""
    tensors = (value for value in values if isinstance(value, Tensor))
    storages = (part.untyped_storage() for tensor in tensors for part in _strided(tensor.detach()))
    return {storage._cdata: storage.nbytes() for storage in storages}


def _strided(tensor: Tensor) -> Iterator[Tensor]:
    """What a tensor consists of that has memory of its own: itself, but where it is sparse, or a
    subclass that wraps others. Of other layouts nobody can tell."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _strided(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor
    else:
        for part in _PARTS.get(tensor.layout, ()):
            yield part(tensor)


_BY_ROW = Tensor.crow_indices, Tensor.col_indices, Tensor.values
_BY_COLUMN = Tensor.ccol_indices, Tensor.row_indices, Tensor.values
_PARTS: Mapping[torch.layout, Sequence[Callable[[Tensor], Tensor]]] = {
    torch.sparse_coo: (Tensor._indices, Tensor._values),
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
}
