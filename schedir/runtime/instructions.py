"""The actions of a list as bound calls, each resolved once; their tensors lie in cells.

What an action waits for has been waited for when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._pytree import tree_map_only

from schedir.errors import ExecutionError
from schedir.runtime.boundary import Grads, TensorMeta, empty, payload
from schedir.runtime.cells import Cell
from schedir.runtime.reduction import Reduction
from schedir.runtime.request import STEP, Request
from schedir.runtime.rng import seed_generators
from schedir.runtime.split import input_part
from schedir.runtime.statistics import Statistics
from schedir.runtime.transport import Transport
from schedir.runtime.weights import StageWeights


class StepState:
    """What all instructions of a rank share during one call.

    `step` counts the calls of `step`, for the seeds. `autocast` are the types of device on which
    the caller computes in lower precision, which forwards alone do.
    """

    def __init__(self, seed: int, step: int) -> None:
        self.seed = seed
        self.step = step
        self.busy = 0.0
        self.request: Request = STEP
        self.keeps_outputs = False
        self.autocast: Sequence[str] = ()

    @contextmanager
    def forwards_apart(self) -> Iterator[None]:
        """Run a list inside: backwards and updates are in the types of what they work on."""
        self._set_autocast(False)
        try:
            yield
        finally:
            self._set_autocast(True)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward inside, in the precision that the caller has asked for."""
        self._set_autocast(True)
        try:
            yield
        finally:
            self._set_autocast(False)

    def _set_autocast(self, enabled: bool) -> None:
        for device in self.autocast:
            torch.set_autocast_enabled(device, enabled)


class Stage:
    """One local stage: its module, its weights, and what the last stage needs for the loss.

    `holder` has the module, and the loss where that is one, as its children. With `recompute` a
    forward keeps its input alone, and the backward runs it again.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        holder: nn.Module,
        weights: StageWeights,
        device: torch.device,
        loss_fn: Callable[..., Tensor] | None,
        recompute: bool,
        reduction: Reduction | None,
        state: StepState,
    ) -> None:
        self.index = index
        self.module = module
        self.holder = holder
        self.weights = weights
        self.device = device
        self.loss_fn = loss_fn
        self.recompute = recompute
        self.reduction = reduction
        self.statistics = Statistics(holder)
        self.state = state

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """What is told of eval mode: the module, and the loss where that is one."""
        if self.holder is self.module:
            return (self.module,)
        return tuple(self.holder.children())

    def output(self, cell: Cell, keep_input: bool) -> Any:
        """Run the module on the cell's input; `keep_input` if it will be run again."""
        state, wiring = self.state, cell.wiring
        seed_generators(state.seed, state.step, self.index, cell.draw)
        extra = _copy_of(cell.extra) if wiring.mutates_extra else cell.extra
        if self.index == 0:
            given = _copy_of(cell.batch) if any(wiring.mutates) else cell.batch
            return wiring.call(self.module, given, extra)
        arguments = _arguments(cell)
        if not keep_input:
            cell.inputs = ()
        output = wiring.call(self.module, wiring.before.structure(arguments), extra)
        if wiring.watched is not None:
            # No fake run could tell whether the module changes its inputs.
            changed = [number for number, tensor in enumerate(arguments) if tensor._version]
            reason = wiring.watched.forbid(changed)
            if reason is not None:
                raise ExecutionError(reason)
        return output

    def loss(self, cell: Cell, output: Any) -> Tensor:
        """The last stage's loss."""
        assert self.loss_fn is not None  # asked of the last stage
        target, keywords = cell.target, cell.loss_keywords
        if cell.wiring.mutates_target:
            target, keywords = _copy_of(target), _copy_of(keywords)
        loss = self.loss_fn(output, target, **keywords)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            got = type(loss).__name__
            if isinstance(loss, Tensor):
                got = f"{loss.dtype} of shape {list(loss.shape)}"
            raise ExecutionError(
                f"loss_fn must return a real scalar tensor, the microbatch's mean, not {got}"
            )
        return loss


def _copy_of(tree: Any) -> Any:
    """A copy of the tensors; what stands there twice is copied once, and so stays one tensor."""
    copies: dict[object, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        return copies.setdefault(key, tensor.clone())

    return tree_map_only(Tensor, copied, tree)


def _arguments(cell: Cell) -> list[Tensor]:
    """The inputs as leaves that a backward can stop at."""
    leaves, arguments = [], []
    wiring = cell.wiring
    for tensor, meta, mutated in zip(cell.inputs, wiring.before.metas, wiring.mutates, strict=True):
        leaf = tensor.detach().requires_grad_(meta.requires_grad)
        leaves.append(leaf)
        # A leaf can't be changed in place, and a neighbour's output must not be.
        arguments.append(leaf.clone() if mutated else leaf)
    for number in wiring.turned:
        leaves[number].register_hook(partial(cell.turned.__setitem__, number))
    cell.leaves = tuple(leaves)
    return arguments


class Forward:
    """FORWARD at a weight version; on the last stage it computes the loss as well."""

    def __init__(self, stage: Stage, cell: Cell, version: int, last_read: bool) -> None:
        self.stage, self.cell, self.version, self.last_read = stage, cell, version, last_read

    def __call__(self) -> None:
        """Run the action."""
        stage = self.stage
        started = perf_counter()
        stage.weights.install(self.version)
        if stage.state.autocast:
            with stage.state.forward():
                self._run()
        else:
            self._run()
        if self.last_read:
            stage.weights.release(self.version)
        stage.state.busy += perf_counter() - started

    def _run(self) -> None:
        cell, stage = self.cell, self.stage
        if not torch.is_grad_enabled():
            self._once(with_graph=False, keep_input=False)
        elif stage.recompute:
            with torch.no_grad(), stage.statistics.keeping(cell.wiring.state) as cell.statistics:
                self._once(with_graph=False, keep_input=True)
        else:
            self._once(with_graph=True, keep_input=False)

    def _once(self, with_graph: bool, keep_input: bool) -> None:
        cell, stage = self.cell, self.stage
        output = stage.output(cell, keep_input)
        if stage.loss_fn is None:
            cell.outputs = cell.wiring.after.tensors(output, with_graph)
            handed, copied = cell.outputs, cell.wiring.copied
            if copied:
                handed = _apart(handed, copied)
            if cell.following is not None:
                cell.following.inputs = handed
            else:
                cell.handed = handed
        else:
            if stage.state.keeps_outputs:
                cell.result = tree_map_only(Tensor, torch.detach, output)
            if stage.state.request.has_loss:
                loss = stage.loss(cell, output)
                cell.loss = loss.detach().clone()  # it is read later, and may be a buffer
                cell.outputs = (loss,)
        if not with_graph:  # no backward will ask for them
            cell.leaves = cell.outputs = ()


def _apart(outputs: tuple[Tensor, ...], copied: Collection[int]) -> tuple[Tensor, ...]:
    """A stage's outputs for the next one, with copies of those that somebody may change before they
    are used: of a buffer, say, which the stage's next forward updates."""
    return tuple(
        tensor.detach().clone() if number in copied else tensor
        for number, tensor in enumerate(outputs)
    )


class Backward:
    """BACKWARD, or with `part` just the gradient of the input or of the weights."""

    def __init__(
        self, stage: Stage, cell: Cell, version: int, last_read: bool, part: str | None = None
    ) -> None:
        self.stage, self.cell, self.version, self.last_read = stage, cell, version, last_read
        self.part = part

    def __call__(self) -> None:
        """Run the action."""
        cell, stage = self.cell, self.stage
        started = perf_counter()
        stage.weights.install(self.version)
        if self.part == "weight":
            self._weights()
            stage.weights.collect(self.version)
        else:
            if stage.recompute:
                self._run_again()
            roots, grads = self._roots()
            if self.part == "input":
                self._inputs(roots, grads)
            else:
                if roots:
                    _backward(roots, grads)
                handed = tuple(leaf.grad for leaf in cell.leaves)
                if cell.turned:
                    handed = tuple(cell.turned.pop(n, grad) for n, grad in enumerate(handed))
                self._hand_on(handed)
                stage.weights.collect(self.version, grads, handed)
            cell.leaves = cell.outputs = cell.output_grads = ()
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
        """The forward, this time with its graph, on the state and random numbers that it had."""
        cell, stage = self.cell, self.stage
        assert cell.statistics is not None  # kept by the forward
        with stage.statistics.as_kept(cell.statistics), stage.state.forward():
            output = stage.output(cell, keep_input=False)
            if stage.loss_fn is None:
                cell.outputs = cell.wiring.after.tensors(output)
            else:
                cell.outputs = (stage.loss(cell, output),)
        cell.statistics = None

    def _roots(self) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs to start from, and their gradients; the loss's own is its weight."""
        cell = self.cell
        if self.stage.loss_fn is not None:
            loss = cell.outputs[0]
            if not loss.requires_grad:
                raise ExecutionError(
                    "the loss depends on nothing that requires grad: all parameters that it comes "
                    "from are frozen, or it is detached from them; thaw what is to be trained"
                )
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
            # Of a declared boundary the next stage can't know what requires none.
            if grad is not None and output.requires_grad:
                roots.append(output)
                grads.append(grad)
        return roots, grads

    def _hand_on(self, grads: tuple[Tensor | None, ...]) -> None:
        cell = self.cell
        agreed, flows = cell.wiring.flows, [grad is not None for grad in grads]
        if agreed is not None and agreed != flows:
            raise ExecutionError(
                f"gradients of the stage's inputs: {_yes_no(agreed)} was agreed with the stage "
                f"before, but {_yes_no(flows)} came out; which inputs get a gradient must "
                "depend neither on data nor on parameters frozen since the first step"
            )
        cell.input_grads = grads
        if cell.previous is not None:
            cell.previous.output_grads = grads


class _Transfer:
    """One end of a transfer: of a cell's activations or, with `grads`, of its gradients."""

    def __init__(
        self, cell: Cell, transport: Transport, peer: int, grads: bool, stage: Stage
    ) -> None:
        self.cell, self.transport, self.peer, self.grads = cell, transport, peer, grads
        self.stage = stage


class Send(_Transfer):
    """SEND_ACT or SEND_GRAD: posts the cell's outputs, or the gradients of its inputs."""

    def __call__(self) -> None:
        """Run the action."""
        cell, wiring = self.cell, self.cell.wiring
        if self.grads:
            grads = cell.input_grads
            cell.input_grads = ()
            agreed = wiring.grads_out
            if agreed is None:
                agreed = _unknown(wiring.before.metas)
                there = [grad is not None for grad in grads]
                self._post(torch.tensor(there, device=self.stage.device))
            for grad, meta in zip(grads, agreed, strict=True):
                if meta is not None:
                    given = empty(meta, self.stage.device).zero_() if grad is None else grad
                    self._post(payload(given, meta))
            return
        for tensor, meta in zip(cell.handed, wiring.after.metas, strict=True):
            self._post(payload(tensor, meta))
        cell.handed = ()

    def _post(self, content: Tensor) -> None:
        going = self.cell.grads_going if self.grads else self.cell.outputs_going
        going.append(self.transport.send(content, self.peer))

    def blank(self) -> None:
        """Send as much without meaning, to a receive that was posted for what does not come."""
        wiring = self.cell.wiring
        metas: Grads = wiring.after.metas
        if self.grads:
            if wiring.grads_out is None:
                flags = torch.zeros(len(wiring.before.metas), dtype=torch.bool)
                self._post(flags.to(self.stage.device))
            metas = wiring.grads_out or _unknown(wiring.before.metas)
        for meta in metas:
            if meta is not None:
                self._post(payload(empty(meta, self.stage.device), meta))


class Receive(_Transfer):
    """RECV_ACT or RECV_GRAD: posts buffers for what was agreed to come."""

    def __call__(self) -> None:
        """Run the action."""
        cell, wiring = self.cell, self.cell.wiring
        if not self.grads:
            cell.inputs = tuple(self._buffer(meta) for meta in wiring.before.metas)
            return
        expected = wiring.grads_in
        if expected is None:
            expected = _unknown(wiring.after.metas)
            cell.mask = torch.empty(len(expected), dtype=torch.bool, device=self.stage.device)
            self._post(cell.mask)
        cell.output_grads = tuple(None if meta is None else self._buffer(meta) for meta in expected)

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
        if self.state.request.updates or self.reduction.keeps_earlier:
            self.reduction.post()


class OptimStep:
    """OPTIM_STEP: applies the accumulated gradients to the newest weights, and clears them."""

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer | None, makes: int) -> None:
        self.stage, self.optimizer, self.makes = stage, optimizer, makes

    def __call__(self) -> None:
        """Run the action."""
        if not self.stage.state.request.updates:
            return
        started = perf_counter()
        if self.optimizer is not None:  # a stage without parameters has none
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.stage.weights.begin(self.makes)
        self.stage.state.busy += perf_counter() - started


def _unknown(metas: Sequence[TensorMeta]) -> Grads:
    """The gradients that may come, where only the run can tell: laid out as what they are of."""
    return tuple(meta if meta.requires_grad else None for meta in metas)


def _backward(roots: list[Tensor], grads: list[Tensor]) -> None:
    """What torch.autograd.backward does, but for its look at the gradients' shapes, which have been
    agreed on: that takes as long as the forward of a small stage."""
    _engine_run_backward(
        tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _yes_no(flows: Sequence[bool]) -> str:
    return f"({', '.join('yes' if there else 'no' for there in flows)})"
