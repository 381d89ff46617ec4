"""From the losses of microbatches to the mean loss of a call, on every process.

On a device that queues its work they are copied to the host behind it, and a courier sends them to
the other processes, so that nobody waits for them but who reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.runtime.accelerator import Late
from schedir.runtime.batch.microbatches import Count, rows
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import LOSS_TAG, Control, Exchange
from schedir.runtime.result import CallLosses

SUMS = (
    'loss_fn must return the mean over a microbatch, but reduction="sum" makes it a sum; write '
    'reduction="mean", and count= where that mean is over something else than rows'
)


def check_loss(plan: Plan) -> None:
    """Raise ExecutionError where the loss of the last stage, which runs here, is seen to be no
    mean, or one over something else than the rows that microbatches are weighed by."""
    loss_fn: Any = plan.arguments.loss_fn
    if plan.last_stage not in plan.local_stages:
        return
    keywords: Mapping[str, Any] = {}
    if isinstance(loss_fn, partial):
        keywords, loss_fn = loss_fn.keywords, loss_fn.func
    reduction, weight, ignored = (
        keywords.get(name, getattr(loss_fn, name, None))
        for name in ("reduction", "weight", "ignore_index")
    )
    if isinstance(reduction, str) and reduction == "sum":
        raise ExecutionError(SUMS)
    count: object = plan.arguments.count
    if count is not rows:
        return
    functions = (nn.functional.cross_entropy, nn.functional.nll_loss)
    if loss_fn not in functions and not isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return
    leaves_out = ignored not in (None, _IGNORED)
    if weight is not None:
        targets = f"target[target != {ignored}]" if leaves_out else "target"
        over, counted = "the class weights of its targets", f"weight[{targets}].sum()"
    elif leaves_out:
        over, counted = f"the targets that are not {ignored}", f"(target != {ignored}).sum()"
    else:
        return
    raise ExecutionError(
        f"loss_fn takes the mean of a microbatch over {over}, but microbatches are weighed by "
        f"their rows; pass count=lambda target: {counted}, or count=len if that is meant"
    )


_IGNORED = -100
"""What torch's losses leave out unless they are told another class; seldom meant."""


class Losses:
    """Who has the losses of which microbatches, and the numbers of their samples; all processes
    get them. A share has the sum of the losses here over all samples and the number of these, then
    the samples of each microbatch, then the losses."""

    def __init__(self, plan: Plan, control: Control) -> None:
        schedule, grid = plan.schedule, plan.grid
        self._control, self._accelerator = control, plan.accelerator
        self._microbatches = range(schedule.microbatches)
        lines, last = range(grid.pipelines), plan.last_stage
        holders = (grid.number(rank, at) for at in lines for rank in schedule.placement[last])
        self._sizes = dict.fromkeys(holders, 2 + 2 * schedule.microbatches)
        self._has_part = grid.number(grid.rank) in self._sizes
        self._receivers = range(len(grid.everyone))
        share_of = {number: share for share, number in enumerate(self._sizes)}
        runs = graph_of(schedule).runs
        self._found_in = [
            (share_of[grid.number(int(runs[last, m]), at)], m)
            for at in lines
            for m in self._microbatches
        ]

    def expect(self) -> Exchange:
        """Post the receives of a call's losses, long before these are sent."""
        return self._control.expect(self._sizes, LOSS_TAG, late=self._accelerator.queues)

    def share(
        self, exchange: Exchange, counts: Sequence[Count], losses: Sequence[float | Tensor | None]
    ) -> Callable[[], CallLosses]:
        """Send the losses of the microbatches that ran here on their way; returns how to get those
        of all."""
        own = self._share(counts, losses) if self._has_part else None
        if own is not None and len(self._receivers) == 1:
            return lambda: self._found([own()])  # nobody waits for it before it is read

        def exchanged() -> list[Tensor]:
            if own is not None:
                exchange.give(own(), self._receivers)
            return exchange.result()

        if self._accelerator.queues:
            found = self._control.courier.send(exchanged)
            return lambda: self._found(found.result())
        if own is not None:
            exchange.give(own(), self._receivers)
        return lambda: self._found(exchange.result())

    def _share(
        self, counts: Sequence[Count], losses: Sequence[float | Tensor | None]
    ) -> Callable[[], Tensor]:
        """How to get what this process has to say."""
        ran = {m: loss for m, loss in enumerate(losses) if loss is not None}
        if not self._accelerator.queues or not ran:
            return lambda: self._listed({m: (counts[m], loss) for m, loss in ran.items()})
        # By one copy: the losses, then what the host does not know of the counts.
        kept = [
            loss.reshape(()) for loss in ran.values() if isinstance(loss, Tensor)
        ]  # as they all are
        values = torch.stack(kept).to(torch.float64)
        unknown = [n for m in ran if isinstance(n := counts[m], Tensor)]
        if unknown:
            values = torch.cat([values, torch.stack(unknown)])

        def listed(copied: Tensor) -> Tensor:
            read = iter(copied.tolist())
            found = {m: next(read) for m in ran}
            numbers = {m: next(read) if isinstance(counts[m], Tensor) else counts[m] for m in ran}
            return self._listed({m: (numbers[m], found[m]) for m in ran})

        return Late(self._accelerator, values, listed)

    def _listed(self, ran: Mapping[int, tuple[Count, float | Tensor]]) -> Tensor:
        here = [ran.get(m, (0.0, 0.0)) for m in self._microbatches]
        counts, losses = [float(n) for n, _ in here], [float(loss) for _, loss in here]
        # One without samples has no mean to count.
        total = sum(n * loss for n, loss in zip(counts, losses, strict=True) if n)
        numbers = [total, sum(counts), *counts, *losses]
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")

    def _found(self, shares: Sequence[Tensor]) -> CallLosses:
        total, samples = (sum(share[i].item() for share in shares) for i in (0, 1))
        mean = float(total / samples) if samples else math.nan
        return CallLosses(mean, float(samples), partial(self._by_microbatch, shares))

    def _by_microbatch(self, shares: Sequence[Tensor]) -> tuple[float, ...]:
        tables = [share[2:].view(2, -1).tolist() for share in shares]
        found = ((*(row[m] for row in tables[share]),) for share, m in self._found_in)
        return tuple(loss if n else math.nan for n, loss in found)
