"""From the arguments of a call to the microbatches in their cells."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from schedir.errors import ExecutionError
from schedir.ir import Kind, Schedule
from schedir.runtime.batch import fingerprint
from schedir.runtime.batch.microbatches import Batch, Microbatch, Pieces, cut, samples, weights
from schedir.runtime.processes.control import COUNT_TAG, Control
from schedir.runtime.processes.grid import Grid
from schedir.runtime.program.opening import UNKNOWN
from schedir.runtime.request import Request
from schedir.runtime.stage.cells import Cells


@attrs.frozen(eq=False)
class Given:
    """The arguments of one call, as every rank may give them."""

    inputs: Batch | None
    target: Batch | None = None
    stage_inputs: Mapping[int, Batch | None] = {}
    loss_kwargs: Batch | None = None


@attrs.frozen(eq=False)
class Feed:
    """What has been put into the cells.

    `counts` are the samples of each microbatch, on a rank of the loss; `extras` what stages get
    beside their input, by stage and microbatch, as far as it was given here. `rows` are those of
    the whole batches that were cut here, UNKNOWN for none. `inputs` and `target` are fingerprints,
    for ranks that read either to compare.
    """

    counts: Sequence[float]
    extras: Mapping[int, Sequence[Microbatch]]
    rows: int
    inputs: int
    target: int


class Feeder:
    """Cuts what calls give, on a rank with the stages `local`."""

    def __init__(
        self,
        schedule: Schedule,
        local: Collection[int],
        count: Callable[[Any], float | Tensor],
        grid: Grid,
        control: Control | None,
    ) -> None:
        self._microbatches = schedule.microbatches
        self._last = schedule.stages - 1
        self._local = local
        self._count = count
        self._grid, self._control = grid, control
        self._groups = _loss_groups(schedule)
        # One rank alone has nobody to compare with; others don't read what they are given.
        alone = control is None or {*schedule.placement[0], *schedule.placement[-1]} == {grid.rank}
        self._compares = not alone and not {0, self._last}.isdisjoint(local)

    def fill(self, cells: Cells, given: Given, request: Request) -> Feed:
        """Put the microbatches into their cells.

        Raises ExecutionError for arguments that don't fit; nothing has moved then.
        """
        needs = [(0, given.inputs, "inputs")]
        if request.has_loss:
            needs.append((self._last, given.target, "target"))
        for stage, batch, what in needs:
            if stage in self._local and batch is None:
                raise ExecutionError(f"stage {stage}, which runs here, needs {what}")
        pieces: dict[str, Pieces] = {}

        def read(batch: Batch, what: str) -> list[Microbatch]:
            found = pieces[what] = cut(
                batch, self._microbatches, what, may_be_short=not request.trains
            )
            return found.microbatches

        if 0 in self._local and given.inputs is not None:
            for m, piece in enumerate(read(given.inputs, "inputs")):
                cells[0, m].batch = piece
        extras = self._extras(cells, given.stage_inputs, read)
        targets = keywords = None
        if self._last in self._local and given.target is not None:
            targets = read(given.target, "target")
            if given.loss_kwargs is not None:
                keywords = read(given.loss_kwargs, "loss_kwargs")
        rows = _common_rows(pieces)
        counts: list[float] = []
        if targets is not None:
            counts = [samples(self._count, target) for target in targets]
            if rows is not None:  # what stands in for missing microbatches counts for nothing
                counts[rows:] = [0.0] * len(counts[rows:])
            for m, piece in enumerate(targets):
                cells[self._last, m].target = piece
        for m, piece in enumerate(keywords or ()):
            if not isinstance(piece, Mapping):
                raise ExecutionError(
                    "loss_kwargs: each microbatch's is a dict of keyword arguments, not "
                    f"{type(piece).__name__}"
                )
            cells[self._last, m].loss_keywords = piece
        inputs = target = fingerprint.NOTHING
        if self._compares:
            inputs, target = map(fingerprint.of_batch, (given.inputs, given.target))
        return Feed(counts, extras, UNKNOWN if rows is None else rows, inputs, target)

    def weigh(self, cells: Cells, counts: Sequence[float], request: Request) -> None:
        """Give each microbatch its share of the samples of its OPTIM_STEP, over all pipelines.

        They wait for each other, so they have compared their calls before.
        """
        if not counts:  # the loss is on another rank
            return
        # Without its updates a step is one group of microbatches.
        groups = self._groups if request.updates else [list(range(self._microbatches))]
        totals = [sum(counts[m] for m in group) for group in groups]
        if request.trains:
            totals = self._over_pipelines(totals)
        for m, share in enumerate(weights(counts, groups, totals)):
            cells[self._last, m].weight = share

    def _extras(
        self,
        cells: Cells,
        stage_inputs: Mapping[int, Batch | None],
        read: Callable[[Batch, str], list[Microbatch]],
    ) -> dict[int, list[Microbatch]]:
        """Put what stages get beside their input into their cells; those of other ranks are not
        looked at, but on the rank that has the first stage."""
        extras = {}
        for stage, batch in stage_inputs.items():
            if stage not in range(self._last + 1):
                raise ExecutionError(
                    f"stage_inputs: there is no stage {stage!r}, only 0..{self._last}"
                )
            if batch is None:
                continue
            if stage in self._local or 0 in self._local:
                extras[stage] = read(batch, f"stage_inputs[{stage}]")
            if stage in self._local:
                for m, piece in enumerate(extras[stage]):
                    cells[stage, m].extra = piece
        return extras

    def _over_pipelines(self, totals: list[float]) -> list[float]:
        """The sums of `totals` over all pipelines, on the ranks that have them."""
        if self._control is None or self._grid.pipelines == 1:
            return totals
        numbers = [self._grid.number(self._grid.rank, line) for line in range(self._grid.pipelines)]
        own = torch.tensor(totals, dtype=torch.float64)
        sizes = dict.fromkeys(numbers, len(totals))
        heard = self._control.expect(sizes, COUNT_TAG).give(own, numbers).result()
        found: list[float] = torch.stack(heard).sum(0).tolist()
        return found


def _loss_groups(schedule: Schedule) -> list[list[int]]:
    """The microbatches that the loss stage accumulates into each of its OPTIM_STEPs, over all of
    the ranks that hold it."""
    last = schedule.stages - 1
    groups: dict[int, list[int]] = {}
    for rank in schedule.placement[last]:
        steps = 0
        for action in schedule.actions[rank]:
            if action.stage != last:
                continue
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                assert action.microbatch is not None  # a backward has one
                groups.setdefault(steps, []).append(action.microbatch)
            elif action.kind is Kind.OPTIM_STEP:
                steps += 1
    return [groups[step] for step in sorted(groups)]


def _common_rows(pieces: Mapping[str, Pieces]) -> int | None:
    """The rows of all whole batches; None where all came ready-made.

    They are cut alike, so unequal ones would not belong together: a loss might even broadcast them.
    """
    found = {what: cut.rows for what, cut in pieces.items() if cut.rows is not None}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{what} {rows}" for what, rows in found.items())
        raise ExecutionError(
            f"all whole batches of a call are cut along dim 0 alike, but their rows differ: "
            f"{listed}; give what has other rows as a list of ready microbatches"
        )
    return next(iter(found.values()), None)
