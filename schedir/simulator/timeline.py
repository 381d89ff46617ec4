"""The timeline of a schedule under given costs, on the `edge` channel model.

A rank runs its compute in list order, each action as soon as the one before it is done and its
receive has arrived. A send or receive is posted when the compute listed before it is done; a
transfer starts when both its ends are posted and its channel has finished the transfer before it.

    rank 0   0F0 0SEND_ACT0 0F1 ...         posted at 1 ─┐
    rank 1   1RECV_ACT0 1F0 ...             posted at 0 ─┴─ starts at 1, 1F0 when it is done
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from schedir.checker import check
from schedir.errors import ScheduleError
from schedir.ir import (
    BACKWARDS,
    KINDS,
    Action,
    Kind,
    Meetings,
    Plan,
    Schedule,
    Time,
    Times,
    expect_schedule,
    peak_activations,
    plan,
    run,
    weight_versions,
)
from schedir.passes import insert_communication
from schedir.simulator.costs import CostModel

Numbers: TypeAlias = NDArray[Any]
"""Times: of integers where all costs are, else of floats."""


@attrs.frozen
class Span:
    """One entry of a rank's list and the time that it took; `index` is its place in the list.

    The span of a send or receive is that of its transfer.
    """

    index: int
    action: Action
    start: float
    end: float


@attrs.frozen
class RankStats:
    """One rank's share of a timeline, in the cost model's unit of time.

    `busy` is the time in compute, `idle` the rest of the makespan, `span` the time from its first
    FORWARD to the end of its last compute. `peak_activations` counts (stage, microbatch) pairs;
    `weight_versions` the most versions alive at once in any of its stages, the newest included.
    """

    rank: int
    busy: float
    idle: float
    span: float
    peak_activations: int
    weight_versions: int


# Not slotted, so that the spans can be made when somebody looks at them.
@attrs.frozen(slots=False)
class Timeline:
    """When every action of a schedule runs: `spans[rank]` in list order, and what follows.

    `starts` and `ends` hold the times of every action, rank after rank.
    """

    schedule: Schedule
    starts: Numbers = attrs.field(repr=False, eq=False)
    ends: Numbers = attrs.field(repr=False, eq=False)
    makespan: float
    bubble_fraction: float
    ranks: tuple[RankStats, ...]

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """`spans[rank]`: the entries of the rank's list with their times."""
        times = iter(zip(self.starts.tolist(), self.ends.tolist(), strict=True))
        return tuple(
            tuple(Span(index, action, *next(times)) for index, action in enumerate(actions))
            for actions in self.schedule.actions
        )


def simulate(schedule: Schedule, costs: CostModel | None = None) -> Timeline:
    """Run the schedule under a cost model (by default the textbook's, `CostModel()`).

    A compute-only schedule gets its communication first. Raises ScheduleError, with what
    `schedir.check` finds, where some action could never run, TypeError for what is no Schedule.
    """
    expect_schedule(schedule)
    price = (costs or CostModel()).by_kind()
    given = schedule
    try:
        schedule = insert_communication(given)
        planned = plan(schedule)
        durations = [price[KINDS[kind]] for kind in schedule.columns.kind[planned.compute].tolist()]
        times = _run(planned, durations, price)
    except ScheduleError:
        check(given).raise_if_errors()
        raise
    starts, ends = _by_place(schedule, planned, times, price)
    makespan = ends.max(initial=0).item()
    ranks = tuple(_rank_stats(schedule, planned, times, durations, makespan))
    busy = sum(rank.busy for rank in ranks)
    bubble = 1 - busy / (schedule.ranks * makespan) if makespan else 0.0
    return Timeline(schedule, starts, ends, makespan, bubble, ranks)


def _run(planned: Plan, durations: list[Time], price: dict[Kind, Time]) -> Times:
    collectives = len(planned.collectives)
    transfers = len(planned.posts) - collectives
    last = [price[Kind.SEND_ACT]] * transfers + [price[Kind.REDUCE_GRAD]] * collectives
    # What takes no time never holds up the next one of its channel or stage.
    timed = price[Kind.SEND_ACT] or (collectives and price[Kind.REDUCE_GRAD])
    before = planned.before.tolist() if timed else ()
    meetings = Meetings(planned.posts, before, last)
    times = run(planned.bounds.tolist(), durations, planned.needs.tolist(), meetings)
    if -1 in times.ends:
        raise ScheduleError("the schedule blocks; `schedir check` says why", ())
    return times


def _by_place(
    schedule: Schedule, planned: Plan, times: Times, price: dict[Kind, Time]
) -> tuple[Numbers, Numbers]:
    """The start and the end of every action, rank after rank."""
    whole = all(isinstance(cost, int) for cost in price.values())
    starts = np.zeros(len(schedule.columns), np.int64 if whole else np.float64)
    ends = np.zeros_like(starts)
    starts[planned.compute], ends[planned.compute] = times.starts, times.ends
    transfers = schedule.dataflow.transfers
    begins = np.array(times.begins[: len(transfers)], starts.dtype)
    for side in (transfers.send, transfers.receive):
        starts[side], ends[side] = begins, begins + price[Kind.SEND_ACT]
    for places, begin in zip(planned.collectives, times.begins[len(transfers) :], strict=True):
        starts[list(places)] = begin
        ends[list(places)] = starts[places[0]] + price[Kind.REDUCE_GRAD]
    return starts, ends


def _rank_stats(
    schedule: Schedule, planned: Plan, times: Times, durations: list[Time], makespan: Time
) -> Iterator[RankStats]:
    columns = schedule.columns
    bounds = planned.bounds.tolist()
    forwards = columns.is_kind(Kind.FORWARD)[planned.compute]
    peaks = peak_activations(columns)
    # Where nothing of a rank's stages comes behind their steps, one version is all there is.
    reading = columns.is_kind(Kind.FORWARD, *BACKWARDS) & (schedule.dataflow.steps_before > 0)
    several = set(columns.rank[reading].tolist())
    for rank, (begin, end) in enumerate(pairwise(bounds)):
        busy = sum(durations[begin:end])
        first = begin + int(forwards[begin:end].argmax()) if forwards[begin:end].any() else None
        until = times.ends[end - 1] if end > begin else 0
        since = times.starts[first] if first is not None else until
        versions = weight_versions(columns, rank) if rank in several else {}
        yield RankStats(
            rank=rank,
            busy=busy,
            idle=makespan - busy,
            span=until - since,
            peak_activations=peaks[rank][0],
            weight_versions=max((stage.peak()[0] for stage in versions.values()), default=1),
        )
