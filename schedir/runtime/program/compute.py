"""F, R, B, I, W and OPTIM_STEP as bound calls: one function for each kind. It looks up once
everything that stays the same from call to call.

    F    seed, run the module on the cell's input, pass its output on
    B    take the gradients of the outputs, run autograd, pass the gradients of the inputs on

The common stage, one tensor in and one out, has an F with all of this in one function;
`forward_with` is for all others. Neither of an overlapped pair starts before both can. On a device
that queues its work they run on two streams:

    (0F4;7B3)       7B3's wait, 0F4, 7B3

    own stream      … ─ mark ─┬──────── 7B3 ────────┬ wait ─ …       what 7B3 waits for is there
    side stream              wait ─ 0F4 ─ mark ─────┘

Autograd runs a backward on the stream of its forward. So the forward of a pair runs on the stream,
side or own, on which the other action's forward has not run. The side stream works only within
pairs: it starts at a mark of the rank's own stream, and that waits for it at the end, so everything
after a pair comes after both. Freed memory is reused by the stream that it was made on, which
within a pair does not wait for the other stream. So memory that the first action frees is held
until the two have met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from time import perf_counter
from typing import Any, TypeAlias, cast

import attrs
import torch
from torch import Tensor
from torch._C import _FunctionBase
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map_only

from schedir.errors import ExecutionError
from schedir.ir import Entry, Kind, Together
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.arguments import Declared
from schedir.runtime.boundary import (
    EVERY,
    boundary_of,
    changes_of,
    declared,
    held_by,
    run_on,
    spreads,
    tensors_of,
)
from schedir.runtime.call import Now
from schedir.runtime.memory import refuse_changes, sharing
from schedir.runtime.plan import Plan
from schedir.runtime.program.instruction import Bound, Instruction, nothing
from schedir.runtime.stage.split_backward import input_part
from schedir.runtime.stage.stage import Cell, Stage, arguments, copy_of, no_loss
from schedir.runtime.stage.weights import run_backward

Root: TypeAlias = Tensor | GradientEdge
Output: TypeAlias = Callable[[Stage, Cell, bool], Any]
"""Runs a stage's module on the input of a cell, with a graph or not."""
Loss: TypeAlias = Callable[[Stage, Cell, Any], Tensor]


def run_module(stage: Stage, cell: Cell, with_graph: bool) -> Any:
    """Run a stage's module on the input of a cell."""
    given, extra = arguments(stage, cell, with_graph)
    return run_on(stage.module, given, extra, cell.learned.spread)


def run_loss(stage: Stage, cell: Cell, output: Any) -> Tensor:
    """The last stage's loss."""
    target, keywords = cell.target, cell.loss_keywords
    if cell.learned.changes_target:
        target, keywords = copy_of(target), copy_of(keywords)
    return stage.loss(cell, output, target, keywords)


def forward(stage: Stage, cell: Cell, now: Now, trains: bool, replayed: bool) -> Bound:
    """F of a known input signature; on the last stage it computes the loss as well.

    With `replayed` a RECOMPUTE is listed for it: it keeps its input, and makes no graph.
    """
    learned = cell.learned
    is_plain = (
        (trains and not replayed and not stage.queues and not learned.changes_extra)
        and (not any(learned.changes_inputs) and not learned.other_layout)
        and not (learned.spread or learned.copied)
        and (stage.index == 0 or learned.before.single)
    )
    if is_plain and stage.loss_fn is None and learned.after.single and not learned.after.declared:
        return _plain_forward(stage, cell)
    if is_plain and stage.loss_fn is not None and not learned.changes_target:
        return _plain_last_forward(stage, cell, now)
    return forward_with(stage, cell, now, trains, replayed)


def _plain_forward(stage: Stage, cell: Cell) -> Bound:
    """F of a stage that turns one tensor into one, with a graph and nothing beside that."""
    module, seed, seeds, m = stage.module, stage.seed, stage.seeds, cell.microbatch
    is_first, following, busy = stage.index == 0, cell.following, stage.busy
    agreed, index = cell.learned.after.tensors, stage.index
    (meta,) = cell.learned.after.metas
    shape, stride, dtype, requires_grad = meta.shape, meta.stride, meta.dtype, meta.requires_grad

    def call() -> None:
        began = perf_counter()
        seed(seeds[m])
        given = cell.batch if is_first else cell.leaves[0]
        output = module(given) if cell.extra is None else run_module(stage, cell, True)
        if not (
            isinstance(output, Tensor)
            and (output.shape == shape and output.dtype is dtype)
            and (output.requires_grad is requires_grad and output.stride() == stride)
        ):
            (output,) = agreed(output, index)
        if following is not None:
            following.leaves = (output.detach().requires_grad_(requires_grad),)
        else:
            cell.outputs_to_send = (output,)
        edge = None
        if requires_grad:
            node: Any = output.grad_fn
            if node is None or isinstance(node, _FunctionBase):  # torch keeps that alive
                edge = get_gradient_edge(output)
            else:
                edge = GradientEdge(node, output.output_nr)
        cell.outputs = (edge,)
        busy[0] += perf_counter() - began

    return call


def _plain_last_forward(stage: Stage, cell: Cell, now: Now) -> Bound:
    """F of a last stage that is given one tensor, with a graph and nothing beside that."""
    module, seed, seeds, m = stage.module, stage.seed, stage.seeds, cell.microbatch
    is_first, busy, nonfinite, run = stage.index == 0, stage.busy, stage.nonfinite, stage.loss_fn
    isfinite = math.isfinite
    assert run is not None  # asked of the last stage

    def call() -> None:
        began = perf_counter()
        seed(seeds[m])
        given = cell.batch if is_first else cell.leaves[0]
        output = module(given) if cell.extra is None else run_module(stage, cell, True)
        keeps = now.call.keeps
        kept = None if keeps is None else _for_caller(cell, output, has_loss=True)
        if cell.loss_share:
            loss = run(output, cell.target, **cell.loss_keywords)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
                raise no_loss(loss)
        else:
            loss = run_loss(stage, cell, output)
        value = cell.loss = loss.item()
        if not isfinite(value):
            cell.loss_share = nonfinite.share_of_unfinite(value, m, cell.loss_share)
        cell.outputs = (loss,)
        if keeps is not None:
            cell.result = keeps(kept, cell.target)
        busy[0] += perf_counter() - began

    return call


def forward_with(
    stage: Stage,
    cell: Cell,
    now: Now,
    trains: bool,
    replayed: bool,
    output: Output = run_module,
    loss: Loss = run_loss,
    learns: bool = False,
) -> Bound:
    """F by these functions; one that `learns` keeps all attributes of a module that is run again,
    and makes a graph all the same, which tells what its R will make requires grad."""

    def once(with_graph: bool) -> None:
        made = output(stage, cell, with_graph)
        if stage.loss_fn is None:
            _hand_on(cell, made, with_graph)
            return
        call, keeps = now.call, now.call.keeps
        # The loss may work in place, and so may what is made of the output, after it.
        kept = None if keeps is None else _for_caller(cell, made, call.has_loss)
        if call.has_loss:
            found = loss(stage, cell, made)
            cell.loss, cell.loss_share = stage.nonfinite.loss(
                found, cell.microbatch, cell.loss_share, trains
            )
            if with_graph:
                cell.outputs = (found,)
        if keeps is not None:
            cell.result = keeps(kept, cell.target)

    def call() -> None:
        began = perf_counter()
        stage.seed(stage.seeds[cell.microbatch])
        if not trains:
            once(with_graph=False)
            cell.leaves = ()  # no backward will ask for them
        elif replayed:
            graph: AbstractContextManager[object] = nullcontext() if learns else torch.no_grad()
            with graph, stage.buffers.keeping(learns) as cell.kept:
                once(with_graph=False)
        else:
            once(with_graph=True)
        stage.busy[0] += perf_counter() - began

    return call


def first_forward(
    stage: Stage,
    cell: Cell,
    now: Now,
    trains: bool,
    replayed: bool,
    described: bool,
    given: Mapping[int, Declared],
) -> Bound:
    """F at a described boundary: runs the module, on real values, and learns what it changes; what
    it returns, if the boundary after it is `described`. Until that is known, tensors that may be
    changed in place are copied first. Boundaries of which examples are `given` are as these are."""

    def output(stage: Stage, cell: Cell, with_graph: bool) -> Any:
        learned = cell.learned
        learned.forget()
        taken, extra = arguments(stage, cell, with_graph)
        passed, lent = tensors_of(taken), tensors_of(extra)
        of_inputs, beside = changes_of(passed), changes_of(lent)
        again = replayed or stage.weights.stashes
        own = changes_of(stage.module.parameters() if again else ())
        learned.spread = spreads(stage.module, taken, extra)
        made = run_on(stage.module, taken, extra, learned.spread)
        changes = of_inputs()
        learned.changes_inputs = tuple(changes) if stage.index else (any(changes),)
        learned.changes_extra = any(beside())
        if any(own()):
            raise ExecutionError(
                f"stage {stage.index} changes one of its parameters in place in its forward, but "
                "that runs again (recompute=), or on copies of older weight versions; make the "
                "parameter a buffer"
            )
        if stage.index:
            refuse_changes((n for n, there in enumerate(changes) if there), learned.aliases)
        else:
            passed, lent = [], [*passed, *lent]
        learned.copied, aliases = sharing(
            tensors_of(made), passed, held_by([stage.module]), lent, learned.aliases
        )
        if stage.loss_fn is None and described:
            learned.after, learned.aliases_after = boundary_of(made), aliases
            if stage.index in given:
                tensors = (*stage.module.parameters(), *passed, *lent)
                trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
                learned.after = declared(given[stage.index], trained)
            if cell.following is not None:
                following = cell.following.learned
                following.before, following.aliases = learned.after, aliases
        return made

    def loss(stage: Stage, cell: Cell, output: Any) -> Tensor:
        target, keywords = copy_of(cell.target), copy_of(cell.loss_keywords)
        changes = changes_of(tensors_of((target, keywords)))
        found = stage.loss(cell, output, target, keywords)
        cell.learned.changes_target = any(changes())
        return found

    return forward_with(stage, cell, now, trains, replayed, output, loss, learns=True)


def _hand_on(cell: Cell, output: Any, with_graph: bool) -> None:
    """Give a stage's output to the next one, and keep where its backward starts."""
    learned, following = cell.learned, cell.following
    made = learned.after.tensors(output, cell.stage, with_graph)
    handed = [
        tensor.detach().clone() if number in learned.copied else tensor
        for number, tensor in enumerate(made)
    ]
    if following is not None:
        metas = following.learned.before.metas
        following.leaves = tuple(
            tensor.detach().requires_grad_(meta.requires_grad)
            for tensor, meta in zip(handed, metas, strict=True)
        )
    else:
        cell.outputs_to_send = tuple([tensor.detach() for tensor in handed])
    # Without a graph a view of a parameter still says that it requires grad.
    if with_graph:
        cell.outputs = _edges_of(made)


def _edges_of(outputs: Sequence[Tensor]) -> tuple[GradientEdge | None, ...]:
    """Where a backward starts, without the outputs themselves."""
    return tuple([get_gradient_edge(t) if t.requires_grad else None for t in outputs])


def _for_caller(cell: Cell, output: Any, has_loss: bool) -> Any:
    """The last stage's output, without its graph, with copies of tensors that may change later."""
    copied: Collection[int] = EVERY if has_loss else cell.learned.copied
    numbers = count()
    return tree_map_only(
        Tensor,
        lambda x: x.detach().clone() if next(numbers) in copied else x.detach(),
        output,
    )


def recompute(stage: Stage, cell: Cell) -> Bound:
    """R: the forward again, with its graph, on the buffers and random numbers that it had."""

    def call() -> None:
        began = perf_counter()
        kept = cell.kept
        assert kept is not None  # the F before it has left that
        stage.seed(stage.seeds[cell.microbatch])
        with stage.buffers.as_kept(kept):
            output = run_module(stage, cell, True)
            if stage.loss_fn is None:
                made = cell.learned.after.tensors(output, stage.index)
                cell.outputs = _edges_of(made)
            else:
                cell.outputs = (run_loss(stage, cell, output),)
        cell.kept = None
        stage.busy[0] += perf_counter() - began

    return call


def _roots(stage: Stage, cell: Cell) -> tuple[list[Root], list[Tensor]]:
    """The outputs to start from, and their gradients; the loss's own is its share."""
    if stage.loss_fn is not None:
        loss = cast(Tensor, cell.outputs[0])  # it goes nowhere
        if not loss.requires_grad:
            raise ExecutionError(
                "the loss depends on nothing that requires grad: all its parameters are "
                "frozen, or it is detached from them; thaw the parameters to train"
            )
        share = cell.loss_share
        if isinstance(share, Tensor):
            return [loss], [share.to(loss.dtype).expand_as(loss)]
        return [loss], [torch.full_like(loss, share)]
    there = [True] * len(cell.outputs) if cell.mask is None else cell.mask.tolist()
    cell.mask = None
    # Of a declared boundary the next stage can't know what requires none.
    found = [
        (output, grad)
        for output, grad, is_there in zip(cell.outputs, cell.output_grads, there, strict=True)
        if is_there and grad is not None and output is not None
    ]
    return [output for output, _ in found], [grad for _, grad in found]


def learn_gradients(cell: Cell) -> None:
    """Learn which gradients of its inputs a backward has made, and how they lie in memory."""
    previous = cell.previous
    cell.learned.sends_back(cell.input_grads if previous is None else previous.output_grads)


def backward(stage: Stage, cell: Cell, version: int) -> Bound:
    """B: the gradients of the input and of the parameters."""
    weights, busy, previous = stage.weights, stage.busy, cell.previous
    is_last = stage.loss_fn is not None
    makes_share = is_last and not stage.queues

    def call() -> None:
        began = perf_counter()
        roots: Sequence[Any] = cell.outputs
        grads: Sequence[Any] = cell.output_grads
        if makes_share and roots[0].requires_grad:
            kept, share = cell.root_grad, cell.loss_share
            if kept is None or kept[0] != share or kept[1].dtype is not roots[0].dtype:
                kept = cell.root_grad = share, torch.full_like(roots[0], cast(float, share))
            grads = (kept[1],)
        elif (
            is_last
            or cell.mask is not None
            or len(grads) != 1
            or grads[0] is None
            or roots[0] is None
        ):
            roots, grads = _roots(stage, cell)
        if roots:
            run_backward(tuple(roots), tuple(grads))
        leaves = cell.leaves
        found: tuple[Tensor | None, ...] = ()
        if len(leaves) == 1:  # as nearly always
            found = (leaves[0].grad,)
        elif leaves:
            found = tuple([leaf.grad for leaf in leaves])
        if cell.computed_grads:
            computed = cell.computed_grads
            found = tuple([computed.pop(n, grad) for n, grad in enumerate(found)])
        if previous is not None:
            previous.output_grads = found
        else:
            cell.input_grads = found
        cell.leaves = cell.outputs = cell.output_grads = ()
        if weights.collects:
            weights.collect(version, grads, found)
        busy[0] += perf_counter() - began

    return call


def backward_input(stage: Stage, cell: Cell, version: int, earlier: Sequence[Cell] | None) -> Bound:
    """I: the gradients of the input, and what is left to W.

    It adds the gradients of parameters that it computes, but for those of which `earlier` cells
    have one left to add. None leaves all to W.
    """
    weights, previous = stage.weights, cell.previous

    def call() -> None:
        began = perf_counter()
        roots, grads = _roots(stage, cell)
        wanted = [leaf for leaf in cell.leaves if leaf.requires_grad]
        found, part = input_part(roots, grads, wanted)
        cell.weight_part = part
        cell.computed_grads.clear()
        in_order = iter(found)
        handed = tuple([next(in_order) if t.requires_grad else None for t in cell.leaves])
        if previous is not None:
            previous.output_grads = handed
        else:
            cell.input_grads = handed
        cell.leaves = cell.outputs = cell.output_grads = ()
        if earlier is not None and part.found:
            part.add_found(c.weight_part for c in earlier if c.weight_part is not None)
            if weights.collects:
                weights.collect(version)
        stage.busy[0] += perf_counter() - began

    return call


def backward_weight(stage: Stage, cell: Cell, version: int) -> Bound:
    """W: the gradients of the parameters."""
    weights = stage.weights

    def call() -> None:
        began = perf_counter()
        if cell.weight_part is not None:
            part, cell.weight_part = cell.weight_part, None
            part.run()
        if weights.collects:
            weights.collect(version)
        stage.busy[0] += perf_counter() - began

    return call


def optim_step(stage: Stage, step: int, now: Now) -> Bound:
    """OPTIM_STEP number `step` of a stage in a call: applies the accumulated gradients to the
    newest weights, unless it is left out, and clears them. This makes the next version, unless a
    replica here has."""
    makes, weights, optimizer = step + 1, stage.weights, stage.optimizer
    nonfinite = stage.nonfinite

    def call() -> None:
        if not now.call.updates or weights.latest >= makes:
            return
        began = perf_counter()
        if optimizer is not None:  # a stage without parameters has none
            if not nonfinite.leaves_out:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        weights.begin(makes)
        stage.busy[0] += perf_counter() - began

    return call


def wait_of(instruction: Instruction) -> Instruction:
    """What an instruction waits for, by itself: listed first, it has nothing left to wait for."""
    return attrs.evolve(instruction, run=nothing, computes=False, listed=False)


def forwards_aside(entries: Iterable[Entry]) -> dict[int, int]:
    """The pairs of a rank's list, by index, whose forward runs on the side stream; with its
    stage."""
    aside: set[tuple[int, int | None]] = set()  # the (stage, microbatch) whose graph is there
    found = {}
    for index, entry in enumerate(entries):
        if not isinstance(entry, Together):
            if entry.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                aside.discard((entry.stage, entry.microbatch))
            continue
        for action in entry.actions:
            others = [(a.stage, a.microbatch) for a in entry.actions if a is not action]
            if action.kind is Kind.FORWARD and aside.isdisjoint(others):
                aside.add((action.stage, action.microbatch))
                found[index] = action.stage
    return found


def on_several_streams(plan: Plan) -> set[int]:
    """The stages here that several streams of a device compute: those of several ranks, or of
    pairs, whose forwards run on the side stream and on the rank's own."""
    if not plan.accelerator.queues:
        return set()
    asides = (forwards_aside(plan.schedule.actions[rank]) for rank in plan.local_ranks)
    held = {stage for stage in plan.local_stages if len(plan.local_holders(stage)) > 1}
    return held.union(*(aside.values() for aside in asides))


@attrs.define(eq=False)
class Pair:
    """One pair; `_cell` is that of its first action, `_side` the stream beside the rank's own."""

    _accelerator: Accelerator
    _side: Any
    _cell: Cell
    _held: object = None

    def abreast(
        self, first: Instruction, second: Instruction, forward_aside: bool
    ) -> list[Instruction]:
        """The instructions of the pair, in the order of the list: the first one forks the side
        stream, the second joins it. The forward runs there with `forward_aside`, else the other."""
        began, ended = (
            self._on_side(one.run)
            if (one.action.kind is Kind.FORWARD) == forward_aside
            else one.run
            for one in (first, second)
        )

        def begin() -> None:
            self._part()
            try:
                began()
            except BaseException:
                self._meet()
                raise

        def end() -> None:
            try:
                ended()
            finally:
                self._meet()

        return [attrs.evolve(first, run=begin), attrs.evolve(second, run=end)]

    def _on_side(self, run: Bound) -> Bound:
        def aside() -> None:
            with self._accelerator.on(self._side):
                run()

        return aside

    def _part(self) -> None:
        """The side stream is behind all that was before the pair."""
        self._held = _shared(self._cell)
        ready = self._accelerator.mark()
        with self._accelerator.on(self._side):
            ready.wait()

    def _meet(self) -> None:
        """What follows is behind both."""
        with self._accelerator.on(self._side):
            done = self._accelerator.mark()
        done.wait()
        self._held = None


def _shared(cell: Cell) -> object:
    """The tensors of a cell that either stream may have made."""
    return cell.leaves, cell.outputs, cell.output_grads
