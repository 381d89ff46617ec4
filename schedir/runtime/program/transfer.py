"""SEND and RECV as bound calls: they post what has been agreed of a boundary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from schedir.runtime.boundaries.boundary import Grads, TensorMeta, empty, payload
from schedir.runtime.stage.cells import Cell
from schedir.runtime.stage.stage import Stage
from schedir.runtime.transports.transport import Transport


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


def _unknown(metas: Sequence[TensorMeta]) -> Grads:
    """The gradients that may come, where only the run can tell: laid out as what they are of."""
    return tuple(meta if meta.requires_grad else None for meta in metas)
