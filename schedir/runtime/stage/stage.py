"""One stage: its module, weights and seeds; and what each of its microbatches holds.

Every forward is seeded by (seed, step, stage, microbatch), never by the order of the calls. So
every schedule, and a loop in one process, drops out the same units.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only

from schedir.errors import ExecutionError
from schedir.runtime.accelerator import Streams, current_accelerator
from schedir.runtime.boundary import Learned, Lessons
from schedir.runtime.feeding import Feed
from schedir.runtime.gradients.gradients import Gradients
from schedir.runtime.memory import Saved, is_plain
from schedir.runtime.plan import Plan
from schedir.runtime.samples import Count
from schedir.runtime.sharded import Sharded, return_local
from schedir.runtime.stage.buffers import Buffers, Kept
from schedir.runtime.stage.split_backward import WeightPart
from schedir.runtime.stage.weights import Replicas, StageWeights, readers_of
from schedir.runtime.transports import Work


@attrs.define(eq=False)
class Cell:
    """The tensors of one (stage, microbatch), from its first action to its last.

    Receives fill `leaves` and `output_grads` with buffers and leave their works beside them. The
    compute action that consumes them waits for these works only: a receive may be posted long
    before, and waiting for more than the list says could deadlock a list that was proved clean.
    """

    stage: int
    microbatch: int
    learned: Learned
    batch: Any = None  # the first stage's microbatch
    extra: Any = None  # what the stage is given beside its input
    target: Any = None  # the last stage's, with what its loss takes beside it
    loss_keywords: Mapping[str, Any] = attrs.field(factory=dict)
    loss_share: Count = 1.0
    root_grad: tuple[Count, Tensor] | None = None  # a share, and the gradient that it is of a loss
    leaves: tuple[Tensor, ...] = ()  # the stage's input, where the backward stops
    computed_grads: dict[int, Tensor] = attrs.field(factory=dict)  # of leaves, in their own layout
    # What the backward starts from; of those that are sent the edges, since they go once they have
    # arrived.
    outputs: tuple[Tensor | GradientEdge | None, ...] = ()
    outputs_to_send: tuple[Tensor, ...] = ()
    result: Any = None  # the last stage's output, where it is asked for
    loss: float | Tensor | None = None  # a tensor on a device
    weight_part: WeightPart | None = None  # what I has left to W
    saved: Saved | None = None  # the forward's saved tensors, if they are offloaded
    kept: Kept | None = None  # what the module held before a forward that is run again
    output_grads: tuple[Tensor | None, ...] = ()
    mask: Tensor | None = None  # which of `output_grads` are there, on the host, once it is known
    input_grads: tuple[Tensor | None, ...] = ()
    input_receives: list[Work] = attrs.field(factory=list)
    grad_receives: list[Work] = attrs.field(factory=list)
    output_sends: list[Work] = attrs.field(factory=list)
    grad_sends: list[Work] = attrs.field(factory=list)
    # The local cells of the neighbouring stages, None where they are on another rank.
    previous: Cell | None = None
    following: Cell | None = None


class Cells(dict[tuple[int, int], Cell]):
    """The cells of the stages here, by stage and microbatch; a call's data goes into them.

    `lessons` has what is known of each cell; a first call fills it in. `runs` has the rank of each
    (stage, microbatch). `last` are the cells of the last stage, by microbatch.
    """

    def __init__(self, lessons: Lessons, last: int, runs: Any) -> None:
        super().__init__({place: Cell(*place, learned) for place, learned in lessons.items()})
        self.lessons = lessons
        for (stage, m), cell in self.items():
            following = self.get((stage + 1, m))
            if following is not None and runs[stage, m] == runs[stage + 1, m]:
                cell.following, following.previous = following, cell
        self._first = [cell for cell in self.values() if cell.stage == 0]
        self.last = [cell for cell in self.values() if cell.stage == last]

    def fill(self, feed: Feed) -> None:
        """Put a call's microbatches where they are used."""
        for cell, batch in zip(self._first, feed.inputs, strict=False):
            cell.batch = batch
        for cell, target in zip(self.last, feed.targets, strict=False):
            cell.target = target
        for cell, keywords in zip(self.last, feed.loss_keywords, strict=False):
            cell.loss_keywords = keywords
        for stage, extras in feed.extras.items():  # of stages elsewhere, too
            for m, extra in enumerate(extras):
                if (stage, m) in self:
                    self[stage, m].extra = extra

    def set_loss_shares(self, shares: Sequence[Count]) -> None:
        """Give the last stage's microbatches their shares of the loss."""
        for cell, share in zip(self.last, shares, strict=False):
            cell.loss_share = share

    def take_sends(self) -> list[Work]:
        """The sends that nobody has waited for, which are forgotten here."""
        found: list[Work] = []
        for cell in self.values():
            for works in (cell.output_sends, cell.grad_sends):
                if works:
                    found += works
                    works.clear()
        return found

    def empty(self) -> None:
        """Forget what a call has given, and its results."""
        for cell in self.values():
            cell.batch = cell.extra = cell.target = cell.loss = cell.result = None
            cell.loss_keywords = {}

    def drop(self) -> None:
        """Forget all: a call has failed, and nobody uses these cells again."""
        for cell in self.values():
            # The bound calls have these lists.
            for works in (
                *(cell.input_receives, cell.grad_receives),
                *(cell.output_sends, cell.grad_sends),
            ):
                works.clear()
            Cell.__init__(cell, cell.stage, cell.microbatch, cell.learned)


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
        self.queues = plan.accelerator.queues
        self.loss_fn = plan.arguments.loss_fn if index == plan.last_stage else None
        # With the loss, if that is a module.
        self.modules = [m for m in (self.module, self.loss_fn) if isinstance(m, nn.Module)]
        self.weights = weights
        self.reduction = gradients.reductions.get(index)
        self.nonfinite = gradients.nonfinite
        self.optimizer = optimizer
        self.sharded = self.replicas = None
        if isinstance(self.module, FSDPModule):
            self.sharded = Sharded(index, self.module, plan.arguments, not plan.updates)
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

    def loss(self, cell: Cell, output: Any, target: Any, keywords: Mapping[str, Any]) -> Tensor:
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
            accumulators = partial(plan.accelerator.accumulate_on, streams("gradients", stage))
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

    if isinstance(tree, Tensor):  # at a lone leaf torch takes several microseconds
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
    """Inside, the modules of these stages are in eval mode, and nothing records gradients."""
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


_MASK = (1 << 64) - 1


def rng(seed: int, step: int, stage: int, microbatch: int) -> SavedRng:
    """Seed torch's default generators as the executor does before that stage's forward.

    >>> import torch
    >>> from schedir.runtime import rng
    >>> with rng(seed=0, step=3, stage=1, microbatch=2):
    ...     first = torch.rand(4)
    >>> with rng(seed=0, step=3, stage=1, microbatch=2):
    ...     print(torch.equal(torch.rand(4), first))
    True

    It seeds the generators of the CPU and of the current device, at the call. As a context manager
    it puts them back on leaving. `step` counts the executor's calls of `step` from 0.
    """
    generators = (torch.default_generator, *current_accelerator().generators())
    saved = SavedRng(generators)
    (found,) = Seeds(seed, stage, [microbatch]).of(step)
    seeder(generators)(found)
    return saved


class SavedRng(AbstractContextManager["SavedRng"]):
    """The state of some generators, which leaving the context restores."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._found = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Put the generators back into that state."""
        for generator, state in self._found:
            generator.set_state(state)

    def __exit__(self, *_: object) -> None:
        self.restore()


def seeder(generators: Sequence[torch.Generator]) -> Callable[[int], object]:
    """A function that seeds some generators directly: torch.manual_seed takes 100 times longer."""
    if len(generators) == 1:
        return generators[0].manual_seed

    def seed(number: int) -> None:
        for generator in generators:
            generator.manual_seed(number)

    return seed


class Seeds:
    """The seeds of one stage's forwards; microbatches are numbered over all pipelines."""

    def __init__(self, seed: int, stage: int, microbatches: Iterable[int]) -> None:
        self._seed, self._stage = seed & _MASK, _mixed(stage + 1)
        self._microbatches = [_mixed(m + 1) for m in microbatches]

    def of(self, step: int) -> list[int]:
        """The seeds of a step, by microbatch."""
        of_stage = _mixed(_mixed(self._seed ^ _mixed(step + 1)) ^ self._stage)
        return [_mixed(of_stage ^ microbatch) for microbatch in self._microbatches]


def _mixed(number: int) -> int:
    """Hash a number so that neighbours end far apart: the finaliser of SplitMix64 (Steele, Lea &
    Flood, OOPSLA 2014)."""
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
