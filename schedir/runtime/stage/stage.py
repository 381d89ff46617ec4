"""One stage: its module and its weights; it runs the forward and the loss."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import ExecutionError
from schedir.runtime.accelerator import Streams
from schedir.runtime.gradients.gradients import Gradients
from schedir.runtime.memory import is_plain
from schedir.runtime.plan import Plan
from schedir.runtime.sharded import Sharded, return_local
from schedir.runtime.stage.activations import Cell
from schedir.runtime.stage.buffers import Buffers
from schedir.runtime.stage.replicas import Replicas
from schedir.runtime.stage.rng import Seeds, seeder
from schedir.runtime.stage.weights import StageWeights, readers_of


class Stage:
    """One stage of this process; the last one has the loss.

    `optimizer` is None if the caller steps, or without parameters; `reduction` is None if no other
    process runs the stage; `sharded` is None if each process has all of its weights; `replicas` is
    None if one rank here holds the stage. `busy[0]` counts the seconds that this process computes.
    `seeds` are those of the current call's forwards, by microbatch, from `draws`.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        weights: StageWeights,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer | None,
        busy: list[float],
    ) -> None:
        self.index = index
        self.module = plan.arguments.stages[index]
        self.device, self.queues = plan.device, plan.accelerator.queues
        self.loss_fn = plan.arguments.loss_fn if index == plan.last_stage else None
        self.weights = weights
        self.reduction = gradients.reductions.get(index)
        self.nonfinite = gradients.nonfinite
        self.optimizer = optimizer
        self.sharded = self.replicas = None
        if isinstance(self.module, FSDPModule):
            self.sharded = Sharded(index, self.module, not plan.updates)
        if len(ranks := plan.local_holders(index)) > 1:
            self.replicas = Replicas(ranks, weights, plan.accelerator)
        self.buffers = Buffers(plan.trained[index])
        self.busy = busy
        self.seed = seeder(plan.generators)
        microbatches = plan.schedule.microbatches
        first = plan.grid.draws * microbatches  # each pipeline draws numbers of its own
        self.draws = Seeds(plan.arguments.seed, index, range(first, first + microbatches))
        self.seeds: list[int] = []
        # The loss may want a DTensor; other stages take what travels.
        split = bool(plan.groups_of_stages) and index != plan.last_stage
        self._hook = return_local(self.module) if split else None

    def check_frozen(self) -> None:
        """Raise ExecutionError where a parameter was thawed that no optimiser steps."""
        if any(parameter.requires_grad for parameter in self.weights.newest):
            named = self.module.named_parameters()
            name = next((name for name, p in named if p.requires_grad), "the loss")
            raise ExecutionError(
                f"{name} of stage {self.index} was thawed since the executor was made, but no "
                "optimizer could be made there, as nothing of the stage required grad; make a new "
                "Executor"
            )

    def close(self) -> None:
        """Leave the module as it was."""
        if self._hook is not None:
            self._hook.remove()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The module, and the loss if it is a module."""
        if isinstance(self.loss_fn, nn.Module):
            return self.module, self.loss_fn
        return (self.module,)

    def loss(self, cell: Cell, output: Any) -> Tensor:
        """The last stage's loss."""
        target, keywords = cell.target, cell.loss_keywords
        if cell.learned.changes_target:
            target, keywords = copy_of(target), copy_of(keywords)
        return self.loss_of(cell, output, target, keywords)

    def loss_of(self, cell: Cell, output: Any, target: Any, keywords: Mapping[str, Any]) -> Tensor:
        """The loss of the cell's output."""
        assert self.loss_fn is not None  # asked of the last stage
        if not isinstance(cell.loss_share, Tensor) and not cell.loss_share:
            _give_no_gradient(output)
        loss = self.loss_fn(output, target, **keywords)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            raise no_loss(loss)
        return loss


def stages_of(
    plan: Plan,
    gradients: Gradients,
    optimizers: Mapping[int, torch.optim.Optimizer],
    busy: list[float],
    streams: Streams,
    apart: Collection[int],
) -> dict[int, Stage]:
    """The stages here; several `streams` compute those that are `apart`."""
    readers = readers_of(plan.schedule, plan.local_ranks) if plan.updates else {}
    found = {}
    for stage in plan.local_stages:
        accumulators = None
        if stage in apart:
            stream = streams.of("gradients", stage)
            accumulators = partial(plan.accelerator.accumulate_on, stream)
        weights = StageWeights(plan.trained[stage], readers.get(stage, {}), accumulators)
        found[stage] = Stage(plan, stage, weights, gradients, optimizers.get(stage), busy)
    return found


def no_loss(loss: object) -> ExecutionError:
    """The error for what a loss function must not return."""
    got = type(loss).__name__
    if isinstance(loss, Tensor):
        got = f"{loss.dtype} of shape {list(loss.shape)}"
    return ExecutionError(
        f"loss_fn must return a real scalar tensor, the microbatch's mean, not {got}"
    )


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
        if not is_plain(tensor):
            return copies.setdefault(id(tensor), tensor.clone())
        where = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape
        what = tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
        key = *where, *what, tensor.requires_grad
        if key not in copies:
            copies[key] = _aligned_copy(tensor)
        return copies[key]

    if isinstance(tree, Tensor):
        return copied(tree)
    return tree if tree is None else tree_map_only(Tensor, copied, tree)


_ALIGNMENT = 64
"""Bytes: matrix products may round differently if an address differs modulo this number."""


def _aligned_copy(tensor: Tensor) -> Tensor:
    """A copy of a plain tensor, at its address modulo the alignment: kernels round as before."""
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


def arguments(stage: Stage, cell: Cell, with_graph: bool) -> tuple[Any, Any]:
    """The arguments of a stage's module: its input, and its `stage_inputs`."""
    learned = cell.learned
    extra = copy_of(cell.extra) if learned.changes_extra else cell.extra
    if stage.index == 0:
        return copy_of(cell.batch) if all(learned.changes_inputs) else cell.batch, extra
    if with_graph:
        for number in learned.other_layout:
            put = partial(cell.computed_grads.__setitem__, number)
            cell.leaves[number].register_hook(put)
    # A leaf can't be changed in place, and a neighbour's output must not be.
    given = [
        leaf.clone() if changes else leaf
        for leaf, changes in zip(cell.leaves, learned.changes_inputs, strict=True)
    ]
    return learned.before.structure(given), extra


@contextmanager
def evaluating(stages: Iterable[Stage]) -> Iterator[None]:
    """Inside, the modules of these stages are in eval mode."""
    torch.clear_autocast_cache()  # it may hold casts of earlier weights
    roots = [(root, root.training) for stage in stages for root in stage.modules]
    modes = [(module, module.training) for root, _ in roots for module in root.modules()]
    try:
        for root, _ in roots:
            root.eval()
        yield
    finally:
        for root, training in roots:
            root.train(training)  # it may do more than set modes
        for module, training in modes:
            module.training = training
