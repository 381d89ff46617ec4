"""Sends and receives as operations: they post what has been agreed of a boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from schedir.errors import ExecutionError
from schedir.runtime.boundaries.boundary import Grads, TensorMeta, empty, payload
from schedir.runtime.call import Call
from schedir.runtime.program.instruction import Operation
from schedir.runtime.stage.cells import Cell
from schedir.runtime.transports.transport import Poster, Work


class Transfer(Operation):
    """One end of a transfer between a cell and another rank; its works go to `works`.

    What moves payloads is `poster`, and `beside` what the host has to know.
    """

    def __init__(
        self, cell: Cell, poster: Poster, beside: Poster, peer: int, device: torch.device
    ) -> None:
        self.cell, self.poster, self.beside = cell, poster, beside
        self.peer, self.device = peer, device
        self.works = self._works_of(cell)

    @staticmethod
    def _works_of(cell: Cell) -> list[Work]:
        raise NotImplementedError


class Send(Transfer):
    """SEND_ACT or SEND_GRAD."""

    def _post(self, content: Tensor) -> None:
        self.works.append(self.poster.send(content, self.peer))

    def send_placeholders(self) -> None:
        """Send as much without meaning, to receives that were posted for another call."""
        raise NotImplementedError

    def _post_mask(self, present: Sequence[bool]) -> None:
        self.works.append(self.beside.send(torch.tensor(present, device="cpu"), self.peer))

    def _send_empty(self, metas: Sequence[TensorMeta | None]) -> None:
        for meta in metas:
            if meta is not None:
                self._post(payload(empty(meta, self.device), meta))


class SendActivations(Send):
    """SEND_ACT: posts the cell's outputs."""

    @staticmethod
    def _works_of(cell: Cell) -> list[Work]:
        return cell.output_sends

    def run(self, call: Call) -> None:
        """Run the action."""
        cell = self.cell
        for tensor, meta in zip(cell.outputs_to_send, cell.learned.after.metas, strict=True):
            self._post(payload(tensor, meta))
        cell.outputs_to_send = ()

    def send_placeholders(self) -> None:
        """As many, of the outputs."""
        self._send_empty(self.cell.learned.after.metas)


class SendGradients(Send):
    """SEND_GRAD: posts the gradients of the cell's inputs.

    Where microbatches differ in which there are, a mask that says so goes first, from host to host,
    and zeros stand for those that there are not.
    """

    @staticmethod
    def _works_of(cell: Cell) -> list[Work]:
        return cell.grad_sends

    def run(self, call: Call) -> None:
        """Run the action."""
        cell, learned = self.cell, self.cell.learned
        grads, expected = cell.input_grads, learned.grads_out
        cell.input_grads = ()
        if learned.masked_out:
            self._post_mask([grad is not None for grad in grads])
        else:
            _check_present(grads, expected, cell.stage)
        for grad, meta in zip(grads, expected, strict=True):
            if meta is not None:
                sent = empty(meta, self.device).zero_() if grad is None else grad
                self._post(payload(sent, meta))

    def send_placeholders(self) -> None:
        """As many, of the gradients."""
        learned = self.cell.learned
        if learned.masked_out:
            self._post_mask([False] * len(learned.grads_out))
        self._send_empty(learned.grads_out)


class Receive(Transfer):
    """RECV_ACT or RECV_GRAD, into buffers that `make` makes."""

    def __init__(
        self,
        cell: Cell,
        poster: Poster,
        beside: Poster,
        peer: int,
        device: torch.device,
        make: Callable[[TensorMeta], Tensor],
    ) -> None:
        super().__init__(cell, poster, beside, peer, device)
        self._make = make

    def _buffer(self, meta: TensorMeta) -> Tensor:
        buffer = self._make(meta)
        self._post(payload(buffer, meta))
        return buffer

    def _post(self, buffer: Tensor) -> None:
        self.works.append(self.poster.receive(buffer, self.peer))


class ReceiveActivations(Receive):
    """RECV_ACT: posts buffers for the cell's inputs."""

    @staticmethod
    def _works_of(cell: Cell) -> list[Work]:
        return cell.input_receives

    def run(self, call: Call) -> None:
        """Run the action."""
        cell = self.cell
        cell.inputs = tuple(self._buffer(meta) for meta in cell.learned.before.metas)


class ReceiveGradients(Receive):
    """RECV_GRAD: posts buffers for the gradients of the cell's outputs, and for a mask where
    microbatches differ in which of them there are."""

    @staticmethod
    def _works_of(cell: Cell) -> list[Work]:
        return cell.grad_receives

    def run(self, call: Call) -> None:
        """Run the action."""
        cell, expected = self.cell, self.cell.learned.grads_in
        if self.cell.learned.masked_in:
            cell.mask = torch.empty(len(expected), dtype=torch.bool, device="cpu")
            self.works.append(self.beside.receive(cell.mask, self.peer))
        cell.output_grads = tuple(None if meta is None else self._buffer(meta) for meta in expected)


def _check_present(grads: Sequence[Tensor | None], expected: Grads, stage: int) -> None:
    """Raise ExecutionError where other gradients are there than in the first call."""
    present, first = ([grad is not None for grad in found] for found in (grads, expected))
    if present != first:
        raise ExecutionError(
            f"gradients of the stage's inputs: {_yes_no(first)} in the first call of this input "
            f"shape, but {_yes_no(present)} now; if that depends on data, declare the boundary, "
            f"boundaries={{{stage - 1}: torch.empty(...)}}, and a mask says which there are; make "
            "a new Executor if parameters have been frozen or thawed"
        )


def _yes_no(present: Sequence[bool]) -> str:
    return f"({', '.join('yes' if there else 'no' for there in present)})"
