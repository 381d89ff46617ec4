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
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from schedir.graph.compile import graph_of
from schedir.ir import (
    CARRIES_GRADIENTS,
    COMPUTE,
    COPIES,
    GROUPS,
    HOMES,
    KINDS,
    RECEIVES,
    SENDS,
    Columns,
    Ints,
    Schedule,
)
from schedir.simulator.values import Numbers, numbers

COSTS = (
    *(kind.cost_name for kind in KINDS if kind in COMPUTE),
    *(kind.cost_name for kind in KINDS if kind in GROUPS),
    "overlapped",
    "transfer",
    "transfer_within",
    "transfer_delayed",
    "entry",
    *(kind.cost_name for kind in KINDS if kind in COPIES),
)
"""What is observed: a compute action, a collective, an overlapped pair by the stage of its FORWARD,
a transfer by the boundary that it crosses, a copy.

Of a `transfer_within` the most that it can have taken is known: it had arrived before its receiver
was free to look. A `transfer_delayed` is one that began late, as its receiver was not there yet or
another one was ahead of it, from the compute before it to its arrival. `entry` is when a rank that
waits for nobody began the step, after the first one did."""
TRANSFER = COSTS.index("transfer")
WITHIN, DELAYED, ENTRY = range(TRANSFER + 1, TRANSFER + 4)
_TRANSFERS = (TRANSFER, WITHIN, DELAYED)
_MOST = 10**6  # of stages, of ranks, and of entries of one kind and stage in a step


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(eq=False, repr=False, slots=False)
class Samples:
    """Measured durations in columns, all of shape [rows], and the numbers of the `steps`.

    `cost` is an index into COSTS. `step` is an index into `steps`, which holds the runs' numbers of
    their steps. `turn` counts, within a step, the entries of one cost and stage, or the transfers
    of one link, including those of unknown duration. `duration` is in the unit of the timelines;
    for a `transfer_within` it is a limit.
    """

    steps: tuple[int, ...]
    cost: Ints
    stage: Ints
    step: Ints
    rank: Ints
    peer: Ints
    turn: Ints
    duration: Numbers

    def __len__(self) -> int:
        return len(self.duration)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Samples) and self.plain() == other.plain()

    @cached_property
    def groups(self) -> Mapping[tuple[str, int], Ints]:
        """The rows of each (cost, stage) that was observed, in the order of the steps."""
        found = grouped(np.arange(len(self)), self.cost, self.stage)
        return {(COSTS[cost], stage): rows for (cost, stage), rows in found.items()}

    @cached_property
    def medians(self) -> Mapping[tuple[str, int], float]:
        """The median duration of each of the `groups`."""
        return {key: float(np.median(self.duration[rows])) for key, rows in self.groups.items()}

    @cached_property
    def ratios(self) -> Numbers:
        """Each duration over the median of its kind and stage; 1 where that is 0."""
        found = np.ones(len(self))
        for key, rows in self.groups.items():
            if (usual := self.medians[key]) > 0:
                found[rows] = self.duration[rows] / usual
        return found

    @cached_property
    def links(self) -> Mapping[tuple[int, int], Ints]:
        """The rows of the transfers from one rank to another, the delayed ones last."""
        rows = np.flatnonzero(np.isin(self.cost, _TRANSFERS))
        rows = rows[np.argsort(self.cost[rows] == DELAYED, kind="stable")]
        return grouped(rows, self.rank[rows], self.peer[rows])

    def plain(self) -> dict[str, Any]:
        """The samples as JSON can hold them, exactly; `of_plain` is the inverse."""
        columns = {name: getattr(self, name).tolist() for name in _COLUMNS}
        return {"costs": list(COSTS), "steps": list(self.steps), **columns}


_COLUMNS = tuple(field.name for field in attrs.fields(Samples) if field.name != "steps")


def of_plain(content: object) -> Samples:
    """The samples that JSON holds. Raises ValueError or TypeError, naming what is wrong."""
    keys = ("costs", "steps", *_COLUMNS)
    if not isinstance(content, dict) or set(content) != {*keys}:
        raise ValueError(f"samples must have exactly the keys {', '.join(keys)}")
    costs, *columns = (content[name] for name in keys)
    if not isinstance(costs, list) or not set(costs) <= set(COSTS):
        raise ValueError(f"samples: costs must be some of {', '.join(COSTS)}, not {costs!r}")
    for name, column in zip(keys[1:], columns, strict=True):
        kinds = (int, float) if name == "duration" else (int,)
        if not isinstance(column, list) or not all(type(value) in kinds for value in column):
            raise ValueError(f"samples: {name} must be a list of numbers")
    steps, *columns = columns
    ends = {"cost": len(costs), "step": len(steps), "duration": math.inf}
    for name, column in zip(_COLUMNS, columns, strict=True):
        if len(column) != len(columns[-1]):
            raise ValueError(
                f"samples: {name} must have {len(columns[-1])} rows, not {len(column)}"
            )
        least, end = -(name == "peer"), ends.get(name, _MOST)
        for row, value in enumerate(column):
            if not least <= value < end:
                must = "finite and >= 0" if end == math.inf else f"from {least} to {end - 1}"
                raise ValueError(f"samples: {name} of row {row} must be {must}, not {value}")
    # Tables grow: a file knows the costs of its own time.
    columns[0] = [COSTS.index(costs[number]) for number in columns[0]]
    arrays = [np.array(column, np.int64) for column in columns[:-1]] + [numbers(columns[-1])]
    return Samples(tuple(steps), *arrays)


def turns(key: Ints) -> Ints:
    """For each row, how many rows before it have the same key."""
    order = np.argsort(key, kind="stable")
    found = np.empty_like(order)
    found[order] = np.arange(len(order)) - np.searchsorted(key[order], key[order])
    return found


def grouped(rows: Ints, one: Ints, other: Ints) -> dict[tuple[int, int], Ints]:
    """The rows by two keys, which have one value for each of them, in the order given."""
    many = 1 + int(other.max(initial=0))
    key = one * many + other
    order = np.argsort(key, kind="stable")
    keys, first = np.unique(key[order], return_index=True)
    parts = np.split(rows[order], first)[1:]
    return {divmod(key, many): part for key, part in zip(keys.tolist(), parts, strict=True)}


# What timelines show.

_COST_OF_KIND = np.array(
    [COSTS.index(kind.cost_name if kind.cost_name in COSTS else "transfer") for kind in KINDS]
)
_BACK = np.array([kind in SENDS & CARRIES_GRADIENTS for kind in KINDS])
_PAIR = COSTS.index("overlapped")


def costs_and_stages(columns: Columns, heads: Ints) -> tuple[Ints, Ints]:
    """What is observed of each entry of compute, copy, collective or send: the index of its cost,
    and its stage, of a send its boundary. `heads` are the first places of the entries."""
    pair = (columns.shared & columns.is_kind(*COMPUTE))[heads]
    forward = heads + (pair & ~columns.is_kind(*HOMES)[heads])
    kind = columns.kind[heads]
    # The boundary below a stage, which its gradient is sent over, has the number before.
    return np.where(pair, _PAIR, _COST_OF_KIND[kind]), columns.stage[forward] - _BACK[kind]


def observe(timelines: Sequence[Any]) -> Samples:
    """The samples of one or several runs, each given in the order of its steps.

    The first step of each measured run is left out if the run has other steps: it finds the shapes
    of tensors, and allocates what later steps use again.
    """
    steps: list[int] = []
    rows = []
    # A step that was not measured follows none, and none follows it.
    taken = [math.nan if line.measured is None else line.measured.step for line in timelines]
    follows = [False, *(after == before + 1 for before, after in pairwise(taken)), False]
    for line, later, first in zip(timelines, follows, follows[1:], strict=False):
        if later or not first:
            rows.append(observed(line, len(steps))[1:])
            steps.append(len(steps) if line.measured is None else line.measured.step)
    return Samples(tuple(steps), *map(np.concatenate, zip(*rows, strict=True)))


def observed(timeline: Any, step: int) -> tuple[Ints, ...]:
    """What a timeline shows: compute first; then when ranks began, transfers, copies, and
    collectives. The first place of each entry whose duration is known, and the columns of
    `Samples`."""
    schedule: Schedule = timeline.schedule
    columns, graph, transfers = schedule.columns, graph_of(schedule), graph_of(schedule).transfers
    starts, ends = timeline.starts.astype(np.float64), timeline.ends.astype(np.float64)
    heads, send, receive = columns.computes, transfers.send, transfers.receive
    maker, user = (
        np.searchsorted(heads, places, side="right") - 1 for places in (send, transfers.user)
    )
    first = np.diff(columns.rank[heads], prepend=-1) > 0
    start, end = starts[heads], ends[heads]
    cost, _ = costs_and_stages(columns, heads)

    # When what an entry waits for had arrived or was back, what is before it on its rank was over,
    # and the collectives between them were: -1 for never.
    arrived, over = np.full((2, len(columns)), -1.0)
    needs, made = graph.needs
    there = columns.is_kind(*RECEIVES, *COPIES)[made]
    np.fmax.at(arrived, needs[there], ends[made[there]])
    summed = columns.is_kind(*GROUPS)
    over[summed] = np.fmax(ends[summed], -1)
    arrived, over, then_sums = (
        np.maximum.reduceat(each, heads) for each in (arrived, over, summed)
    )
    ended, over = (np.where(first, -1, np.roll(each, 1)) for each in (end, over))
    in_turn = columns.ranks > 1 and _in_turn(start, end, ends[receive])

    # A rank that has waited goes on once it notices.
    ready = np.maximum(arrived, over)
    noticed = (ready > ended) & (not in_turn)
    durations, done = end - np.where(noticed, np.minimum(ready, start), start), end
    follows = np.append(~first, False)[1:]
    between = np.where(follows, np.maximum(np.roll(start, -1) - end, 0), np.nan)
    # One process that runs all ranks has them wait for each other's turns.
    gaps = np.where(np.roll(arrived > ended, -1) | then_sums | in_turn, np.nan, between)
    # What is there is sent: the rest of the gap comes after, and counts to what follows.
    until = np.full(len(heads), np.inf)
    np.fmin.at(until, maker, np.fmin(ends[receive], start[user]))
    most = np.fmin(between, np.maximum(until - done, 0))
    work = np.where(follows, np.fmin(_filled(gaps, cost), most), 0)
    durations, done = durations + work, done + work
    durations[1:] += np.nan_to_num(gaps - work)[:-1]
    found: list[tuple[Any, ...]] = [(heads, -1, durations)]

    # Posting a send is work of the entry before it, and no part of the transfer.
    posted, arrives = done[maker], ends[receive]
    begun, kind = np.fmax(starts[send], posted), np.full(len(transfers), TRANSFER)
    if timeline.measured is not None:
        alone = first & (start > 0) & (not in_turn)
        alone[user] = False
        found.append((heads[alone], ENTRY, start[alone]))
        seen, queued = arrives > ended[user], np.zeros(len(transfers), np.bool_)
        arrives = np.where(seen, arrives, np.where(first, start, ended)[user])
        behind, ahead = transfers.in_turn  # one before whose start the one ahead had not arrived
        queued[behind] = ends[receive[ahead]] > starts[send[behind]]
        kind[~seen | queued] = WITHIN
        delayed = np.where(seen, queued | (begun > posted), first[user])
        late = np.where(delayed, np.maximum(arrives - posted, 0), np.nan)
        found.append((send, DELAYED, late))
    found.append((send, kind, np.maximum(arrives - begun, 0)))

    # All places of a collective have the same times.
    sums = np.array([turn[0] for turn in graph.collectives], np.int64)
    places = np.append(columns.where(*COPIES), sums)
    found.append((places, -1, ends[places] - starts[places]))
    each = zip(*(np.broadcast_arrays(*part) for part in found), strict=True)
    places, named, durations = map(np.concatenate, each)
    cost, stage = costs_and_stages(columns, places)
    cost = np.where(named < 0, cost, named)
    transfer, rank = np.isin(cost, _TRANSFERS), columns.rank[places]
    peer = np.where(transfer, graph.peers[places], -1)
    links = rank * columns.ranks + peer + columns.ranks**2 * (cost == DELAYED)
    turn = turns(np.where(transfer, -1 - links, cost * schedule.stages + stage))
    rows = places, cost, stage, np.full_like(cost, step), rank, peer, turn, durations
    return tuple(column[~np.isnan(durations)] for column in rows)


def _in_turn(starts: Numbers, ends: Numbers, arrived: Numbers) -> bool:
    """True if only one entry runs at a time, and none is seen to wait: all ranks are in one
    process."""
    if not np.isnan(arrived).all():
        return False
    known = np.flatnonzero(~np.isnan(ends - starts))
    order = known[np.argsort(starts[known])]
    return bool((starts[order[1:]] >= ends[order[:-1]]).all())


def _filled(gaps: Numbers, cost: Ints) -> Numbers:
    """The gaps, with the usual gap after such an entry in place of unknown ones."""
    known = ~np.isnan(gaps)
    filled = np.where(known, gaps, 0)
    for one in np.unique(cost[known]):
        own = cost == one
        filled[own & ~known] = np.median(gaps[own & known])
    return filled
