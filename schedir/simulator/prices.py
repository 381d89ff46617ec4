"""What every action of a list costs: how long it takes, and how long it holds up what is queued
behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from schedir.errors import SchedirError
from schedir.graph.compile import graph_of
from schedir.graph.paths import Prices
from schedir.ir import COMPUTE, COPIES, HOMES, KINDS, Columns, Ints, Kind, Schedule
from schedir.simulator.values import Numbers, PerLink, PerStage


def prices(schedule: Schedule, costs: Mapping[str, Any]) -> Prices:
    """What a complete schedule costs, given the fields of a CostModel.

    Raises SchedirError where the costs have another number of stages, or lack a link.
    """
    _expect_fit(schedule, costs)
    columns, transfers = schedule.columns, graph_of(schedule).transfers
    present = np.flatnonzero(np.bincount(columns.kind)).tolist()
    costs_of = {code: _of_kind(costs, KINDS[code]) for code in present}
    table = np.zeros((len(KINDS), schedule.stages), np.result_type(np.int64, *costs_of.values()))
    for code, cost in costs_of.items():
        table[code] = cost
    takes = _of_entries(columns, table[columns.kind, columns.stage], costs["overlapped"])

    copies = columns.where(*COPIES)
    speed = np.full(
        len(copies), 0 if costs["host_bandwidth"] == math.inf else costs["host_bandwidth"]
    )
    copied = _quotient(_at(costs["activation_bytes"], columns.stage[copies]), speed)
    links = transfers.source * schedule.ranks + transfers.target
    # An activation goes on to its stage, a gradient back to it.
    sizes = _at(costs["boundary_bytes"], transfers.stage - ~transfers.is_gradient)
    busy = _quotient(sizes, _at_links("bandwidth", costs["bandwidth"], schedule, links))
    arrive = _at_links("latency", costs["latency"], schedule, links) + busy
    takes = takes.astype(np.result_type(takes, arrive, copied), copy=False)
    takes[copies] = copied
    holds = takes.copy()
    for ends in (transfers.send, transfers.receive):
        takes[ends], holds[ends] = arrive, busy
    return Prices(takes, holds)


def _of_entries(columns: Columns, alone: Numbers, overlapped: PerStage | None) -> Numbers:
    """What every action takes with those that it overlaps, where it takes so long alone."""
    if not columns.together:
        return alone
    second = np.flatnonzero(columns.joined & columns.is_kind(*COMPUTE))
    both = alone[second - 1] + alone[second]
    if overlapped is not None:
        forward = second - columns.is_kind(*HOMES)[second - 1]
        both = _at(overlapped, columns.stage[forward])
    takes = alone.astype(np.result_type(alone, both))
    takes[second - 1] = takes[second] = both
    return takes


def _expect_fit(schedule: Schedule, costs: Mapping[str, Any]) -> None:
    """Raise SchedirError where something by stage is not that of the schedule's stages."""
    for field, value in costs.items():
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


def _of_kind(costs: Mapping[str, Any], kind: Kind) -> Numbers:
    """What a kind costs: as many forwards as the table of kinds says, where the costs have no field
    for it."""
    name, forward = kind.name.lower(), np.array(costs["forward"])
    if name not in costs:
        return kind.meaning.cost * forward
    return forward if costs[name] is None else np.array(costs[name])


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
