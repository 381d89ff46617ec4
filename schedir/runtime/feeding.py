"""Cuts a call's arguments into microbatches for the stages here, and collects the losses, of the
call or of each of its batches.

Each microbatch gets its share of the samples of its update; the backward of its loss starts from
that share. On a GPU, losses are copied to the host behind the GPU's work, and a separate thread
sends them to the other processes. So only a reader of the losses waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.ir import COMPLETES_GRADIENTS, Kind, Schedule, flat
from schedir.runtime.accelerator import Late
from schedir.runtime.call import Call, CallLosses
from schedir.runtime.microbatches import (
    Batch,
    ChunkSpecs,
    Count,
    Dim,
    DimsOf,
    Microbatch,
    Pieces,
    check_alike,
    check_count,
    check_total,
    checked,
    cut,
    is_whole,
    loss_shares,
    placed,
    rows,
    samples,
)
from schedir.runtime.plan import Plan
from schedir.runtime.processes.control import Control, Exchange
from schedir.runtime.processes.groups import Groups


@attrs.frozen(eq=False)
class CallArguments:
    """The arguments of one call; see `Executor.step`."""

    inputs: Batch | None
    target: Batch | None = None
    stage_inputs: Mapping[int, Batch | None] = {}
    loss_kwargs: Batch | None = None


@attrs.frozen(eq=False)
class Feed:
    """The data of a call for the stages here, by microbatch; empty for other ranks' data.

    `extras` is what stages get beside their input, by stage, as far as this rank was given it.
    `counts` are the samples of each microbatch, on a rank of the last stage. `rows` are the rows of
    the whole batches that were cut here, None if none was cut.
    """

    inputs: Sequence[Microbatch]
    extras: Mapping[int, Sequence[Microbatch]]
    targets: Sequence[Microbatch]
    loss_keywords: Sequence[Mapping[str, Any]]
    counts: Sequence[Count]
    rows: int | None


class Feeder:
    """Cuts the arguments of calls into microbatches for the stages here."""

    def __init__(self, plan: Plan, groups: Groups) -> None:
        schedule = plan.schedule
        self._microbatches = schedule.microbatches
        self._last = plan.last_stage
        self._local = plan.local_stages
        self._placement, self._ranks = schedule.placement, plan.local_ranks
        given = plan.arguments
        self._weigh, self._count = given.weigh, given.count
        # Else the microbatches of a whole batch count alike, or as they have rows.
        self._asks = given.count is not rows
        self._specs = ChunkSpecs(
            given.batch_dim,
            checked(given.args_chunk_spec, "args_chunk_spec"),
            checked(dict(given.kwargs_chunk_spec or {}), "kwargs_chunk_spec"),
        )
        self._accelerator, self._device = plan.accelerator, plan.device
        self._counts_on_device = plan.accelerator.queues and self._asks
        self._pipelines, self._pipeline = plan.grid.pipelines, plan.grid.pipeline
        self._group = None
        if self._pipelines > 1 and self._last in self._local and self._weigh == "samples":
            processes = plan.grid.holders([plan.grid.rank])
            device = self._device if self._counts_on_device else None
            self._group = groups.for_numbers(processes, device)
        self._accumulated = _accumulated_by_step(schedule)
        self._cut_by_others = _cut_by_others(schedule, self._accumulated) if plan.updates else []
        self._has_first, self._has_last = 0 in self._local, self._last in self._local
        self._is_plain = not plan.accelerator.queues and not self._asks and self._specs.is_plain
        self._rows: int | None = None  # of the latest whole batch, and its microbatches' samples
        self._even: Sequence[Count] = ()
        self._shares: tuple[Sequence[Count], Call, Sequence[Count]] | None = None

    def cut(self, given: CallArguments, kind: Call) -> Feed:
        """Cut a call into microbatches. Raises ExecutionError for arguments that don't fit."""
        feed = None
        if self._is_plain and kind.trains and not given.stage_inputs and not given.loss_kwargs:
            feed = self._cut_tensors(given.inputs, given.target)
        return self._cut(given, kind) if feed is None else feed

    def _cut_tensors(self, inputs: Batch | None, target: Batch | None) -> Feed | None:
        """The result of `_cut`, but faster, for inputs and target of one tensor each; otherwise
        None."""
        dim, parts, rows = self._specs.batch_dim, self._microbatches, None
        pieces: list[Sequence[Tensor]] = []
        for is_here, batch in ((self._has_first, inputs), (self._has_last, target)):
            if not is_here:
                pieces.append(())
                continue
            if type(batch) is not Tensor or batch.layout is not torch.strided or batch.is_nested:
                return None
            if not 0 <= dim < batch.dim() or batch.shape[dim] not in (rows or batch.shape[dim],):
                return None
            rows = batch.shape[dim]
            if rows < parts:
                return None
            pieces.append(batch.tensor_split(parts, dim))
        if self._has_last and rows is not None and rows != self._rows:
            self._rows, self._even = rows, self._even_counts(rows)
        counts = self._even if self._has_last else ()
        return Feed(pieces[0], {}, pieces[1], (), counts, rows)

    def _cut(self, given: CallArguments, kind: Call) -> Feed:
        # A stage that gets its labels itself, and returns the loss, needs no target.
        alone = given.target is None and given.stage_inputs.get(self._last) is not None
        needs = [(0, given.inputs, "inputs")]
        if kind.has_loss and not alone:
            needs.append((self._last, given.target, "target"))
        for stage, batch, what in needs:
            if stage in self._local and batch is None:
                raise ExecutionError(
                    f"stage {stage}, which runs here, needs {what}{self._who_needs(kind)}"
                )
        pieces: dict[str, Pieces] = {}

        def read(batch: Batch | None, what: str, dims_of: DimsOf) -> None:
            if batch is not None:
                short = not kind.trains
                pieces[what] = cut(batch, self._microbatches, what, dims_of, may_be_short=short)

        def beside(batch: Batch, what: str) -> list[Dim]:
            return self._specs.beside(batch, what, _common_rows(pieces))

        known = dict(self._known(given.stage_inputs))
        if self._has_first:
            read(given.inputs, "inputs", self._specs.of_inputs)
        if self._has_last:
            read(given.target, "target", self._specs.of_target)
        if known and not pieces and is_whole(given.inputs):  # unused here, but it has the rows
            read(given.inputs, "inputs", self._specs.of_inputs)
        for stage, batch in known.items():
            read(batch, name_of_extra(stage), beside)
        what = "target"
        if self._has_last and kind.has_loss and alone:
            what = name_of_extra(self._last)
        if what in pieces:
            read(given.loss_kwargs, "loss_kwargs", beside)
            _check_keywords(pieces.get("loss_kwargs"), self._weigh)
        given_rows = _common_rows(pieces)
        counts = self._counts(pieces[what], what) if what in pieces else []
        if given_rows is not None:  # copies that stand in for missing microbatches don't count
            counts[given_rows:] = [0.0] * len(counts[given_rows:])

        # Counted before they are moved: for data on the CPU the host does not wait for the GPU.
        def moved(what: str) -> list[Microbatch]:
            found = pieces.get(what)
            return [] if found is None else placed(found.microbatches, self._device, what)

        return Feed(
            moved("inputs") if self._has_first else [],
            {stage: moved(name_of_extra(stage)) for stage in known},
            moved("target"),
            moved("loss_kwargs"),
            counts,
            given_rows,
        )

    def _who_needs(self, kind: Call) -> str:
        """The ranks that need inputs and target; empty if this rank needs all."""
        first, last = self._placement[0], self._placement[-1]
        if {*first, *last} <= {*self._ranks}:
            return ""
        target = f", target to {_ranks(last)} for the last one" if kind.has_loss else ""
        return (
            f": inputs go to {_ranks(first)} for the first stage{target}; other ranks ignore what "
            "they are given"
        )

    def _counts(self, counted: Pieces, what: str) -> list[Count]:
        """The samples of each microbatch; `what` names the argument that they are counted in."""
        if self._weigh != "samples":
            return [1.0] * self._microbatches
        if self._asks:
            return [samples(self._count, m, self._accelerator) for m in counted.microbatches]
        if counted.ready:
            return [float(rows(m, self._specs.batch_dim)) for m in counted.microbatches]
        if counted.rows is None:
            raise ExecutionError(
                f"{what}: none of its tensors is cut into microbatches, so their samples can't be "
                "counted; pass a function that counts them: Executor(…, count=…)"
            )
        return self._even_counts(counted.rows)

    def _even_counts(self, rows: int) -> list[Count]:
        """The samples of each microbatch of a whole batch."""
        if self._weigh != "samples":
            return [1.0] * self._microbatches
        parts = min(rows, self._microbatches)  # the rest are copies for missing ones
        even, more = divmod(rows, parts)
        return [float(even + (m < more)) for m in range(self._microbatches)]

    def shares(self, counts: Sequence[Count], kind: Call) -> Sequence[Count]:
        """Each microbatch's share of the samples of its OPTIM_STEP, over all pipelines.

        The pipelines wait for each other here, so their calls were compared before. Counts that are
        on the device are checked when they have arrived.
        """
        if not counts or self._weigh is None:  # the loss is on another rank, or weighs nothing
            return counts
        if self._shares is not None and counts is self._shares[0] and kind is self._shares[1]:
            return self._shares[2]
        # A call without updates accumulates all of its microbatches.
        accumulated, cut_by_others = [list(range(self._microbatches))], []
        if kind.updates:
            accumulated, cut_by_others = self._accumulated, self._cut_by_others
        totals: list[Count] = [sum(counts[m] for m in together) for together in accumulated]
        if kind.trains:
            totals = self._over_pipelines(totals)
        if self._accelerator.queues and any(isinstance(n, Tensor) for n in (*counts, *totals)):
            self._check_late(counts, totals, accumulated, cut_by_others)
        else:
            for together in cut_by_others:
                check_alike(counts, together)
        shares = loss_shares(counts, accumulated, totals)
        if counts is self._even and self._group is None:
            self._shares = counts, kind, shares
        return shares

    def _check_late(
        self,
        counts: Sequence[Count],
        totals: Sequence[Count],
        accumulated: Sequence[list[int]],
        cut_by_others: Sequence[list[int]],
    ) -> None:
        """Check counts on the device later, as the host's are checked at once."""

        def check(copied: Tensor) -> None:
            read = copied.tolist()
            for n in read[: len(counts)]:
                check_count(n)
            for n, together in zip(read[len(counts) :], accumulated, strict=True):
                check_total(n, together)
            for together in cut_by_others:
                check_alike(read, together)

        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        self._accelerator.check_later(torch.stack([zero + n for n in (*counts, *totals)]), check)

    def _known(self, stage_inputs: Mapping[int, Batch | None]) -> Iterator[tuple[int, Batch]]:
        """The `stage_inputs` to read: of all stages on the rank of the first stage, because shapes
        depend on them; on other ranks those of their own stages."""
        for stage, batch in stage_inputs.items():
            if stage not in range(self._last + 1):
                raise ExecutionError(
                    f"stage_inputs: there is no stage {stage!r}, only 0..{self._last}"
                )
            if batch is not None and (stage in self._local or 0 in self._local):
                yield stage, batch

    def _over_pipelines(self, totals: list[Count]) -> list[Count]:
        """The sums of `totals` over all pipelines, on the ranks of the last stage."""
        if self._weigh == "equal":
            return [total * self._pipelines for total in totals]
        if self._group is None:
            return totals
        device = self._device if self._counts_on_device else torch.device("cpu")
        every = torch.zeros(self._pipelines, len(totals), dtype=torch.float64, device=device)
        for step, total in enumerate(totals):
            every[self._pipeline, step] = total
        sums = self._group.sum(every, "all samples")().sum(0)
        return list(sums.unbind()) if self._counts_on_device else sums.tolist()


def _check_keywords(given: Pieces | None, weigh: str | None) -> None:
    """Raise ExecutionError for `loss_kwargs` that the loss can't be called with."""
    for piece in [] if given is None else given.microbatches:
        if not isinstance(piece, Mapping):
            raise ExecutionError(
                "loss_kwargs: each microbatch needs a dict of keyword arguments, not "
                f"{type(piece).__name__}"
            )
        if piece.get("reduction") == "sum" and weigh is not None:
            raise ExecutionError(SUMS)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}"


def name_of_extra(stage: int) -> str:
    """What a stage gets beside its input, as messages name it."""
    return f"stage_inputs[{stage}]"


def _accumulated_by_step(schedule: Schedule) -> list[list[int]]:
    """The microbatches that the last stage accumulates into each of its OPTIM_STEPs, over all ranks
    that hold it, in the order of the lists."""
    flow = graph_of(schedule)
    made = flow.weight_gradients[-1]
    order, turns = np.argsort(made), flow.turn[made]
    return [order[turns[order] == step].tolist() for step in range(turns.max() + 1)]


def _cut_by_others(schedule: Schedule, accumulated: Iterable[list[int]]) -> list[list[int]]:
    """Of these groups of the last stage those of which an OPTIM_STEP elsewhere applies a part."""
    flow = graph_of(schedule)
    turns = flow.turn[flow.weight_gradients]
    return [group for group in accumulated if np.ptp(turns[:, group], axis=1).any()]


def _common_rows(pieces: Mapping[str, Pieces]) -> int | None:
    """The rows of all whole batches; None if all microbatches came ready-made.

    Raises ExecutionError for different rows: they would not belong together, and a loss might even
    broadcast them.
    """
    found = {what: held.rows for what, held in pieces.items() if held.rows is not None}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{what} {rows}" for what, rows in found.items())
        raise ExecutionError(
            "whole batches of a call must have the same number of rows, but their rows differ: "
            f"{listed}; pass a batch with other rows as a list of ready microbatches"
        )
    return next(iter(found.values()), None)


SUMS = (
    'loss_fn must return the mean over a microbatch, but reduction="sum" makes it a sum; use '
    'reduction="mean", and pass count= if the mean is over something else than rows; or pass '
    "weigh=None to train on the sum of what loss_fn returns"
)


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
        schedule, grid = plan.schedule, plan.grid
        self._control, self._accelerator = control, plan.accelerator
        self._adds_up = plan.arguments.weigh is None
        self.microbatches = microbatches
        lines, last = range(grid.pipelines), plan.last_stage
        holders = (grid.number(rank, at) for at in lines for rank in schedule.placement[last])
        self._holders = [*dict.fromkeys(holders)]
        self._has_part = grid.number(grid.rank) in self._holders
        self._receivers = [
            *dict.fromkeys(grid.number(r, at) for at in lines for r in range(grid.ranks))
        ]
        report_of = {number: at for at, number in enumerate(self._holders)}
        runs = graph_of(schedule).runs
        self._found_in = [
            (report_of[grid.number(int(runs[last, m]), at)], place)
            for at in lines
            for place, m in enumerate(microbatches)
        ]

    def expect(self) -> Exchange:
        """Post the receives of a call's losses, long before the losses are sent."""
        size = 2 * len(self.microbatches)
        return self._control.expect(self._holders, size, self._accelerator.queues)

    def report(
        self, exchange: Exchange, counts: Sequence[Count], losses: Sequence[float | Tensor | None]
    ) -> Callable[[], CallLosses]:
        """Send the losses of the microbatches that ran here; returns a function that gets the
        losses of all. `counts` and `losses` are those of the whole call."""
        if len(counts) > len(self.microbatches):
            own = slice(self.microbatches.start, self.microbatches.stop)
            counts, losses = counts[own], losses[own]
        if not self._accelerator.queues:
            if self._has_part:
                exchange.give(_listed(counts, losses), self._receivers)
            return lambda: self._found(exchange.result())
        late = self._late(counts, losses) if self._has_part else None

        def exchanged() -> list[Tensor]:
            if late is not None:
                exchange.give(late(), self._receivers)
            return exchange.result()

        if len(self._receivers) == 1:  # no other process waits for it
            return lambda: self._found(exchanged())
        found = self._control.courier.send(exchanged)
        return lambda: self._found(found.result())

    def _late(
        self, counts: Sequence[Count], losses: Sequence[float | Tensor | None]
    ) -> Callable[[], Tensor]:
        """A function that gets this process's report, whose losses and counts are on the device, by
        one copy: the losses, then the counts that the host does not know."""
        ran = [m for m, loss in enumerate(losses) if loss is not None]
        if not ran:
            return lambda: _listed(counts, losses)
        values = torch.stack([cast(Tensor, losses[m]).reshape(()) for m in ran]).to(torch.float64)
        unknown = [n for m in ran if isinstance(n := counts[m], Tensor)]
        if unknown:
            values = torch.cat([values, torch.stack(unknown)])

        def listed(copied: Tensor) -> Tensor:
            read = iter(copied.tolist())
            found = {m: next(read) for m in ran}
            numbers = [
                next(read) if m in found and isinstance(n, Tensor) else n
                for m, n in enumerate(counts)
            ]
            return _listed(numbers, [*map(found.get, range(len(losses)))])

        return Late(self._accelerator, values, listed)

    def _found(self, reports: Sequence[Tensor]) -> CallLosses:
        tables = [report.view(2, -1).tolist() for report in reports]
        # Without samples there is no mean to count.
        total = sum(sum(n * loss for n, loss in zip(*rows, strict=True) if n) for rows in tables)
        samples = sum(sum(counts) for counts, _ in tables)
        placed = ((*(row[m] for row in tables[at]),) for at, m in self._found_in)
        losses = tuple(loss if n else math.nan for n, loss in placed)
        mean = total if self._adds_up else total / samples if samples else math.nan
        return CallLosses(mean, samples, losses)


def _listed(counts: Sequence[Count], losses: Sequence[float | Tensor | None]) -> Tensor:
    """This process's report of the microbatches that ran here."""
    numbers = [0.0 if loss is None else float(n) for n, loss in zip(counts, losses, strict=True)]
    found = [0.0 if loss is None else float(loss) for loss in losses]
    return torch.tensor([*numbers, *found], dtype=torch.float64, device="cpu")


def batches_of(microbatches: int, size: int) -> list[range]:
    """The microbatches of each batch, `size` a batch."""
    return [range(first, first + size) for first in range(0, microbatches, size)]


# Of a call that has several batches, a list says where each is applied:
#
#     microbatches of a batch: 2     1F1B that steps after each backward, rank 0 of 2
#
#     0F0 0F1 0B0 0OPTIM_STEP 0F2 0B1 0OPTIM_STEP │ 0F3 0B2 0OPTIM_STEP 0B3 0OPTIM_STEP │
#                                     batch 0 is in the weights               batch 1 is


def ends_of_batches(schedule: Schedule, rank: int, size: int) -> list[int]:
    """For each batch but the last, of `size` microbatches, the number of entries in the rank's list
    up to the last OPTIM_STEP that applies any of it."""
    number = -(-schedule.microbatches // size)
    ends = [0] * number
    for index, _, batches in _steps(schedule, rank, size):
        for batch in batches:
            ends[batch] = index + 1
    for batch in range(1, number):  # a replica may have nothing of one
        ends[batch] = max(ends[batch], ends[batch - 1])
    return ends[:-1]


def check_batches(schedule: Schedule, size: int) -> None:
    """Raise ExecutionError unless a list applies its batches one after the other: each OPTIM_STEP
    applies microbatches of one batch, and each rank applies a batch before the next one."""
    for rank in range(schedule.ranks):
        latest = 0
        for index, stage, batches in _steps(schedule, rank, size):
            if len(batches) > 1 or min(batches, default=latest) < latest:
                first, *others = sorted({*batches, latest})
                what = (
                    f"applies microbatches of batches {first} and {others[-1]} at once"
                    if len(batches) > 1
                    else f"applies batch {first} after another stage's has applied {others[-1]}"
                )
                raise ExecutionError(
                    f"{schedule.name}: OPTIM_STEP of stage {stage} {what}, {size} microbatches "
                    "each, so the batches could not have different learning rates; take batches of "
                    "another number of microbatches, or a schedule= whose updates fit them",
                    rank=rank,
                    index=index,
                )
            latest = max(batches, default=latest)


def _steps(schedule: Schedule, rank: int, size: int) -> list[tuple[int, int, set[int]]]:
    """The OPTIM_STEPs of a rank: the index, the stage and the applied batches of each."""
    pending: dict[int, set[int]] = {}
    found = []
    for index, entry in enumerate(schedule.actions[rank]):
        for action in flat([entry]):
            if action.kind in COMPLETES_GRADIENTS and action.microbatch is not None:
                pending.setdefault(action.stage, set()).add(action.microbatch // size)
            elif action.kind is Kind.OPTIM_STEP:
                found.append((index, action.stage, pending.pop(action.stage, set())))
    return found
