"""What a schedule costs under a cost model: each compute, transfer and collective of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.ir import KIND_INDEX, KINDS, Ints, Kind, Plan, Schedule
from schedir.simulator.costs import CostModel
from schedir.simulator.times import Numbers
from schedir.simulator.values import PerLink, PerStage


@attrs.frozen(eq=False)
class Prices:
    """How long everything in a plan takes: compute, and its exchanges but for those of batches.

    What an exchange brings has arrived after it `takes` so long; it `holds` its channel, or its
    stage's sums, no longer than that. Of an overlapped pair the last part has the time of both, and
    the first one none.
    """

    compute: Numbers
    takes: Numbers
    holds: Numbers

    @property
    def whole(self) -> bool:
        """Whether all are integers."""
        return all(times.dtype.kind == "i" for times in (self.compute, self.takes, self.holds))


def prices(schedule: Schedule, planned: Plan, costs: CostModel) -> Prices:
    """The costs of a complete schedule.

    Raises SchedirError where the costs have another number of stages, or lack a link.
    """
    _expect_fit(schedule, costs)
    takes, holds = _transfers(schedule, costs)
    summed = np.array([places[0] for places in planned.collectives], np.int64)
    sums = _at(costs.reduce_grad, schedule.columns.stage[summed])
    return Prices(
        _compute(schedule, planned, costs),
        np.concatenate((takes, sums)),
        np.concatenate((holds, sums)),
    )


def _expect_fit(schedule: Schedule, costs: CostModel) -> None:
    """Raise SchedirError where something by stage is not that of the schedule's stages."""
    for field, value in attrs.asdict(costs, recurse=False).items():
        if not isinstance(value, tuple):
            continue
        stages = schedule.stages
        of_boundaries = field == "boundary_bytes"
        wanted, what = (stages - 1, "boundaries") if of_boundaries else (stages, "stages")
        if len(value) != wanted:
            raise SchedirError(
                f"{field} has {len(value)} numbers, but {schedule.name} has {wanted} {what}: give "
                "one for each, or one number for all"
            )


def _compute(schedule: Schedule, planned: Plan, costs: CostModel) -> Numbers:
    columns = schedule.columns
    kinds, stages = columns.kind[planned.compute], columns.stage[planned.compute]
    listed = np.flatnonzero(np.bincount(kinds)).tolist()
    by_kind = {kind: np.array(_of_kind(costs, KINDS[kind])) for kind in listed}
    table = np.zeros((len(KINDS), schedule.stages), np.result_type(np.int64, *by_kind.values()))
    for kind, row in by_kind.items():
        table[kind] = row
    times: Numbers = table[kinds, stages]
    if not columns.together:
        return times
    first = np.flatnonzero(planned.last > np.arange(len(kinds)))
    both = times[first] + times[first + 1]
    if costs.overlapped is not None:
        forward = first + (kinds[first] != KIND_INDEX[Kind.FORWARD])
        both = _at(costs.overlapped, stages[forward])
        times = times.astype(np.result_type(times, both))
    times[first], times[first + 1] = 0, both
    return times


def _of_kind(costs: CostModel, kind: Kind) -> PerStage:
    cost: PerStage | None = getattr(costs, kind.name.lower())
    return costs.forward if cost is None else cost


def _transfers(schedule: Schedule, costs: CostModel) -> tuple[Numbers, Numbers]:
    """How long each transfer takes, and for how long it occupies its channel."""
    transfers = schedule.dataflow.transfers
    links = transfers.source * schedule.ranks + transfers.target
    latency = _at_links("latency", costs.latency, schedule, links)
    # An activation goes on to its stage, a gradient back to it.
    boundary = transfers.stage - ~transfers.is_gradient
    sizes = _at(costs.boundary_bytes, boundary)
    bandwidth = _at_links("bandwidth", costs.bandwidth, schedule, links)
    holds = _quotient(sizes, bandwidth)
    return latency + holds, holds


def _at(value: PerStage, stages: Ints) -> Numbers:
    if isinstance(value, tuple):
        by_stage: Numbers = np.array(value)[stages]
        return by_stage
    return np.full(len(stages), value)


def _at_links(name: str, value: PerLink, schedule: Schedule, links: Ints) -> Numbers:
    """The value of each link; 0 for one that is infinite, which no bandwidth is otherwise."""
    if not isinstance(value, Mapping):
        return np.full(len(links), 0 if value == math.inf else value)
    used, inverse = np.unique(links, return_inverse=True)
    found = []
    for link in used.tolist():
        ends = divmod(link, schedule.ranks)
        if ends not in value:
            raise SchedirError(
                f"{name} has no number for the link {ends}, on which {schedule.name} sends from "
                f"rank {ends[0]} to rank {ends[1]}: add it"
            )
        found.append(0 if value[ends] == math.inf else value[ends])
    by_link: Numbers = np.array(found, None if found else np.int64)[inverse]
    return by_link


def _quotient(sizes: Numbers, bandwidth: Numbers) -> Numbers:
    """How long bytes take: integers where all are and nothing remains."""
    endless = bandwidth == 0
    if endless.all():
        return np.zeros(len(sizes), np.int64)
    sizes, bandwidth = np.where(endless, 0, sizes), np.where(endless, 1, bandwidth)
    if sizes.dtype.kind == bandwidth.dtype.kind == "i":
        whole, rest = np.divmod(sizes, bandwidth)
        if not rest.any():
            return whole
    times: Numbers = sizes / bandwidth
    return times
