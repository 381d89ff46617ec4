"""From the losses of microbatches to the mean loss of a call, on every process.

On a device that queues its work they are copied to the host behind it, and a courier sends their
sum to the other processes, so that nobody waits for it but who reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from schedir.runtime.batch.microbatches import Count
from schedir.runtime.late import Late
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import LOSS_TAG, Control, Exchange


class Losses:
    """Who has a part of the loss, its sum and the number of its samples; all processes get it."""

    def __init__(self, plan: Plan, control: Control) -> None:
        schedule, grid = plan.schedule, plan.grid
        self._control, self._accelerator = control, plan.accelerator
        self._sizes = {
            grid.number(rank, line): 2
            for line in range(grid.pipelines)
            for rank in schedule.placement[-1]
        }
        self._has_part = grid.number(grid.rank) in self._sizes
        self._receivers = range(len(grid.everyone))

    def expect(self) -> Exchange:
        """Post the receives of a call's losses, long before these are sent."""
        return self._control.expect(self._sizes, LOSS_TAG, late=self._accelerator.queues)

    def share(
        self, exchange: Exchange, counts: Sequence[Count], losses: Sequence[Tensor | None]
    ) -> Callable[[], float]:
        """Send the losses of the microbatches that ran here on their way; returns how to get the
        mean of all."""
        ran = [(n, x) for n, x in zip(counts, losses, strict=True) if x is not None]
        sums = self._sums(ran) if self._has_part else None
        if sums is not None and len(self._receivers) == 1:
            return lambda: _mean([sums()])  # nobody waits for it before it is read

        def exchanged() -> list[Tensor]:
            if sums is not None:
                exchange.give(sums(), self._receivers)
            return exchange.result()

        if self._accelerator.queues:
            found = self._control.courier.send(exchanged)
            return lambda: _mean(found.result())
        if sums is not None:
            exchange.give(sums(), self._receivers)
        return lambda: _mean(exchange.result())

    def _sums(self, ran: Sequence[tuple[Count, Tensor]]) -> Callable[[], Tensor]:
        """How to get the sum of the losses over all samples, and their number."""
        if not self._accelerator.queues or not ran:
            return lambda: _summed([(float(n), float(loss)) for n, loss in ran])
        # By one copy: the losses, then what the host does not know of the counts.
        losses = [loss.reshape(()) for _, loss in ran]
        unknown = [n for n, _ in ran if isinstance(n, Tensor)]
        values = torch.stack(losses).to(torch.float64)
        if unknown:
            values = torch.cat([values, torch.stack(unknown)])

        def summed(copied: Tensor) -> Tensor:
            read = iter(copied.tolist())
            found = [next(read) for _ in ran]
            numbers = [next(read) if isinstance(n, Tensor) else n for n, _ in ran]
            return _summed(list(zip(numbers, found, strict=True)))

        return Late(self._accelerator, values, summed)


def _summed(ran: Sequence[tuple[float, float]]) -> Tensor:
    # One without samples has no mean to count.
    counted = [(n, loss) for n, loss in ran if n]
    sums = [sum(n * loss for n, loss in counted), sum(n for n, _ in counted)]
    return torch.tensor(sums, dtype=torch.float64, device="cpu")


def _mean(shares: Sequence[Tensor]) -> float:
    """The mean loss, of the sums of the losses and of the samples."""
    total, samples = (sum(share[i].item() for share in shares) for i in (0, 1))
    return float(total / samples) if samples else math.nan
