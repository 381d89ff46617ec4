"""One stage: its module, its weights, and how its forward and its loss are run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import ExecutionError
from schedir.runtime.call import Call
from schedir.runtime.gradients.nonfinite import NonFinite
from schedir.runtime.gradients.reduction import Reduction
from schedir.runtime.plan import Plan
from schedir.runtime.stage.cells import Cell
from schedir.runtime.stage.rng import seed_generators
from schedir.runtime.stage.statistics import Statistics
from schedir.runtime.stage.weights import StageWeights


class Stage:
    """One stage of this process; the last one has the loss.

    `optimizer` is None where the caller steps, and without parameters; `reduction` where no other
    process runs the stage.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        weights: StageWeights,
        reduction: Reduction | None,
        optimizer: torch.optim.Optimizer | None,
        nonfinite: NonFinite,
    ) -> None:
        self.index = index
        self.module = plan.arguments.stages[index]
        self.device = plan.device
        self._generators = plan.generators
        self.loss_fn = plan.arguments.loss_fn if index == plan.last_stage else None
        self.weights = weights
        self.reduction = reduction
        self.optimizer = optimizer
        self.nonfinite = nonfinite
        self.statistics = Statistics(plan.trained[index])

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The module, and the loss where that is one."""
        if isinstance(self.loss_fn, nn.Module):
            return self.module, self.loss_fn
        return (self.module,)

    def output(self, call: Call, cell: Cell, keep_input: bool) -> Any:
        """Run the module on the cell's input; `keep_input` if it will be run again."""
        given, extra = self.arguments(call, cell, keep_input)
        return cell.learned.convention(self.module, given, extra)

    def arguments(self, call: Call, cell: Cell, keep_input: bool) -> tuple[Any, Any]:
        """What the module is about to be run on: its input, and what it gets beside that."""
        learned = cell.learned
        seed_generators(self._generators, call.seed, call.step, self.index, cell.draw)
        extra = copy_of(cell.extra) if learned.changes_extra else cell.extra
        if self.index == 0:
            return copy_of(cell.batch) if learned.changes_inputs[0] else cell.batch, extra
        arguments = _arguments(cell)
        if not keep_input:
            cell.inputs = ()
        return learned.before.structure(arguments), extra

    def loss(self, cell: Cell, output: Any) -> Tensor:
        """The last stage's loss."""
        target, keywords = cell.target, cell.loss_keywords
        if cell.learned.changes_target:
            target, keywords = copy_of(target), copy_of(keywords)
        return self.loss_of(cell, output, target, keywords)

    def loss_of(self, cell: Cell, output: Any, target: Any, keywords: Mapping[str, Any]) -> Tensor:
        """What the loss function makes of the cell's output."""
        assert self.loss_fn is not None  # asked of the last stage
        if not isinstance(cell.loss_share, Tensor) and not cell.loss_share:
            _give_no_gradient(output)
        loss = self.loss_fn(output, target, **keywords)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            got = type(loss).__name__
            if isinstance(loss, Tensor):
                got = f"{loss.dtype} of shape {list(loss.shape)}"
            raise ExecutionError(
                f"loss_fn must return a real scalar tensor, the microbatch's mean, not {got}"
            )
        return loss


def _give_no_gradient(output: Any) -> None:
    """Zeros, whatever comes back: the mean over no samples is 0/0, as is its gradient, and a share
    of nothing in that is still no number."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
            leaf.register_hook(torch.zeros_like)


def copy_of(tree: Any) -> Any:
    """A copy of the tensors; what stands there twice is copied once, and so stays one tensor."""
    copies: dict[object, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in copies:
            copies[key] = _aligned_copy(tensor)
        return copies[key]

    return tree_map_only(Tensor, copied, tree)


_ALIGNMENT = 64
"""Bytes: matrix products may round otherwise where memory begins elsewhere within so many."""


def _aligned_copy(tensor: Tensor) -> Tensor:
    """A copy that begins at such an address as the tensor does, so that kernels round alike."""
    copy = tensor.clone()
    shift = (tensor.data_ptr() - copy.data_ptr()) % _ALIGNMENT
    if not shift or tensor.device.type != "cpu" or copy.requires_grad:
        return copy
    size, room = copy.element_size(), _ALIGNMENT // copy.element_size()
    held = copy.new_empty(copy.numel() + room)
    begin = (tensor.data_ptr() - held.data_ptr()) % _ALIGNMENT // size
    shape, strides = copy.shape, copy.stride()
    held.as_strided(shape, strides, begin).copy_(tensor)
    return copy.new_empty(0).set_(held.untyped_storage(), begin, shape, strides)


def _arguments(cell: Cell) -> list[Tensor]:
    """The inputs as leaves that a backward can stop at."""
    leaves, arguments = [], []
    learned = cell.learned
    metas = learned.before.metas
    for tensor, meta, changes in zip(cell.inputs, metas, learned.changes_inputs, strict=True):
        leaf = tensor.detach().requires_grad_(meta.requires_grad)
        leaves.append(leaf)
        # A leaf can't be changed in place, and a neighbour's output must not be.
        arguments.append(leaf.clone() if changes else leaf)
    for number in learned.other_layout:
        leaves[number].register_hook(partial(cell.computed_grads.__setitem__, number))
    cell.leaves = tuple(leaves)
    return arguments


@contextmanager
def evaluating(stages: Iterable[Stage]) -> Iterator[None]:
    """Run forwards alone inside: the modules are in eval mode, and no graph is made."""
    torch.clear_autocast_cache()  # it may hold casts of earlier weights
    roots = [(root, root.training) for stage in stages for root in stage.modules]
    modes = [(module, module.training) for root, _ in roots for module in root.modules()]
    try:
        for root, _ in roots:
            root.eval()
        with torch.no_grad():
            yield
    finally:
        for root, training in roots:
            root.train(training)  # it may do more than set modes
        for module, training in modes:
            module.training = training
