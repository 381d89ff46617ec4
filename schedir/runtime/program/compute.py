"""FORWARD and BACKWARD as bound calls, each resolved once; their tensors lie in cells.

What an action waits for has been waited for when it is called.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._pytree import tree_map_only

from schedir.errors import ExecutionError
from schedir.runtime.stage.cells import Cell
from schedir.runtime.stage.split import input_part
from schedir.runtime.stage.stage import Stage


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


def _backward(roots: list[Tensor], grads: list[Tensor]) -> None:
    """What torch.autograd.backward does, but for its look at the gradients' shapes, which have been
    agreed on: that takes as long as the forward of a small stage."""
    _engine_run_backward(
        tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _yes_no(flows: Sequence[bool]) -> str:
    return f"({', '.join('yes' if there else 'no' for there in flows)})"
