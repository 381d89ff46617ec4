"""Runs a schedule under given costs, on the `edge` channel model.

Every schedule that runs on some transport runs here: a batch that blocks under `edge` but not if
posts never block is run as its parts.

A rank runs its compute in list order, each action as soon as the one before it is done and its
receive has arrived. A transfer is posted when the compute listed before its send is done, starts
when its channel is free, occupies it for as long as its bytes take, and arrives a latency later:

    rank 0   0F0 0SEND_ACT0 0F1 ...         posted at 1
                          ══─ ─ ─ ─         starts at 1: on the channel ══, on its way ─ ─
    rank 1   1RECV_ACT0           1F0 ...   starts when it has arrived

A copy to the host or back is posted when the compute listed before it is done, and starts when its
rank's engine is free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import attrs
import numpy as np

from schedir.checker import prove, sound
from schedir.errors import SchedirError
from schedir.graph.compile import graph_of
from schedir.graph.paths import QUEUED, TEXTBOOK, Waits, finish, textbook, waits
from schedir.ir import (
    CHANNELS,
    COMMUNICATION,
    COMPUTE,
    COPIES,
    HOMES,
    KINDS,
    Columns,
    Ints,
    Kind,
    Schedule,
    expect_schedule,
)
from schedir.simulator.costs import CostModel
from schedir.simulator.moments import CHANNEL, as_run
from schedir.simulator.timeline import Timeline
from schedir.simulator.values import MOST, Numbers, PerLink, PerStage, expect_number

Receives: TypeAlias = Literal["ahead", "listed"]
"""When receives are posted: from the beginning on, or where they are listed."""
Durations: TypeAlias = Mapping[tuple[int, int], float]
"""How long entries take, by (rank, index)."""

_WEAKEST = CHANNELS[-1]
_MOST_INT = 2**62


def simulate(
    schedule: Schedule,
    costs: CostModel | None = None,
    *,
    durations: Durations | None = None,
    receives: Receives = "ahead",
) -> Timeline:
    """Run the schedule under a cost model (by default the textbook's, `CostModel()`).

    Receives are posted `"ahead"` of their place, as the executor does, so they delay nothing. With
    `"listed"` a transfer also waits for the compute listed before its receive. Parts of a batch are
    posted with the batch in both cases.

    `durations[rank, index]` replaces the cost of one entry of the lists as you give them; for an
    overlapped pair it is the time of both parts. For a send or receive it is the time from the
    start of its transfer to its arrival. The channel is then occupied for as long as `costs` says,
    but no longer than the duration. For a batch it is the time of each transfer. If both ends of a
    transfer, or several REDUCE_GRADs that happen together, have durations, the longest counts.

    A compute-only schedule gets its communication first. Times are integers if all costs are.

    Raises ScheduleError, with the findings of `schedir.check`, if the schedule is wrong or runs
    under no channel model. Raises SchedirError if the costs lack a stage or a link of the schedule.
    Raises ValueError for `durations` of an unknown entry or that are not finite and >= 0, and for
    other `receives`. Raises TypeError for anything that is not a Schedule or a CostModel.

    >>> import schedir
    >>> line = schedir.simulate(schedir.build("1f1b", ranks=2, microbatches=4))
    >>> line.makespan, line.bubble_fraction, line.ranks[0].peak_activations
    (15, 0.19999999999999996, 2)
    """
    if receives not in ("ahead", "listed"):
        raise ValueError(f'receives must be "ahead" or "listed", not {receives!r}')
    costs = CostModel() if costs is None else costs
    complete = completed(schedule, costs)
    priced = prices(complete, costs)
    if durations:
        priced = _overridden(priced, schedule, complete, durations)
    starts = _starts(complete, costs, priced, ahead=receives == "ahead")
    sizes = costs.sizes
    return Timeline(
        complete, starts, starts + priced.takes, sizes if sizes.known else None, costs.unit
    )


def completed(schedule: Schedule, costs: CostModel) -> Schedule:
    """The schedule with its communication. Raises as `simulate` does, except for a deadlock, which
    shows when the schedule is run."""
    expect_schedule(schedule)
    if not isinstance(costs, CostModel):
        raise TypeError(f"costs must be a CostModel, not {costs!r}")
    return sound(schedule) or prove(schedule, _WEAKEST).proved()


def waits_of(schedule: Schedule, costs: CostModel, priced: Prices, *, ahead: bool = True) -> Waits:
    """What waits for what when a complete schedule runs. Raises ScheduleError if it blocks."""
    waiting = waits(as_run(schedule), CHANNEL, ahead=ahead)
    if waiting.stuck.any():
        prove(schedule, _WEAKEST).proved()  # raises, as what blocks here blocks where posts don't
    copies = schedule.columns.where(*COPIES)
    if costs.copy_engine and len(copies):
        return _sharing_engines(waiting, copies, costs.copy_engine, priced)
    return waiting


def _sharing_engines(
    waiting: Waits, copies: Ints, engines: Mapping[int, int], priced: Prices
) -> Waits:
    """The waits, and those of copies for the ones before them on an engine that ranks share: in the
    order in which they would be posted if no copy took any time."""
    takes, holds = priced.takes.copy(), priced.holds.copy()
    takes[copies] = holds[copies] = 0
    posted = finish(waiting, takes, holds)[copies]
    turn = np.zeros(waiting.nodes, np.int64)
    turn[waiting.order] = np.arange(len(waiting.order))
    rank = waiting.schedule.columns.rank[copies]
    engine = np.array([engines.get(each, -1 - each) for each in rank.tolist()])
    # Of those posted at once that of the lower rank goes first, unless it waits for the other.
    for tie in (copies, turn[copies]):
        order = np.lexsort((tie, posted, engine))
        again = np.flatnonzero(engine[order][1:] == engine[order][:-1])
        later, earlier = copies[order[again + 1]], copies[order[again]]
        shared = attrs.evolve(
            waiting,
            later=np.append(waiting.later, later),
            earlier=np.append(waiting.earlier, earlier),
            why=np.append(waiting.why, np.full(len(again), QUEUED)),
            waiter=np.append(waiting.waiter, later),
            awaited=np.append(waiting.awaited, earlier),
        )
        if not shared.stuck.any():
            break
    return shared


def _starts(schedule: Schedule, costs: CostModel, priced: Prices, ahead: bool) -> Numbers:
    """When each action of a complete schedule starts. Raises ScheduleError where it blocks."""
    columns, starts = schedule.columns, None
    usual = _of_entries(columns, TEXTBOOK[columns.kind])
    if all(
        each.dtype == usual.dtype and np.array_equal(each, usual)
        for each in (priced.takes, priced.holds)
    ):
        starts = textbook(as_run(schedule), CHANNEL, ahead=ahead)
    if starts is None or (starts < 0).any():
        waiting = waits_of(schedule, costs, priced, ahead=ahead)
        starts = finish(waiting, priced.takes, priced.holds)
    starts = starts[: len(columns)]
    return starts.astype(np.float64) if starts.max(initial=0) > _MOST_INT else starts


# Prices.


@attrs.frozen(eq=False)
class Prices:
    """How long every action takes, those that are one together; and for how long it `holds` what is
    queued behind it: a transfer its channel. Shape [actions]."""

    takes: Numbers
    holds: Numbers


def prices(schedule: Schedule, costs: CostModel) -> Prices:
    """What a complete schedule costs.

    Raises SchedirError where the costs have another number of stages, or lack a link.
    """
    _expect_fit(schedule, costs)
    columns, transfers = schedule.columns, graph_of(schedule).transfers
    present = np.flatnonzero(np.bincount(columns.kind)).tolist()
    costs_of = {code: _of_kind(costs, KINDS[code]) for code in present}
    table = np.zeros((len(KINDS), schedule.stages), np.result_type(np.int64, *costs_of.values()))
    for code, cost in costs_of.items():
        table[code] = cost
    takes = _of_entries(columns, table[columns.kind, columns.stage], costs.overlapped)

    copies = columns.where(*COPIES)
    speed = np.full(len(copies), 0 if costs.host_bandwidth == math.inf else costs.host_bandwidth)
    copied = _quotient(_at(costs.activation_bytes, columns.stage[copies]), speed)
    links = transfers.source * schedule.ranks + transfers.target
    # An activation goes on to its stage, a gradient back to it.
    sizes = _at(costs.boundary_bytes, transfers.stage - ~transfers.is_gradient)
    busy = _quotient(sizes, _at_links("bandwidth", costs.bandwidth, schedule, links))
    arrive = _at_links("latency", costs.latency, schedule, links) + busy
    takes = takes.astype(np.result_type(takes, arrive, copied), copy=False)
    takes[copies] = copied
    holds = takes.copy()
    for ends in (transfers.send, transfers.receive):
        takes[ends], holds[ends] = arrive, busy
    return Prices(takes, holds)


def _of_entries(columns: Columns, alone: Numbers, overlapped: PerStage | None = None) -> Numbers:
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


def _of_kind(costs: CostModel, kind: Kind) -> Numbers:
    """What a kind costs: as many forwards as the table of kinds says, where the costs have no field
    for it."""
    if not hasattr(costs, kind.name.lower()):
        return kind.meaning.cost * np.array(costs.forward)
    cost: PerStage | None = getattr(costs, kind.name.lower())
    return np.array(costs.forward if cost is None else cost)


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


# Single entries that take another time.


def _overridden(
    priced: Prices, given: Schedule, complete: Schedule, durations: Durations
) -> Prices:
    """The prices with those of some entries replaced, located in the lists as they were `given`.

    Raises ValueError for a key that names no entry, ValueError or TypeError for what is no finite
    time >= 0.
    """
    heads, times = _heads(given, durations), _times(given, durations)
    columns, graph = complete.columns, graph_of(complete)
    if complete is not given:
        # Both have the same entries, but for communication.
        heads = np.flatnonzero(~columns.is_kind(*COMMUNICATION))[heads]
    # The time given to the entry of each place, -1 for none.
    by_entry = np.full(len(columns.heads), -1, times.dtype)
    by_entry[columns.entry[heads]] = times
    longest = by_entry[columns.entry]
    send, receive = graph.transfers.send, graph.transfers.receive
    longest[send] = longest[receive] = np.maximum(longest[send], longest[receive])
    for places in map(list, graph.collectives):
        longest[places] = longest[places].max()
    takes = np.where(longest >= 0, longest, priced.takes)
    copies = columns.is_kind(*COPIES)
    return Prices(takes, np.where(copies, takes, np.minimum(priced.holds, takes)))


def _heads(given: Schedule, durations: Durations) -> Ints:
    """The place of the first action of each entry that is named."""
    heads = given.columns.heads
    first = np.searchsorted(heads, given.columns.starts)
    lengths = np.diff(first).tolist()
    for key in durations:
        if not (isinstance(key, tuple) and len(key) == 2 and all(map(_is_int, key))):
            raise ValueError(f"durations must be by (rank, index), not by {key!r}")
        rank, index = key
        if not 0 <= rank < given.ranks:
            why = f"there are {given.ranks} ranks"
        elif not 0 <= index < lengths[rank]:
            why = f"rank {rank} has {lengths[rank]}"
        else:
            continue
        raise ValueError(f"durations[{rank}, {index}] is of no entry of {given.name}: {why}")
    ranks, indices = np.array([*durations]).T
    found: Ints = heads[first[ranks] + indices]
    return found


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _times(given: Schedule, durations: Durations) -> Numbers:
    times = np.array([*durations.values()])
    if times.dtype.kind not in "iuf" or not ((times >= 0) & (times <= MOST)).all():
        for (rank, index), time in durations.items():
            expect_number(f"durations[{rank}, {index}], of {given.actions[rank][index]},", time)
    return times.astype(np.float64 if times.dtype.kind == "f" else np.int64)
