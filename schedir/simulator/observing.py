"""How long each entry of a timeline took, and the samples that several timelines make.

What a rank does between two entries (posting a send, coming back from one action to begin the next)
is time that the next run spends as well, so it counts to the entry that it follows:

    rank 0   |0F0------|·|0F1------|··         |0B0---
             |<- 0F0 ->| |<- 0F1 ->|           it waits for 1SEND_GRAD0: how much of the gap was
                                               work can't be seen, so it has the usual one

How long a transfer took is seen only where its receiver waited for it. Otherwise it had arrived
when the receiver was free, and that is the most that it can have taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, COPIES, GROUPS, KINDS, RECEIVES, Bools, Ints, Kind, Schedule
from schedir.simulator.samples import COSTS, DELAYED, ENTRY, TRANSFER, WITHIN, Samples, turns
from schedir.simulator.times import Numbers

_COST_OF_KIND = np.array(
    [COSTS.index(kind.name.lower()) if kind in COMPUTE | COPIES else -1 for kind in KINDS]
)
_REDUCE, _PAIR = map(COSTS.index, ("reduce_grad", "overlapped"))


@attrs.frozen
class _Entries:
    """Places of entries, what kind of cost each is, and how long it took, NaN where not known."""

    places: Ints
    cost: Ints
    durations: Numbers


def durations_of(timeline: Any) -> dict[tuple[int, int], float]:
    """How long each entry of a timeline took, as far as that is known: what `simulate` takes as
    `durations`, by (rank, index), to replay it.

    A transfer has that of its send: where nobody waited for it, it was there at once; one that had
    to queue has none.
    """
    schedule = timeline.schedule
    columns, transfers = schedule.columns, graph_of(schedule).transfers
    queued = transfers.send[_queued(schedule, timeline.starts, timeline.ends)]
    if timeline.measured is None:
        queued = queued[:0]
    found: dict[tuple[int, int], float] = {}
    for entries in _observed(timeline):
        used = (entries.cost != WITHIN) & ~np.isin(entries.places, queued)
        known = np.flatnonzero(~np.isnan(entries.durations) & used)
        for place, cost, duration in zip(
            *(each[known].tolist() for each in (entries.places, entries.cost, entries.durations)),
            strict=True,
        ):
            position = columns.position(place)
            found[position] = duration + (found.get(position, 0) if cost == ENTRY else 0)
    sends = transfers.send
    unseen = ~np.isnan(timeline.starts[sends]) & np.isnan(timeline.ends[sends])
    for place in sends[unseen].tolist():
        found.setdefault(columns.position(place), 0.0)
    return found


def observe(timelines: Sequence[Any]) -> Samples:
    """The samples of one or several runs, each given in the order of its steps.

    The first step of each measured run is left out where it has others: it finds the shapes of
    tensors, and makes what later ones use again.
    """
    steps: list[int] = []
    rows: list[tuple[Any, ...]] = []
    for line in _warm(timelines):
        for entries in _observed(line):
            known = np.flatnonzero(~np.isnan(entries.durations))
            rows.append(_rows(line.schedule, entries, known, len(steps)))
        steps.append(len(steps) if line.measured is None else line.measured.step)
    columns = map(np.concatenate, zip(*rows, strict=True))
    return Samples(tuple(steps), *columns)


def _rows(schedule: Schedule, entries: _Entries, known: Ints, step: int) -> tuple[Any, ...]:
    columns, places = schedule.columns, entries.places
    transfer = np.isin(entries.cost, (TRANSFER, WITHIN, DELAYED))
    gradient = columns.kind[places] == KINDS.index(Kind.SEND_GRAD)
    first = columns.kind[places] == KINDS.index(Kind.FORWARD)
    forward = np.where(first, places, columns.last[places])
    stage = columns.stage[np.where(entries.cost == _PAIR, forward, places)]
    peer = np.where(transfer, graph_of(schedule).peers[places], -1)
    rank = columns.rank[places]
    number = np.where(transfer, turns(rank, peer), turns(entries.cost, stage))
    found = (
        entries.cost,
        stage - gradient,  # the boundary below a stage has the number before
        np.full(len(places), step),
        rank,
        peer,
        number,
        entries.durations,
    )
    return tuple(column[known] for column in found)


def _warm(timelines: Sequence[Any]) -> Iterator[Any]:
    """The timelines without the first step of each measured run of several."""
    run, before = 0, None
    of_run = []
    for line in timelines:
        step = None if line.measured is None else line.measured.step
        run += before is None or step != before + 1
        of_run.append(run)
        before = step
    for number, line in enumerate(timelines):
        begins = number == 0 or of_run[number - 1] != of_run[number]
        alone = number + 1 == len(timelines) or of_run[number + 1] != of_run[number]
        if line.measured is None or alone or not begins:
            yield line


def _observed(timeline: Any) -> Iterator[_Entries]:
    """What a timeline shows, compute first; then when ranks began, transfers, and collectives."""
    schedule: Schedule = timeline.schedule
    columns, transfers = schedule.columns, graph_of(schedule).transfers
    starts = np.asarray(timeline.starts)
    ends = np.asarray(timeline.ends)
    heads = np.flatnonzero(columns.is_kind(*COMPUTE) & ~columns.joined)
    arrived, summed, waits = _arrivals(schedule, ends, heads)

    follows = columns.rank[heads[1:]] == columns.rank[heads[:-1]]
    first = np.append(True, ~follows)[: len(heads)]
    ended = np.full(len(heads), -1, ends.dtype)  # when what is before on the rank was over
    ended[1:][follows] = ends[heads[:-1]][follows]
    waited = arrived > ended
    in_turn = columns.ranks > 1 and _in_turn(starts[heads], ends[heads], ends[transfers.receive])

    # A rank that has waited goes on once it notices.
    ready = np.maximum(arrived, summed)
    noticed = (ready > ended) & (not in_turn)
    durations = ends[heads] - np.where(noticed, np.minimum(ready, starts[heads]), starts[heads])
    between = np.full(len(heads), np.nan)
    between[:-1][follows] = np.maximum(starts[heads[1:]] - ends[heads[:-1]], 0)[follows]
    gaps = np.where(np.append(waited[1:] | waits[1:], True)[: len(heads)], np.nan, between)
    if in_turn:
        gaps[:] = np.nan  # one process runs all ranks: they wait for each other's turns
    cost = np.where(columns.shared[heads], _PAIR, _COST_OF_KIND[columns.kind[heads]])
    done = ends[heads]
    maker = np.searchsorted(heads, transfers.send) - 1
    user = np.searchsorted(heads, transfers.user, side="right") - 1
    if np.nan_to_num(gaps).any():
        # What is there is sent: the rest of the gap comes after, and counts to what follows.
        there = np.full(len(heads), np.inf)
        np.fmin.at(there, maker, np.fmin(ends[transfers.receive], starts[heads][user]))
        most = np.fmin(between, np.maximum(there - done, 0))
        work = np.nan_to_num(np.fmin(_filled(gaps, cost, np.append(follows, False)), most))
        durations, done = durations + work, done + work
        durations[1:] += np.nan_to_num(gaps - work)[:-1]
    yield _Entries(heads, cost, durations)

    if timeline.measured is not None and not in_turn:
        begins = np.flatnonzero(first & (starts[heads] > 0))
        begins = begins[~np.isin(begins, user)]
        yield _Entries(heads[begins], np.full(len(begins), ENTRY), starts[heads[begins]])

    # Posting a send is work of the entry before it, and no part of the transfer.
    posted = done[maker]
    begun = np.fmax(starts[transfers.send], posted)
    arrives = ends[transfers.receive]
    found = np.full(len(transfers), TRANSFER)
    late = np.full(len(transfers), np.nan)
    if timeline.measured is not None:
        seen = arrives > ended[user]
        arrives = np.where(seen, arrives, np.where(first, starts[heads], ended)[user])
        queued = _queued(schedule, starts, ends)
        found[~seen | queued] = WITHIN
        delayed = np.where(seen, queued | (begun > posted), first[user])
        late[delayed] = np.maximum(arrives - posted, 0)[delayed]
    yield _Entries(transfers.send, found, np.maximum(arrives - begun, 0))
    yield _Entries(transfers.send, np.full(len(transfers), DELAYED), late)

    copies = columns.where(*COPIES)
    yield _Entries(copies, _COST_OF_KIND[columns.kind[copies]], ends[copies] - starts[copies])

    turns = graph_of(schedule).collectives
    if turns:
        places = np.array([turn[0] for turn in turns])  # all places of one have the same times
        yield _Entries(places, np.full(len(turns), _REDUCE), ends[places] - starts[places])


def _in_turn(starts: Numbers, ends: Numbers, arrived: Numbers) -> bool:
    """Whether only one entry runs at a time, and none is seen to wait for what arrives: all ranks
    are of one process."""
    if not np.isnan(arrived).all():
        return False
    known = np.flatnonzero(~np.isnan(ends - starts))
    order = known[np.argsort(starts[known])]
    return bool((starts[order[1:]] >= ends[order[:-1]]).all())


def _arrivals(schedule: Schedule, ends: Numbers, heads: Ints) -> tuple[Numbers, Numbers, Bools]:
    """When what each compute entry waits for had arrived or was back, and the collectives before it
    were over, -1 where nothing was seen to, and which of them come after a collective, for whose
    other ranks they may wait."""
    columns = schedule.columns
    reduces = columns.is_kind(*GROUPS)
    arrived, over = np.full((2, len(columns)), -1, ends.dtype)
    user, made = graph_of(schedule).needs
    there = np.flatnonzero(columns.is_kind(*RECEIVES, *COPIES)[made])
    np.fmax.at(arrived, user[there], ends[made[there]])
    over[reduces] = ends[reduces]
    if ends.dtype.kind == "f":
        arrived, over = (np.where(np.isnan(times), -1, times) for times in (arrived, over))
    before = np.cumsum(reduces)
    waits = np.zeros(len(heads), np.bool_)
    waits[1:] = before[heads[1:]] > before[heads[:-1]]
    if not len(heads):
        return arrived, over, waits
    summed = np.full(len(heads), -1, ends.dtype)
    summed[1:] = np.maximum.reduceat(over, heads)[:-1]
    summed[columns.rank[heads] != np.append(-1, columns.rank[heads[:-1]])] = -1
    return np.maximum.reduceat(arrived, heads), summed, waits


def _queued(schedule: Schedule, starts: Numbers, ends: Numbers) -> Bools:
    """The transfers before whose start the one ahead of them on their channel had not arrived."""
    transfers = graph_of(schedule).transfers
    order, follows = transfers.by_channel
    queued = np.zeros(len(transfers), np.bool_)
    before = ends[transfers.receive[order[:-1]]] > starts[transfers.send[order[1:]]]
    queued[order[1:]] = follows[1:] & before
    return queued


def _filled(gaps: Numbers, cost: Ints, followed: Bools) -> Numbers:
    """The gaps, and for those that are not known the usual one after such an entry."""
    filled = np.where(np.isnan(gaps), 0, gaps)
    known = ~np.isnan(gaps)
    for one in np.unique(cost[followed]):
        own = cost == one
        if (own & known).any():
            filled[own & ~known & followed] = np.median(gaps[own & known])
    return filled


def agreed(timelines: Sequence[Any]) -> tuple[int, Any]:
    """The number of stages, and the unit of time, that all timelines have.

    Raises SchedirError where there are none, or they differ.
    """
    if not timelines:
        raise SchedirError(
            "there is no timeline to fit costs to: run steps with Executor(…, trace=True) and "
            "take executor.timelines() on rank 0"
        )
    first = timelines[0]
    for line in timelines:
        if line.schedule.stages != first.schedule.stages:
            raise SchedirError(
                f"{line.schedule.name} has {line.schedule.stages} stages, {first.schedule.name} "
                f"{first.schedule.stages}: costs are of one cut of a model; fit each on its own"
            )
        if line.unit != first.unit:
            raise SchedirError(
                f"the times of {line.schedule.name} are in {line.unit or 'any unit'}, those of "
                f"{first.schedule.name} in {first.unit or 'any unit'}: fit each on its own"
            )
    return first.schedule.stages, first.unit
