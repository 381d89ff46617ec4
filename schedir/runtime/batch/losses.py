"""From the losses of microbatches to the mean loss of a call, on every process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import LOSS_TAG, Control, Exchange


class Losses:
    """Who has a part of the loss, its sum and the number of its samples; all processes get it."""

    def __init__(self, plan: Plan, control: Control) -> None:
        schedule, grid = plan.schedule, plan.grid
        self._control = control
        self._sizes = {
            grid.number(rank, line): 2
            for line in range(grid.pipelines)
            for rank in schedule.placement[-1]
        }
        self._has_part = grid.number(grid.rank) in self._sizes
        self._receivers = range(len(grid.everyone))

    def expect(self) -> Exchange:
        """Post the receives of a call's losses, long before these are sent."""
        return self._control.expect(self._sizes, LOSS_TAG)

    def share(
        self, exchange: Exchange, counts: Sequence[float], losses: Iterable[Tensor | None]
    ) -> Callable[[], float]:
        """Send the losses of the microbatches that ran here on their way; returns how to get the
        mean of all."""
        # One without samples has no mean to count.
        ran = [(n, x) for n, x in zip(counts, losses, strict=True) if x is not None and n]
        if len(self._receivers) == 1:
            return lambda: _mean([_sums(ran)])  # nobody waits for it before it is read
        if self._has_part:
            exchange.give(_sums(ran), self._receivers)
        return lambda: _mean(exchange.result())


def _sums(ran: Sequence[tuple[float, Tensor]]) -> Tensor:
    """The sum of the losses over all samples, and their number."""
    if ran and ran[0][1].is_cuda:
        torch.cuda.synchronize(ran[0][1].device)  # whatever stream is current by now
    return torch.tensor(
        [sum(n * float(loss) for n, loss in ran), sum(n for n, _ in ran)], dtype=torch.float64
    )


def _mean(shares: Sequence[Tensor]) -> float:
    """The mean loss, of the sums of the losses and of the samples."""
    total, samples = (sum(share[i].item() for share in shares) for i in (0, 1))
    return float(total / samples)
