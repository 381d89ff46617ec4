"""What was observed, entry by entry: costs are fitted on it, and forecasts drawn from it.

    row        0          1          2          3           4
    cost       forward    forward    transfer   backward    forward      as indices into COSTS
    stage      0          1          0          1           0            of a transfer: its boundary
    step       0          0          0          0           1            counted over all runs
    rank       0          1          0          1           0            of a transfer: its source
    peer      -1         -1          1         -1          -1            its target
    turn       0          0          0          0           0            the how-manieth of its kind
    duration   3.1        2.9        0.1        6.2         3.3

Rows of one step stay recognisable as such, since what slows down a step slows down most of it.

What a rank does between two entries (posting a send, coming back from one action to begin the next)
is time that the next run spends as well, so it counts to the entry that it follows:

    rank 0   |0F0------|·|0F1------|··         |0B0---
             |<- 0F0 ->| |<- 0F1 ->|           it waits for 1SEND_GRAD0: how much of the gap was
                                               work can't be seen, so it has the usual one

How long a transfer took is seen only where its receiver waited for it. Otherwise it had arrived
when the receiver was free, and that is the most that it can have taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.graph.compile import graph_of
from schedir.ir import (
    COMPUTE,
    COPIES,
    COUNTERPARTS,
    GROUPS,
    HOMES,
    KINDS,
    RECEIVES,
    SENDS,
    Bools,
    Ints,
    Schedule,
)
from schedir.simulator.values import Numbers, numbers

COSTS = (
    *(kind.name.lower() for kind in KINDS if kind in COMPUTE),
    *(kind.name.lower() for kind in KINDS if kind in GROUPS),
    "overlapped",
    "transfer",
    "transfer_within",
    "transfer_delayed",
    "entry",
    *(kind.name.lower() for kind in KINDS if kind in COPIES),
)
"""What is observed: a compute action, a collective, an overlapped pair by the stage of its FORWARD,
a transfer by the boundary that it crosses, a copy.

Of a `transfer_within` the most that it can have taken is known: it had arrived before its receiver
was free to look. A `transfer_delayed` is one that began late, as its receiver was not there yet or
another one was ahead of it, from the compute before it to its arrival. `entry` is when a rank that
waits for nobody began the step, after the first one did."""
TRANSFER = COSTS.index("transfer")
WITHIN, DELAYED, ENTRY = range(TRANSFER + 1, TRANSFER + 4)
_MOST = 10**6  # of stages, of ranks, and of entries of one kind and stage in a step
_EQUAL = attrs.cmp_using(eq=np.array_equal, class_name="Column")
_COLUMN: dict[str, Any] = {"eq": _EQUAL, "hash": False, "repr": False}


def _integers(values: Any) -> Ints:
    column = np.asarray(values, np.int64)
    column.flags.writeable = False
    return column


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(slots=False)
class Samples:
    """Measured durations in columns, all of shape [rows], and the numbers of the `steps`.

    `cost` is an index into COSTS. `step` is an index into `steps`, which holds the runs' numbers of
    their steps. `turn` counts, within a step, the entries of one cost and stage, or the transfers
    of one link, including those of unknown duration. `duration` is in the unit of the timelines;
    for a `transfer_within` it is a limit.

    Raises ValueError if the columns do not fit each other, or a duration is not a number >= 0.
    """

    steps: tuple[int, ...] = attrs.field(repr=False)
    cost: Ints = attrs.field(converter=_integers, **_COLUMN)
    stage: Ints = attrs.field(converter=_integers, **_COLUMN)
    step: Ints = attrs.field(converter=_integers, **_COLUMN)
    rank: Ints = attrs.field(converter=_integers, **_COLUMN)
    peer: Ints = attrs.field(converter=_integers, **_COLUMN)
    turn: Ints = attrs.field(converter=_integers, **_COLUMN)
    duration: Numbers = attrs.field(converter=numbers, **_COLUMN)

    def __attrs_post_init__(self) -> None:
        rows = len(self.duration)
        for name, column in self._columns().items():
            if column.shape != (rows,):
                raise ValueError(f"samples: {name} must have {rows} rows, not {column.shape}")
        limits = dict.fromkeys(("stage", "rank", "turn"), _MOST)
        limits |= {"cost": len(COSTS), "step": len(self.steps)}
        for name, limit in limits.items():
            column = getattr(self, name)
            wrong = (column < 0) | (column >= limit)
            self._refuse(name, wrong, f"must be from 0 to {limit - 1}")
        wrong = ~(np.isfinite(self.duration) & (self.duration >= 0))
        self._refuse("duration", wrong, "must be finite and >= 0")

    def _refuse(self, name: str, wrong: Bools, must: str) -> None:
        if wrong.any():
            row = int(wrong.argmax())
            value = getattr(self, name)[row]
            raise ValueError(f"samples: {name} of row {row} {must}, not {value}")

    def __len__(self) -> int:
        return len(self.duration)

    def _columns(self) -> dict[str, Any]:
        return {
            field.name: getattr(self, field.name)
            for field in attrs.fields(type(self))
            if field.name != "steps"
        }

    @cached_property
    def groups(self) -> Mapping[tuple[str, int], Ints]:
        """The rows of each (cost, stage) that was observed, in the order of the steps."""
        found = _grouped(np.arange(len(self)), self.cost, self.stage)
        return {(COSTS[cost], stage): rows for (cost, stage), rows in found.items()}

    @cached_property
    def ratios(self) -> Numbers:
        """Each duration over the median of its kind and stage; 1 where that is 0."""
        found = np.ones(len(self))
        for rows in self.groups.values():
            usual = np.median(self.duration[rows])
            if usual > 0:
                found[rows] = self.duration[rows] / usual
        return found

    @cached_property
    def links(self) -> Mapping[tuple[int, int], Ints]:
        """The rows of the transfers from one rank to another, the delayed ones last."""
        rows = np.flatnonzero(np.isin(self.cost, (TRANSFER, WITHIN, DELAYED)))
        rows = rows[np.argsort(self.cost[rows] == DELAYED, kind="stable")]
        return _grouped(rows, self.rank[rows], self.peer[rows])

    def plain(self) -> dict[str, Any]:
        """The samples as JSON can hold them, exactly; `of_plain` is the inverse."""
        columns = {name: column.tolist() for name, column in self._columns().items()}
        return {"costs": list(COSTS), "steps": list(self.steps), **columns}


def of_plain(content: object) -> Samples:
    """The samples that JSON holds. Raises ValueError or TypeError, naming what is wrong."""
    names = [field.name for field in attrs.fields(Samples)]
    if not isinstance(content, dict) or set(content) != {"costs", *names}:
        raise ValueError(f"samples must have exactly the keys costs, {', '.join(names)}")
    costs, steps = content["costs"], content["steps"]
    if not isinstance(costs, list) or not set(costs) <= set(COSTS):
        raise ValueError(f"samples: costs must be some of {', '.join(COSTS)}, not {costs!r}")
    held = {name: content[name] for name in names}
    for name, column in held.items():
        kinds = (int, float) if name == "duration" else (int,)
        if not isinstance(column, list) or not all(type(value) in kinds for value in column):
            raise ValueError(f"samples: {name} must be a list of numbers")
    # Tables grow: a file knows the costs of its own time.
    renumber = {number: COSTS.index(name) for number, name in enumerate(costs)}
    held["cost"] = [renumber.get(number, -1) for number in held["cost"]]
    return Samples(**held | {"steps": tuple(steps)})


def turns(*keys: Ints) -> Ints:
    """For each row, how many rows before it have the same keys."""
    order = np.lexsort(keys[::-1])  # stable
    ranked = np.stack(keys)[:, order]
    begins = np.append(True, (ranked[:, 1:] != ranked[:, :-1]).any(axis=0))[: len(order)]
    first = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(len(order)) - first
    return found


def _grouped(rows: Ints, one: Ints, other: Ints) -> dict[tuple[int, int], Ints]:
    """The rows by two keys, which have one value for each of them, in the order given."""
    order = np.lexsort((other, one))
    keys = np.stack((one, other))[:, order]
    first = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
    parts = np.split(rows[order], first) if len(rows) else []
    heads = keys[:, np.append(0, first)].T.tolist() if len(rows) else []
    return {(a, b): part for (a, b), part in zip(heads, parts, strict=True)}


def median(values: Numbers) -> float:
    """The median; an integer where all values are and it is one of them or their mean is whole."""
    middle = float(np.median(values))
    whole = values.dtype.kind == "i" and middle == math.floor(middle)
    return int(middle) if whole else middle


# What timelines show.

COST_OF_KIND = np.array(
    [COSTS.index(k.name.lower()) if k in COMPUTE | COPIES | GROUPS else -1 for k in KINDS]
)
_PAIR = COSTS.index("overlapped")


@attrs.frozen
class _Entries:
    """Places of entries, what kind of cost each is, and how long it took, NaN where not known."""

    places: Ints
    cost: Ints
    durations: Numbers


def durations_of(timeline: Any) -> dict[tuple[int, int], float]:
    """How long each entry of a timeline took, if known: the `durations` for `simulate`, by (rank,
    index), that replay it.

    A transfer has the duration of its send. If nobody waited for it, it arrived at once; a transfer
    that had to queue has none.
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

    The first step of each measured run is left out if the run has other steps: it finds the shapes
    of tensors, and allocates what later steps use again.
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
    # The boundary below a stage, which its gradient is sent over, has the number before.
    below = columns.is_kind(*(send for send in SENDS if COUNTERPARTS[send][1] < 0))[places]
    forward = np.where(columns.is_kind(*HOMES)[places], places, columns.last[places])
    stage = columns.stage[np.where(entries.cost == _PAIR, forward, places)]
    peer = np.where(transfer, graph_of(schedule).peers[places], -1)
    rank = columns.rank[places]
    number = np.where(transfer, turns(rank, peer), turns(entries.cost, stage))
    found = (
        entries.cost,
        stage - below,
        np.full(len(places), step),
        rank,
        peer,
        number,
        entries.durations,
    )
    return tuple(column[known] for column in found)


def _warm(timelines: Sequence[Any]) -> Iterator[Any]:
    """The timelines without the first step of each measured run of several."""
    steps = [None if line.measured is None else line.measured.step for line in timelines]
    begins = [
        before is None or step != before + 1
        for before, step in zip([None, *steps], steps, strict=False)
    ]
    for line, first, alone in zip(timelines, begins, [*begins[1:], True], strict=True):
        if line.measured is None or alone or not first:
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
    cost = np.where(columns.shared[heads], _PAIR, COST_OF_KIND[columns.kind[heads]])
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
    yield _Entries(copies, COST_OF_KIND[columns.kind[copies]], ends[copies] - starts[copies])

    turns = graph_of(schedule).collectives
    if turns:
        places = np.array([turn[0] for turn in turns])  # all places of one have the same times
        cost = COST_OF_KIND[columns.kind[places]]
        yield _Entries(places, cost, ends[places] - starts[places])


def _in_turn(starts: Numbers, ends: Numbers, arrived: Numbers) -> bool:
    """True if only one entry runs at a time, and none is seen to wait: all ranks are in one
    process."""
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
    behind, ahead = transfers.in_turn
    queued = np.zeros(len(transfers), np.bool_)
    queued[behind] = ends[transfers.receive[ahead]] > starts[transfers.send[behind]]
    return queued


def _filled(gaps: Numbers, cost: Ints, followed: Bools) -> Numbers:
    """The gaps, with the usual gap after such an entry in place of unknown ones."""
    filled = np.where(np.isnan(gaps), 0, gaps)
    known = ~np.isnan(gaps)
    for one in np.unique(cost[followed]):
        own = cost == one
        if (own & known).any():
            filled[own & ~known & followed] = np.median(gaps[own & known])
    return filled


def agreed(timelines: Sequence[Any]) -> tuple[int, Any]:
    """The number of stages, and the unit of time, that all timelines have.

    Raises SchedirError if there are no timelines, or if they differ.
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
                f"{first.schedule.stages}: costs belong to one cut of a model; fit them separately"
            )
        if line.unit != first.unit:
            raise SchedirError(
                f"the times of {line.schedule.name} are in {line.unit or 'any unit'}, those of "
                f"{first.schedule.name} in {first.unit or 'any unit'}: fit them separately"
            )
    return first.schedule.stages, first.unit
