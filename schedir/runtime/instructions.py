"""The actions of a list as bound calls, each resolved once; their tensors lie in cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._pytree import tree_map_only

from schedir.errors import ExecutionError
from schedir.runtime.boundary import TensorMeta, empty, empty_with_header, payload
from schedir.runtime.cells import Cell, wait
from schedir.runtime.reduction import Reduction
from schedir.runtime.rng import seed_generators
from schedir.runtime.split import input_part
from schedir.runtime.statistics import Statistics
from schedir.runtime.transport import Transport, Work
from schedir.runtime.weights import StageWeights

Arrived: TypeAlias = Sequence[list[Work]]
"""The sends that have arrived by the time that a compute action has what it waits for."""


class StepState:
    """What all instructions of a rank share during one step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.busy = 0.0
        self.update = True
        self.wants_loss = True
        self.wants_outputs = False
        self.agreement = 0  # the number of what this step's boundaries are


class Stage:
    """One local stage: its module, its weights, and what the last stage needs for the loss.

    With `recompute` a forward keeps its input alone, and the backward runs it again.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        weights: StageWeights,
        device: torch.device,
        loss_fn: Callable[..., Tensor] | None,
        recompute: bool,
        reduction: Reduction | None,
        state: StepState,
    ) -> None:
        self.index = index
        self.module = module
        self.weights = weights
        self.device = device
        self.loss_fn = loss_fn
        self.recompute = recompute
        self.reduction = reduction
        self.statistics = Statistics(module)
        self.state = state

    def output(self, cell: Cell, keep_input: bool) -> Any:
        """Run the module on the cell's input; `keep_input` if it will be run again."""
        state = self.state
        seed_generators(state.seed, state.step, self.index, cell.draw)
        if self.index == 0:
            given = cell.batch
            if any(cell.wiring.mutates):
                given = tree_map_only(Tensor, torch.clone, given)
        else:
            given = cell.wiring.before.structure(_arguments(cell))
            if not keep_input:
                cell.inputs = ()
        return cell.wiring.call(self.module, given, cell.extra)

    def loss(self, cell: Cell, output: Any) -> Tensor:
        """The last stage's loss."""
        assert self.loss_fn is not None  # asked of the last stage
        loss = self.loss_fn(output, cell.target, **cell.loss_keywords)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            raise ExecutionError("loss_fn must return a real scalar tensor: the microbatch's mean")
        return loss


def _arguments(cell: Cell) -> list[Tensor]:
    """The inputs as leaves that a backward can stop at."""
    leaves, arguments = [], []
    wiring = cell.wiring
    for tensor, meta, mutated in zip(cell.inputs, wiring.before.metas, wiring.mutates, strict=True):
        leaf = tensor.detach().requires_grad_(meta.requires_grad)
        leaves.append(leaf)
        # A leaf can't be changed in place, and a neighbour's output must not be.
        arguments.append(leaf.clone() if mutated else leaf)
    cell.leaves = tuple(leaves)
    return arguments


class Forward:
    """FORWARD at a weight version; on the last stage it computes the loss as well."""

    def __init__(
        self, stage: Stage, cell: Cell, version: int, last_read: bool, arrived: Arrived = ()
    ) -> None:
        self.stage, self.cell, self.version, self.last_read = stage, cell, version, last_read
        self.coming, self.arrived = cell.inputs_coming, arrived

    def __call__(self) -> None:
        """Run the action."""
        cell, stage = self.cell, self.stage
        if self.coming:
            wait(self.coming)
            for works in self.arrived:
                wait(works)
        started = perf_counter()
        stage.weights.install(self.version)
        if not torch.is_grad_enabled():
            self._run(with_graph=False, keep_input=False)
        elif stage.recompute:
            with torch.no_grad(), stage.statistics.keeping() as cell.statistics:
                self._run(with_graph=False, keep_input=True)
        else:
            self._run(with_graph=True, keep_input=False)
        if self.last_read:
            stage.weights.release(self.version)
        stage.state.busy += perf_counter() - started

    def _run(self, with_graph: bool, keep_input: bool) -> None:
        cell, stage = self.cell, self.stage
        output = stage.output(cell, keep_input)
        if stage.loss_fn is None:
            cell.outputs = cell.wiring.after.tensors(output, with_graph)
            if cell.following is not None:
                cell.following.inputs = cell.outputs
        else:
            if stage.state.wants_outputs:
                cell.result = tree_map_only(Tensor, torch.detach, output)
            if stage.state.wants_loss:
                loss = stage.loss(cell, output)
                cell.loss = loss.detach().clone()  # it is read later, and may be a buffer
                cell.outputs = (loss,)
        if not with_graph:  # no backward will ask for them
            cell.leaves = ()
            if stage.loss_fn is not None or cell.following is not None:
                cell.outputs = ()


class Backward:
    """BACKWARD, or with `part` just the gradient of the input or of the weights."""

    def __init__(
        self,
        stage: Stage,
        cell: Cell,
        version: int,
        last_read: bool,
        arrived: Arrived = (),
        part: str | None = None,
    ) -> None:
        self.stage, self.cell, self.version, self.last_read = stage, cell, version, last_read
        self.coming: list[Work] = [] if part == "weight" else cell.grads_coming
        self.arrived, self.part = arrived, part

    def __call__(self) -> None:
        """Run the action."""
        cell, stage = self.cell, self.stage
        if self.coming:
            wait(self.coming)
            for works in self.arrived:
                wait(works)
        started = perf_counter()
        stage.weights.install(self.version)
        if self.part == "weight":
            self._weights()
        else:
            if stage.recompute:
                self._run_again()
            roots, grads = self._roots()
            if self.part == "input":
                self._inputs(roots, grads)
            else:
                if roots:
                    _backward(roots, grads)
                self._hand_on(tuple(leaf.grad for leaf in cell.leaves))
            cell.leaves = cell.outputs = cell.output_grads = ()
        if self.part != "input":
            stage.weights.collect(self.version)
        if self.last_read:
            stage.weights.release(self.version)
        stage.state.busy += perf_counter() - started

    def _inputs(self, roots: list[Tensor], grads: list[Tensor]) -> None:
        cell = self.cell
        wanted = [leaf for leaf in cell.leaves if leaf.requires_grad]
        found, cell.weight_part = input_part(roots, grads, wanted)
        in_order = iter(found)
        self._hand_on(tuple(next(in_order) if t.requires_grad else None for t in cell.leaves))

    def _weights(self) -> None:
        part = self.cell.weight_part
        if part is not None:
            self.cell.weight_part = None
            part.run()

    def _run_again(self) -> None:
        """The forward, this time with its graph, on the buffers and random numbers that it had."""
        cell, stage = self.cell, self.stage
        with stage.statistics.as_kept(cell.statistics):
            output = stage.output(cell, keep_input=False)
            if stage.loss_fn is None:
                cell.outputs = cell.wiring.after.tensors(output)
            else:
                cell.outputs = (stage.loss(cell, output),)
        cell.statistics = ()

    def _roots(self) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs to start from, and their gradients; the loss's own is its weight."""
        cell = self.cell
        if self.stage.loss_fn is not None:
            loss = cell.outputs[0]
            return [loss], [torch.full_like(loss, cell.weight)]
        if cell.mask is not None:
            came = cell.mask.tolist()
            cell.output_grads = tuple(
                grad if there else None for grad, there in zip(cell.output_grads, came, strict=True)
            )
            cell.mask = None
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        for output, grad in zip(cell.outputs, cell.output_grads, strict=True):
            if grad is not None:
                roots.append(output)
                grads.append(grad)
        return roots, grads

    def _hand_on(self, grads: tuple[Tensor | None, ...]) -> None:
        cell = self.cell
        arrives = tuple(grad is not None for grad in grads)
        agreed = cell.wiring.grads_out
        if agreed is not None and arrives != agreed:
            raise ExecutionError(
                f"gradients of the stage's inputs: {_yes_no(agreed)} was agreed with the stage "
                f"before, but {_yes_no(arrives)} came out; which inputs get a gradient must "
                "depend neither on data nor on parameters frozen since the first step"
            )
        cell.input_grads = grads
        if cell.previous is not None:
            cell.previous.output_grads = grads


class _Transfer:
    """One end of a transfer: of a cell's activations or, with `grads`, of its gradients.

    With `opens` the receiver learns from it which agreement the step is under.
    """

    def __init__(
        self,
        cell: Cell,
        transport: Transport,
        peer: int,
        grads: bool,
        stage: Stage,
        opens: bool = False,
    ) -> None:
        self.cell, self.transport, self.peer, self.grads = cell, transport, peer, grads
        self.stage, self.opens = stage, opens


class Send(_Transfer):
    """SEND_ACT or SEND_GRAD: posts the cell's outputs, or the gradients of its inputs."""

    def __call__(self) -> None:
        """Run the action."""
        cell, wiring = self.cell, self.cell.wiring
        if self.grads:
            grads = cell.input_grads
            cell.input_grads = ()
            if wiring.grads_out is None:
                there = [grad is not None for grad in grads]
                self._post(torch.tensor(there, device=self.stage.device))
                grads = tuple(
                    empty(meta, self.stage.device).zero_()
                    if grad is None and meta.requires_grad
                    else grad
                    for grad, meta in zip(grads, wiring.before.metas, strict=True)
                )
            for grad, meta in zip(grads, wiring.before.metas, strict=True):
                if grad is not None:
                    self._post(payload(grad, meta))
            return
        opens = self.opens
        if opens and not cell.outputs:
            self._post(self._with_header(None, None))
        for tensor, meta in zip(cell.outputs, wiring.after.metas, strict=True):
            if opens:
                self._post(self._with_header(tensor, meta))
                opens = False
            # What the stage has not made itself, its owner may change before it has arrived.
            elif not tensor.requires_grad or _is_shared(tensor):
                self._post(payload(tensor.clone(), meta))
            else:
                self._post(payload(tensor, meta))
        if self.stage.recompute or not torch.is_grad_enabled():
            cell.outputs = ()  # no backward will ask for them

    def _post(self, content: Tensor) -> None:
        going = self.cell.grads_going if self.grads else self.cell.outputs_going
        going.append(self.transport.send(content, self.peer))

    def _with_header(self, tensor: Tensor | None, meta: TensorMeta | None) -> Tensor:
        content, header, *views = empty_with_header(meta, self.stage.device)
        header.fill_(self.stage.state.agreement)
        if tensor is not None:
            views[0].copy_(tensor.detach())
        return content

    def blank(self) -> None:
        """Send as much without meaning, to a receive that was posted for what does not come."""
        wiring = self.cell.wiring
        if self.grads:
            comes = wiring.grads_out
            if comes is None:
                flags = torch.zeros(len(wiring.before.metas), dtype=torch.bool)
                self._post(flags.to(self.stage.device))
                comes = tuple(meta.requires_grad for meta in wiring.before.metas)
            metas = [m for m, there in zip(wiring.before.metas, comes, strict=True) if there]
        else:
            metas = list(wiring.after.metas)
        if self.opens:
            self._post(self._with_header(None, metas.pop(0) if metas else None))
        for meta in metas:
            self._post(payload(empty(meta, self.stage.device), meta))


class Receive(_Transfer):
    """RECV_ACT or RECV_GRAD: posts buffers for what was agreed to come."""

    def __call__(self) -> None:
        """Run the action."""
        cell, wiring = self.cell, self.cell.wiring
        if self.grads:
            metas = wiring.after.metas
            expected = wiring.grads_in
            if expected is None:
                expected = tuple(meta.requires_grad for meta in metas)
                cell.mask = torch.empty(len(metas), dtype=torch.bool, device=self.stage.device)
                self._post(cell.mask)
            cell.output_grads = tuple(
                self._buffer(meta) if comes else None
                for meta, comes in zip(metas, expected, strict=True)
            )
        elif self.opens:
            first, *others = wiring.before.metas or (None,)
            content, cell.header, *views = empty_with_header(first, self.stage.device)
            self._post(content)
            rest = [self._buffer(meta) for meta in others if meta is not None]
            cell.inputs = (*views, *rest)
        else:
            cell.inputs = tuple(self._buffer(meta) for meta in wiring.before.metas)

    def _buffer(self, meta: TensorMeta) -> Tensor:
        buffer = empty(meta, self.stage.device)
        self._post(payload(buffer, meta))
        return buffer

    def _post(self, buffer: Tensor) -> None:
        coming = self.cell.grads_coming if self.grads else self.cell.inputs_coming
        coming.append(self.transport.receive(buffer, self.peer))


class ReduceGrad:
    """REDUCE_GRAD: posts the sums of the gradients over all processes that run the stage."""

    def __init__(self, reduction: Reduction, state: StepState) -> None:
        self.reduction, self.state = reduction, state

    def __call__(self) -> None:
        """Run the action."""
        # Without an update the sum can wait: gradients add up here until there is one.
        if self.state.update or self.reduction.keeps_earlier:
            self.reduction.post()


class OptimStep:
    """OPTIM_STEP: applies the accumulated gradients to the newest weights, and clears them."""

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer | None, makes: int) -> None:
        self.stage, self.optimizer, self.makes = stage, optimizer, makes

    def __call__(self) -> None:
        """Run the action."""
        if not self.stage.state.update:
            return
        started = perf_counter()
        if self.optimizer is not None:  # a stage without parameters has none
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.stage.weights.begin(self.makes)
        self.stage.state.busy += perf_counter() - started


def _backward(roots: list[Tensor], grads: list[Tensor]) -> None:
    """What torch.autograd.backward does, but for its look at the gradients' shapes, which have been
    agreed on: that takes as long as the forward of a small stage."""
    _engine_run_backward(
        tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _is_shared(tensor: Tensor) -> bool:
    """Whether a tensor that requires grad may be a parameter, or a view of one."""
    return tensor.is_leaf or tensor._base is not None


def _yes_no(flags: tuple[bool, ...]) -> str:
    return f"({', '.join('yes' if flag else 'no' for flag in flags)})"
