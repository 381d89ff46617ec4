"""Runs a schedule under given costs, on the `edge` channel model.

What runs on some transport runs here: a batch that blocks under `edge`, and not where posts never
block, is run as its parts.

A rank runs its compute in list order, each action as soon as the one before it is done and its
receive has arrived. A send or receive is posted when the compute listed before it is done; a
transfer starts when both its ends are posted and its channel has finished the transfer before it.

    rank 0   0F0 0SEND_ACT0 0F1 ...         posted at 1 ─┐
    rank 1   1RECV_ACT0 1F0 ...             posted at 0 ─┴─ starts at 1, 1F0 when it is done
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedir.checker import prove
from schedir.ir import (
    CHANNELS,
    KINDS,
    Plan,
    Schedule,
    Times,
    expect_schedule,
    plan,
)
from schedir.passes import split_batches
from schedir.simulator.costs import CostModel
from schedir.simulator.timeline import Timeline

_CHANNEL = "edge"


def simulate(schedule: Schedule, costs: CostModel | None = None) -> Timeline:
    """Run the schedule under a cost model (by default the textbook's, `CostModel()`).

    A compute-only schedule gets its communication first. Raises ScheduleError, with what
    `schedir.check` finds, where the schedule is wrong or runs under no channel model, TypeError for
    what is no Schedule.
    """
    expect_schedule(schedule)
    costs = costs or CostModel()
    report = prove(schedule, CHANNELS[-1])
    complete = report.proved()
    planned = plan(complete if _CHANNEL in report.clean_channels else split_batches(complete))
    if costs == CostModel():
        return _timeline(complete, planned, planned.textbook, 0, 0, costs)
    columns = complete.columns
    transfer = _first(costs.latency) + _first(costs.boundary_bytes) / _first(costs.bandwidth)
    collective = _first(costs.reduce_grad)
    durations = [
        _at(getattr(costs, KINDS[kind].name.lower()), stage)
        for kind, stage in zip(
            columns.kind[planned.compute].tolist(),
            columns.stage[planned.compute].tolist(),
            strict=True,
        )
    ]
    times = planned.priced(durations, transfer, collective)
    return _timeline(complete, planned, times, transfer, collective, costs)


def _first(value: Any) -> float:
    return value if isinstance(value, (int, float)) else 0


def _at(value: Any, stage: int) -> Any:
    return value[stage] if isinstance(value, tuple) else value


def _timeline(
    schedule: Schedule,
    planned: Plan,
    times: Times,
    transfer: float,
    collective: float,
    costs: CostModel,
) -> Timeline:
    """The start and the end of every action, rank after rank."""
    whole = all(isinstance(t, int) for t in (*times.ends, transfer, collective))
    starts = np.zeros(len(schedule.columns), np.int64 if whole else np.float64)
    ends = np.zeros_like(starts)
    starts[planned.compute] = np.array(times.starts, starts.dtype)[planned.last]
    ends[planned.compute] = np.array(times.ends, ends.dtype)[planned.last]
    transfers = schedule.dataflow.transfers
    begins = np.array(times.begins[: len(transfers)], starts.dtype)
    for side in (transfers.send, transfers.receive):
        starts[side], ends[side] = begins, begins + transfer
    for places, begin in zip(planned.collectives, times.begins[len(transfers) :], strict=False):
        starts[list(places)] = begin
        ends[list(places)] = starts[places[0]] + collective
    sizes = costs.sizes
    return Timeline(schedule, starts, ends, sizes if sizes.known else None, costs.unit)
