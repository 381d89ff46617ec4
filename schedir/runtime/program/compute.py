"""FORWARD, RECOMPUTE and the kinds of BACKWARD as operations; their tensors lie in cells."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.utils._pytree import tree_map_only

from schedir.errors import ExecutionError
from schedir.runtime.boundaries.learned import EVERY
from schedir.runtime.call import Call
from schedir.runtime.program.instruction import Operation
from schedir.runtime.stage.autocast import resumed
from schedir.runtime.stage.cells import Cell
from schedir.runtime.stage.split_backward import input_part
from schedir.runtime.stage.stage import Stage
from schedir.runtime.transports.transport import Work

_Root: TypeAlias = Tensor | GradientEdge


class Compute(Operation):
    """A part of a stage's work on a microbatch, at a weight version; `last_read` where no other
    action reads that version after this one."""

    computes: ClassVar[bool] = True

    def __init__(self, stage: Stage, cell: Cell, version: int, last_read: bool) -> None:
        self.stage, self.cell, self.version, self.last_read = stage, cell, version, last_read


class Forward(Compute):
    """FORWARD; on the last stage it computes the loss as well.

    With `replayed` a RECOMPUTE is listed for it: it keeps its input, and makes no graph.
    """

    def __init__(
        self, stage: Stage, cell: Cell, version: int, last_read: bool, replayed: bool
    ) -> None:
        super().__init__(stage, cell, version, last_read)
        self.replayed = replayed

    @property
    def receives(self) -> list[Work]:
        """Those of the stage's inputs."""
        return self.cell.input_receives

    def run(self, call: Call) -> None:
        """Run the action."""
        weights = self.stage.weights
        weights.install(self.version)
        if call.autocast:
            with resumed(call.autocast):
                self._forward(call)
        else:
            self._forward(call)
        if self.last_read:
            weights.release(self.version)

    def _forward(self, call: Call) -> None:
        cell, stage = self.cell, self.stage
        if not torch.is_grad_enabled():
            self._once(call, with_graph=False, keep_input=False)
        elif self.replayed:
            with torch.no_grad(), stage.statistics.keeping(False) as cell.statistics:
                self._once(call, with_graph=False, keep_input=True)
        else:
            self._once(call, with_graph=True, keep_input=False)

    def _once(self, call: Call, with_graph: bool, keep_input: bool) -> None:
        cell, stage = self.cell, self.stage
        output = self._output(call, keep_input)
        if stage.loss_fn is None:
            made, copied = cell.learned.after.tensors(output, with_graph), cell.learned.copied
            outputs = _with_copies(made, copied) if copied else made
            if cell.following is not None:
                cell.following.inputs = outputs
            else:
                cell.outputs_to_send = outputs
            # Without a graph a view of a parameter still says that it requires grad.
            if with_graph:
                cell.outputs = (_edges_of if cell.following is None else _roots_of)(made)
        else:
            # The loss may work in place, and so may what is made of the output, after it.
            kept = None if call.keeps is None else _for_caller(call, cell, output)
            if call.request.has_loss:
                loss = self._loss(output)
                cell.loss, cell.loss_share = stage.nonfinite.loss(
                    loss, cell.microbatch, cell.loss_share, call.request.trains
                )
                if with_graph:
                    cell.outputs = (loss,)
            if call.keeps is not None:
                cell.result = call.keeps(kept, cell.target)
        if not with_graph:  # no backward will ask for them
            cell.leaves = ()

    def _output(self, call: Call, keep_input: bool) -> Any:
        return self.stage.output(call, self.cell, keep_input)

    def _loss(self, output: Any) -> Tensor:
        return self.stage.loss(self.cell, output)


def _with_copies(outputs: tuple[Tensor, ...], copied: Collection[int]) -> tuple[Tensor, ...]:
    """A stage's outputs for the next one, with copies of those that somebody may change before they
    are used: of a buffer, say, which the stage's next forward updates."""
    return tuple(
        tensor.detach().clone() if number in copied else tensor
        for number, tensor in enumerate(outputs)
    )


def _for_caller(call: Call, cell: Cell, output: Any) -> Any:
    """What the last stage has returned, without its graph, with copies of what may change later."""
    copied = EVERY if call.request.has_loss else cell.learned.copied
    numbers = count()
    return tree_map_only(
        Tensor,
        lambda x: x.detach().clone() if next(numbers) in copied else x.detach(),
        output,
    )


def _roots_of(outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Those that a backward can start from: nearly always all of them, so that is quick."""
    for output in outputs:
        if not output.requires_grad:
            return tuple([output if output.requires_grad else None for output in outputs])
    return outputs


def _edges_of(outputs: tuple[Tensor, ...]) -> tuple[GradientEdge | None, ...]:
    """Where a backward can start from, without the outputs themselves."""
    return tuple([get_gradient_edge(t) if t.requires_grad else None for t in outputs])


class Recompute(Compute):
    """RECOMPUTE: the forward, this time with its graph, on the weights, the state and the random
    numbers that it had. Its output goes nowhere, and its loss does not count."""

    def run(self, call: Call) -> None:
        """Run the action."""
        cell, stage = self.cell, self.stage
        stage.weights.install(self.version)
        assert cell.statistics is not None  # kept by the forward
        with stage.statistics.as_kept(cell.statistics), resumed(call.autocast):
            output = stage.output(call, cell, keep_input=False)
            if stage.loss_fn is None:
                cell.outputs = _edges_of(cell.learned.after.tensors(output))
            else:
                cell.outputs = (stage.loss(cell, output),)
        cell.statistics = None
        if self.last_read:
            stage.weights.release(self.version)


class _FromOutputs(Compute):
    """A backward that starts from the gradients of the outputs, or from the loss."""

    @property
    def receives(self) -> list[Work]:
        """Those of the gradients of the stage's outputs."""
        return self.cell.grad_receives

    def run(self, call: Call) -> None:
        """Run the action."""
        cell, stage = self.cell, self.stage
        stage.weights.install(self.version)
        self._backward(*self._roots())
        cell.leaves = cell.outputs = cell.output_grads = ()
        if self.last_read:
            stage.weights.release(self.version)

    def _backward(self, roots: list[_Root], grads: list[Tensor]) -> None:
        raise NotImplementedError

    def _roots(self) -> tuple[list[_Root], list[Tensor]]:
        """The outputs to start from, and their gradients; the loss's own is its share."""
        cell = self.cell
        if self.stage.loss_fn is not None:
            loss = cast(Tensor, cell.outputs[0])  # it goes nowhere
            if not loss.requires_grad:
                raise ExecutionError(
                    "the loss depends on nothing that requires grad: all parameters that it comes "
                    "from are frozen, or it is detached from them; thaw what is to be trained"
                )
            share = cell.loss_share
            if isinstance(share, Tensor):
                return [loss], [share.to(loss.dtype).expand_as(loss)]
            return [loss], [torch.full_like(loss, share)]
        if cell.mask is not None:
            present = cell.mask.tolist()
            cell.output_grads = tuple(
                grad if there else None
                for grad, there in zip(cell.output_grads, present, strict=True)
            )
            cell.mask = None
        roots: list[_Root] = []
        grads: list[Tensor] = []
        for output, grad in zip(cell.outputs, cell.output_grads, strict=True):
            # Of a declared boundary the next stage can't know what requires none.
            if grad is not None and output is not None:
                roots.append(output)
                grads.append(grad)
        return roots, grads

    def _hand_on(self, grads: tuple[Tensor | None, ...]) -> None:
        """Give the gradients of the inputs to the stage before."""
        cell = self.cell
        if cell.previous is not None:
            cell.previous.output_grads = grads
        else:
            cell.input_grads = grads


class Backward(_FromOutputs):
    """BACKWARD: the gradients of the input and of the parameters."""

    def _backward(self, roots: list[_Root], grads: list[Tensor]) -> None:
        cell = self.cell
        if roots:
            _run_engine(roots, grads)
        input_grads = tuple(leaf.grad for leaf in cell.leaves)
        if cell.computed_grads:
            input_grads = tuple(cell.computed_grads.pop(n, g) for n, g in enumerate(input_grads))
        self._hand_on(input_grads)
        self.stage.weights.collect(self.version, grads, input_grads)


class BackwardInput(_FromOutputs):
    """BACKWARD_INPUT: the gradients of the input, and what is left to BACKWARD_WEIGHT."""

    def _backward(self, roots: list[_Root], grads: list[Tensor]) -> None:
        cell = self.cell
        wanted = [leaf for leaf in cell.leaves if leaf.requires_grad]
        found, cell.weight_part = input_part(roots, grads, wanted)
        in_order = iter(found)
        self._hand_on(tuple(next(in_order) if t.requires_grad else None for t in cell.leaves))


class BackwardWeight(Compute):
    """BACKWARD_WEIGHT: the gradients of the parameters."""

    def run(self, call: Call) -> None:
        """Run the action."""
        cell, weights = self.cell, self.stage.weights
        weights.install(self.version)
        if cell.weight_part is not None:
            part, cell.weight_part = cell.weight_part, None
            part.run()
        weights.collect(self.version)
        if self.last_read:
            weights.release(self.version)


def _run_engine(roots: list[_Root], grads: list[Tensor]) -> None:
    """What torch.autograd.backward does, but for its look at the gradients' shapes, which have been
    agreed on: that takes as long as the forward of a small stage."""
    _engine_run_backward(
        tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
