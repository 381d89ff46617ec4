"""Weighs each microbatch by its share of the samples of its update, and the losses of a call alike.

The backward of a microbatch's loss starts from its share, so every gradient is accumulated with the
share that the last stage gave its microbatch. Over all pipelines, the shares of each of the last
stage's OPTIM_STEPs add up to one: sums of gradients over processes are never divided. A stage that
groups the microbatches in another way takes the mean over its own group: before it steps, it
divides its sum by the sum of the group's shares. In 1F1B-RR (PipeDream, SOSP 2019, section 3.2),
with two replicas of stage 0:

    stage 1   0 | 1 | 2 | 3     a step for each: all shares are 1
    stage 0   0   1 | 2   3     a step for two: their sum is 2, and the scale is a half

Of n whole groups of the last stage the sum is n. Of a part of a group it is that part, as the
microbatches of such a group must hold equally many samples.

On a GPU, losses are copied to the host behind the GPU's work, and a separate thread sends them to
the other processes. So only a reader of the losses waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.ir import Schedule
from schedir.runtime.accelerator import Late
from schedir.runtime.call import Call, CallLosses
from schedir.runtime.microbatches import Microbatch, Pieces, rows
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import Control, Exchange
from schedir.runtime.processes.groups import Groups

Count: TypeAlias = float | Tensor
"""A number of samples; a scalar tensor on the device if the host does not know it."""


class Samples:
    """The samples of microbatches, by which the executor weighs them, and their shares.

    It `asks` the user's function for them; else the microbatches of a whole batch have their rows.
    """

    def __init__(self, plan: Plan, groups: Groups) -> None:
        given, self._accelerator = plan.arguments, plan.accelerator
        self._weigh = given.weigh
        self._microbatches = plan.schedule.microbatches
        self.asks = given.count is not rows
        self._count = given.count if self.asks else partial(rows, dim=given.batch_dim)
        flow = graph_of(plan.schedule)
        made = flow.weight_gradients
        turns, order = flow.turn[made], np.argsort(made[-1])
        # What the last stage accumulates into each of its OPTIM_STEPs, over all ranks that hold it,
        # in the order of the lists.
        self._groups = [
            order[turns[-1, order] == step].tolist() for step in range(turns[-1].max() + 1)
        ]
        # Of these an OPTIM_STEP elsewhere applies a part.
        self._parted = [
            group
            for group in self._groups
            if plan.updates and np.ptp(turns[:, group], axis=1).any()
        ]
        self._pipelines, self._pipeline = plan.grid.pipelines, plan.grid.pipeline
        on_device = self.asks and plan.accelerator.queues
        self._device = plan.device if on_device else torch.device("cpu")
        self._group = None
        has_loss = plan.last_stage in plan.local_stages
        if self._pipelines > 1 and has_loss and self._weigh == "samples":
            self._group = groups.for_numbers(plan.grid.holders([plan.grid.rank]), self._device)
        self._latest: tuple[Sequence[Count], Call, Sequence[Count]] | None = None

    def of_rows(self, number: int) -> Sequence[float]:
        """The samples of each microbatch of a whole batch with that many rows."""
        if self._weigh != "samples":
            number = min(number, self._microbatches)
        return _evenly(number, self._microbatches)

    def of(self, target: Pieces, what: str, number: int | None) -> Sequence[Count]:
        """The samples of each microbatch, counted in `target`, the argument `what`. The call has
        that many rows, if they are known: copies that stand in for missing microbatches have none.
        """
        if self._weigh != "samples":
            return self.of_rows(self._microbatches if number is None else number)
        if self.asks or target.ready:
            found = [*map(self._counted, target.microbatches[:number])]
            return found + [0.0] * (self._microbatches - len(found))
        if target.rows is None:
            raise ExecutionError(
                f"{what}: none of its tensors is cut into microbatches, so their samples can't be "
                "counted; pass a function that counts them: Executor(…, count=…)"
            )
        return self.of_rows(target.rows)

    def _counted(self, target: Microbatch) -> Count:
        """The number of samples of a microbatch's mean loss."""
        said = self._count(target)
        if isinstance(said, Tensor) and (said.numel() != 1 or said.is_complex()):
            raise ExecutionError(
                "count must return a number, or a tensor of one, not "
                f"{said.dtype}{list(said.shape)}"
            )
        if isinstance(said, Tensor) and self._accelerator.makes(said):
            return said.detach().to(torch.float64).reshape(())
        try:
            found = float(said)
        except (TypeError, ValueError):
            raise ExecutionError(
                f"count must return a number, or a tensor of one, not {type(said).__name__}"
            ) from None
        _check_counts([found])
        return found

    def shares(self, counts: Sequence[Count], kind: Call) -> Sequence[Count]:
        """Each microbatch's share of the samples of its OPTIM_STEP, over all pipelines.

        The pipelines wait for each other here, so their calls were compared before. Counts that are
        on the device are checked when they have arrived.
        """
        if not counts or self._weigh is None:  # the loss is on another rank, or weighs nothing
            return counts
        latest = self._latest
        if latest is not None and counts is latest[0] and kind is latest[1]:
            return latest[2]
        # A call without updates accumulates all of its microbatches.
        groups = self._groups if kind.updates else [[*range(self._microbatches)]]
        parted = self._parted if kind.updates else []
        totals: list[Count] = [sum(counts[m] for m in group) for group in groups]
        if kind.trains:
            totals = self._over_pipelines(totals)

        def check(found: Sequence[Any]) -> None:
            _check_counts(found[: len(counts)])
            for total, group in zip(found[len(counts) :], groups, strict=True):
                if not total:
                    raise ExecutionError(f"target: microbatches {group} hold no samples at all")
            for group in parted:
                own = [found[m] for m in group]
                if len(set(own)) > 1:
                    raise ExecutionError(
                        f"target: microbatches {group}, after which the loss stage updates, hold "
                        f"{', '.join(f'{n:g}' for n in own)} samples, but another stage updates "
                        "after a part of them, so they must hold equally many: pass so many rows "
                        "that all microbatches get as many, or list the OPTIM_STEPs of all stages "
                        "after the same microbatches"
                    )

        every = [*counts, *totals]
        if any(isinstance(n, Tensor) for n in every):
            found = self._vector(every)
            self._accelerator.check_later(found, lambda copied: check(copied.tolist()))
            # Without samples every share is 0, until the check.
            totals = [*found[len(counts) :].clamp_min(_LEAST)]
        else:
            check(every)
        parts = zip(groups, totals, strict=True)
        share_of = {m: counts[m] / total for group, total in parts for m in group}
        shares = [share_of[m] for m in range(self._microbatches)]
        if self._group is None:
            self._latest = counts, kind, shares
        return shares

    def _over_pipelines(self, totals: list[Count]) -> list[Count]:
        """The sums of `totals` over all pipelines, on the ranks of the last stage. With "equal"
        every pipeline has the same ones."""
        if self._weigh == "equal":
            return [total * self._pipelines for total in totals]
        if self._group is None:
            return totals
        every = torch.zeros(self._pipelines, len(totals), dtype=torch.float64, device=self._device)
        every[self._pipeline] = self._vector(totals)
        sums = self._group.sum(every, "all samples")().sum(0)
        return sums.tolist() if self._device.type == "cpu" else [*sums]

    def _vector(self, numbers: Sequence[Count]) -> Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack([zero + n for n in numbers])


_LEAST = 1e-300
"""Replaces a total of 0 samples on the device, so that it does not divide by 0."""


@lru_cache
def _evenly(number: int, microbatches: int) -> Sequence[float]:
    """The rows of each microbatch, as torch.tensor_split cuts; 0.0 for missing ones."""
    parts = min(number, microbatches)
    even, more = divmod(number, parts)
    own = (float(even + (m < more)) for m in range(parts))
    return *own, *[0.0] * (microbatches - parts)


def _check_counts(counts: Sequence[float]) -> None:
    """Raise ExecutionError for a number of samples that is negative or not finite."""
    for found in counts:
        if not 0 <= found < math.inf:
            raise ExecutionError(
                f"count returns {found:g} for a microbatch; it must be finite, and 0 or more"
            )


SUMS = (
    'loss_fn must return the mean over a microbatch, but reduction="sum" makes it a sum; use '
    'reduction="mean", and pass count= if the mean is over something else than rows; or pass '
    "weigh=None to train on the sum of what loss_fn returns"
)


def share_sums(schedule: Schedule) -> dict[tuple[int, int], float]:
    """The sums of the shares of the OPTIM_STEPs that apply other microbatches than those of the
    loss stage."""
    flow = graph_of(schedule)
    turns = flow.turn[flow.weight_gradients]
    sizes = np.bincount(turns[-1])
    found = {}
    for stage, own in enumerate(turns):
        for step in range(own.max() + 1):
            parts = np.bincount(turns[-1][own == step], minlength=len(sizes)) / sizes
            if np.count_nonzero(parts) > 1 or parts.max() < 1:
                found[stage, step] = float(parts.sum())
    return found


def check_loss(plan: Plan) -> None:
    """Raise ExecutionError if the loss is evidently no mean, or a mean over something else than the
    rows by which microbatches are weighted. Only the rank of the last stage checks."""
    loss_fn: Any = plan.arguments.loss_fn
    weigh = plan.arguments.weigh
    if plan.last_stage not in plan.local_stages or weigh is None:
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
    if count is not rows or weigh != "samples":
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
        f"loss_fn takes the mean of a microbatch over {over}, but microbatches are weighted by "
        f"their rows; pass count=lambda target: {counted}, or count=len if you mean rows"
    )


_IGNORED = -100
"""The class that torch's losses ignore by default; targets seldom have it."""


class Losses:
    """Exchanges the losses of a batch, and the samples of its microbatches, between all processes.

    A report has the samples of each microbatch, then the losses; 0 for those that ran elsewhere. In
    a stream each batch has its own Losses, over its `microbatches` of the call.
    """

    def __init__(self, plan: Plan, control: Control, microbatches: range) -> None:
        grid, placement = plan.grid, plan.schedule.placement
        self._control, self._accelerator = control, plan.accelerator
        self._adds_up, self.microbatches = plan.arguments.weigh is None, microbatches
        self._lines = range(grid.pipelines)
        # Of one pipeline after the other; a process that runs all ranks counts once.
        self._holders, self._receivers = (
            [*dict.fromkeys(grid.number(rank, at) for at in self._lines for rank in ranks)]
            for ranks in (placement[-1], range(grid.ranks))
        )
        self._has_part = grid.number(grid.rank) in self._holders

    def expect(self) -> Exchange:
        """Post the receives of a call's losses, long before the losses are sent."""
        size = 2 * len(self.microbatches)
        return self._control.expect(self._holders, size, self._accelerator.queues)

    def report(
        self, exchange: Exchange, counts: Sequence[Count], losses: Sequence[float | Tensor | None]
    ) -> Callable[[], CallLosses]:
        """Send the losses of the microbatches that ran here; returns a function that gets the
        losses of all. `counts` and `losses` are those of the whole call."""
        own = slice(self.microbatches.start, self.microbatches.stop)
        here = [*zip(counts[own], losses[own], strict=True)]
        entries = [n if loss is not None else 0.0 for n, loss in here]
        entries += [loss if loss is not None else 0.0 for _, loss in here]
        late = self._late(entries) if self._accelerator.queues else None

        def exchanged() -> list[Tensor]:
            if late is not None and self._has_part:
                exchange.give(late(), self._receivers)
            return exchange.result()

        if late is None:
            if self._has_part:
                exchange.give(_report(entries), self._receivers)
            read = exchange.result
        elif len(self._receivers) == 1:  # no other process waits for it
            read = exchanged
        else:
            read = self._control.courier.send(exchanged).result
        return lambda: self._found(read())

    def _late(self, entries: Sequence[float | Tensor]) -> Callable[[], Tensor]:
        """A function that gets this process's report; what is on the device comes by one copy."""
        on_device = [entry.reshape(()) for entry in entries if isinstance(entry, Tensor)]
        if not on_device:
            return lambda: _report(entries)

        def report(copied: Tensor) -> Tensor:
            read = iter(copied.tolist())
            return _report([next(read) if isinstance(x, Tensor) else x for x in entries])

        return Late(self._accelerator, torch.stack(on_device).to(torch.float64), report)

    def _found(self, reports: Sequence[Tensor]) -> CallLosses:
        # Each microbatch is in one report of its pipeline, and 0 in the others.
        of_lines = torch.stack([*reports]).view(len(self._lines), -1, 2, len(self.microbatches))
        tables = [[*zip(*table, strict=True)] for table in of_lines.sum(1).tolist()]
        # Without samples there is no mean to count.
        total = sum(sum(n * loss for n, loss in table if n) for table in tables)
        samples = sum(sum(n for n, _ in table) for table in tables)
        losses = tuple(loss if n else math.nan for table in tables for n, loss in table)
        mean = total if self._adds_up else total / samples if samples else math.nan
        return CallLosses(mean, samples, losses)


def _report(entries: Sequence[float | Tensor]) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64, device="cpu")
