"""Sends and receives as operations: they post what has been agreed of a boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
        for tensor, meta in zip(cell.outputs_to_send, cell.wiring.after.metas, strict=True):
            self._post(payload(tensor, meta))
        cell.outputs_to_send = ()

    def send_placeholders(self) -> None:
        """As many, of the outputs."""
        self._send_empty(self.cell.wiring.after.metas)


class SendGradients(Send):
    """SEND_GRAD: posts the gradients of the cell's inputs.

    Where nobody could tell which there are, a mask that says so goes first, from host to host, and
    zeros stand for those that there are not.
    """

    @staticmethod
    def _works_of(cell: Cell) -> list[Work]:
        return cell.grad_sends

    def run(self, call: Call) -> None:
        """Run the action."""
        cell, wiring = self.cell, self.cell.wiring
        grads = cell.input_grads
        cell.input_grads = ()
        agreed = wiring.grads_out
        if agreed is None:
            agreed = _possible(wiring.before.metas)
            self._post_mask([grad is not None for grad in grads])
        for grad, meta in zip(grads, agreed, strict=True):
            if meta is not None:
                sent = empty(meta, self.device).zero_() if grad is None else grad
                self._post(payload(sent, meta))

    def send_placeholders(self) -> None:
        """As many, of the gradients."""
        wiring = self.cell.wiring
        if wiring.grads_out is None:
            self._post_mask([False] * len(wiring.before.metas))
        self._send_empty(wiring.grads_out or _possible(wiring.before.metas))


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
        cell.inputs = tuple(self._buffer(meta) for meta in cell.wiring.before.metas)


class ReceiveGradients(Receive):
    """RECV_GRAD: posts buffers for the gradients of the cell's outputs, and for a mask where only
    the run can tell which of them there are."""

    @staticmethod
    def _works_of(cell: Cell) -> list[Work]:
        return cell.grad_receives

    def run(self, call: Call) -> None:
        """Run the action."""
        cell, wiring = self.cell, self.cell.wiring
        expected = wiring.grads_in
        if expected is None:
            expected = _possible(wiring.after.metas)
            cell.mask = torch.empty(len(expected), dtype=torch.bool, device="cpu")
            self.works.append(self.beside.receive(cell.mask, self.peer))
        cell.output_grads = tuple(None if meta is None else self._buffer(meta) for meta in expected)


def _possible(metas: Sequence[TensorMeta]) -> Grads:
    """The gradients that may come, where only the run can tell: laid out as what they are of."""
    return tuple(meta if meta.requires_grad else None for meta in metas)
