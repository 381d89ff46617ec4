"""Runs a schedule under given costs, on the `edge` channel model.

What runs on some transport runs here: a batch that blocks under `edge`, and not where posts never
block, is run as its parts.

A rank runs its compute in list order, each action as soon as the one before it is done and its
receive has arrived. A transfer is posted when the compute listed before its send is done, starts
when its channel is free, occupies it for as long as its bytes take, and arrives a latency later:

    rank 0   0F0 0SEND_ACT0 0F1 ...         posted at 1
                          ══─ ─ ─ ─         starts at 1: on the channel ══, on its way ─ ─
    rank 1   1RECV_ACT0           1F0 ...   starts when it has arrived
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from schedir.checker import prove, sound
from schedir.ir import CHANNELS, Plan, Schedule, Times, expect_schedule, plan
from schedir.passes import split_batches
from schedir.simulator.costs import CostModel
from schedir.simulator.overrides import Durations, overridden
from schedir.simulator.prices import Prices, prices
from schedir.simulator.timeline import Timeline

Receives: TypeAlias = Literal["ahead", "listed"]
"""When receives are posted: from the beginning on, or where they are listed."""

_CHANNEL, _WEAKEST = "edge", CHANNELS[-1]
_MOST_INT = 2**62


def simulate(
    schedule: Schedule,
    costs: CostModel | None = None,
    *,
    durations: Durations | None = None,
    receives: Receives = "ahead",
) -> Timeline:
    """Run the schedule under a cost model (by default the textbook's, `CostModel()`).

    Receives are posted `"ahead"` of their place, as the executor does, so they delay nothing; with
    `"listed"` a transfer also waits for the compute listed before its receive. What is part of a
    batch is posted with that in both cases.

    `durations[rank, index]` replaces the cost of one entry of the lists as they are given here; for
    an overlapped pair it is the time of both. For a send or receive it is the time from the start
    of its transfer to its arrival, whose channel is occupied for as long as `costs` says, but no
    longer than that; in a batch it is that of each transfer. Where both ends of a transfer, or
    several REDUCE_GRADs that happen together, have one, the longest counts.

    A compute-only schedule gets its communication first. Times are integers where all costs are.

    Raises ScheduleError, with what `schedir.check` finds, where the schedule is wrong or runs under
    no channel model; SchedirError where the costs lack a stage or a link of it; ValueError for
    `durations` of no entry, or that are no finite times >= 0, and other `receives`; TypeError for
    what is no Schedule or no CostModel.
    """
    costs = CostModel() if costs is None else costs
    if receives not in ("ahead", "listed"):
        raise ValueError(f'receives must be "ahead" or "listed", not {receives!r}')
    complete, planned, priced = prepared(schedule, costs)
    if durations:
        priced = overridden(priced, schedule, complete, planned, durations)
    times = run_priced(complete, planned, priced, receives)
    return _timeline(complete, planned, times, priced, costs)


def prepared(schedule: Schedule, costs: CostModel) -> tuple[Schedule, Plan, Prices]:
    """The complete schedule, how it runs, and what all of it costs. Raises as `simulate` does, but
    where it blocks: that shows as it is run."""
    expect_schedule(schedule)
    if not isinstance(costs, CostModel):
        raise TypeError(f"costs must be a CostModel, not {costs!r}")
    complete = sound(schedule) or prove(schedule, _WEAKEST).proved()
    planned = plan(complete)
    if planned.batches and _CHANNEL not in prove(complete, _WEAKEST).clean_channels:
        planned = plan(split_batches(complete))
    return complete, planned, prices(complete, planned, costs)


def run_priced(
    complete: Schedule, planned: Plan, priced: Prices, receives: Receives = "ahead"
) -> Times:
    """When all that is `prepared` runs. Raises ScheduleError where it blocks."""
    times = planned.priced(
        priced.compute.tolist(),
        priced.takes.tolist(),
        priced.holds.tolist(),
        posts=planned.ahead if receives == "ahead" else planned.listed,
    )
    if times.blocked:
        prove(complete, _WEAKEST).proved()  # raises, as what blocks here blocks where posts don't
    return times


def _timeline(
    schedule: Schedule, planned: Plan, times: Times, priced: Prices, costs: CostModel
) -> Timeline:
    """The start and the end of every action, rank after rank."""
    begins = times.begins[: len(priced.takes)]
    last = max(max(times.ends, default=0), max(begins, default=0))
    kind = np.int64 if priced.whole and last < _MOST_INT else np.float64
    starts = np.zeros(len(schedule.columns), kind)
    ends = np.zeros_like(starts)
    starts[planned.compute] = np.array(times.starts, kind)[planned.last]
    ends[planned.compute] = np.array(times.ends, kind)[planned.last]
    places, exchanges = planned.exchanged
    begun = np.array(begins, kind)
    starts[places], ends[places] = begun[exchanges], (begun + priced.takes)[exchanges]
    sizes = costs.sizes
    return Timeline(schedule, starts, ends, sizes if sizes.known else None, costs.unit)
