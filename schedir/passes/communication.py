"""Compute-only → complete: insert the sends and receives between stages on different ranks.

All ranks list their communication in one global order, that of a run at the textbook costs:

    time     0    1    2    3    4    5    6    7         F = 1, B = 2
    rank 0   0F0  0F1            |    0B0       0B1
                 ↘    ↘          ↗              ↗         a transfer stands where its payload
    rank 1        1F0  1B0       1F1  1B1                 is made, and before whatever the
                                                          receiver completes later
Every list is then a projection of one order of all compute and all transfers. A wait always
leads from a later entry of that order to an earlier one, so no cycle can exist, whatever part of
the lists' order a transport enforces: the result is clean under every channel model.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import attrs

from schedir.errors import ScheduleError
from schedir.ir.actions import COMMUNICATION, Action, Kind
from schedir.ir.dataflow import Dataflow, Position, received_by, trace
from schedir.ir.schedule import Schedule, Source

_COST = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: 1,
    Kind.REDUCE_GRAD: 0,
    Kind.OPTIM_STEP: 0,
}


class _Moment(NamedTuple):
    """When a compute action completes; `wave` orders the free ones among equal times."""

    time: int
    wave: int


class _Entry(NamedTuple):
    """A line of the global order. Sorting compares the fields before `action`, which are unique."""

    moment: _Moment
    is_transfer: bool
    order: tuple[int, int, int]
    action: Action
    source: Source | None


def insert_communication(schedule: Schedule) -> Schedule:
    """The schedule with its communication; unchanged where it is complete already.

    Raises ScheduleError where some compute action never gets its input; `schedir.check` on the
    same schedule says why.
    """
    if schedule.is_complete:
        return schedule
    dataflow = trace(schedule)
    entries: list[list[_Entry]] = [[] for _ in schedule.actions]
    moments = _run(schedule, dataflow)
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            source = schedule.source_of(rank, index)
            moment = moments[rank][index]
            entries[rank].append(_Entry(moment, False, (index, 0, 0), action, source))
            send = dataflow.makes(action, rank)
            if send is None:
                continue
            receive = received_by(send)
            peer = dataflow.peer(send)
            assert peer is not None and send.microbatch is not None  # `makes` found both
            order = (send.microbatch, send.stage, receive.stage)
            entries[rank].append(_Entry(moment, True, order, send, source))
            entries[peer].append(_Entry(moment, True, order, receive, source))
    for rank_entries in entries:
        rank_entries.sort(key=_order)
    return attrs.evolve(
        schedule,
        actions=tuple(tuple(e.action for e in rank_entries) for rank_entries in entries),
        sources=tuple(tuple(e.source for e in rank_entries) for rank_entries in entries)
        if schedule.sources
        else (),
    )


def strip_communication(schedule: Schedule) -> Schedule:
    """The schedule without its sends and receives."""
    keep = [
        [index for index, action in enumerate(actions) if action.kind not in COMMUNICATION]
        for actions in schedule.actions
    ]
    return attrs.evolve(
        schedule,
        actions=[
            [actions[i] for i in kept] for actions, kept in zip(schedule.actions, keep, strict=True)
        ],
        sources=tuple(
            tuple(sources[i] for i in kept)
            for sources, kept in zip(schedule.sources, keep, strict=True)
        )
        if schedule.sources
        else (),
    )


def _order(entry: _Entry) -> tuple[_Moment, bool, tuple[int, int, int]]:
    return entry[:3]


def _run(schedule: Schedule, dataflow: Dataflow) -> list[list[_Moment]]:
    """When every action completes, each rank in list order, each input where it is made."""
    moments: list[list[_Moment]] = [[] for _ in schedule.actions]
    made: dict[Action, _Moment] = {}  # keyed by the receive
    waiting: dict[Action, int] = {}
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        done = moments[rank]
        actions = schedule.actions[rank]
        while len(done) < len(actions):
            action = actions[len(done)]
            start = done[-1] if done else _Moment(0, 0)
            need = dataflow.needs(action, rank)
            if need is not None:
                if need not in made:
                    waiting[need] = rank
                    break
                start = max(start, made[need])
            cost = _COST[action.kind]
            end = _Moment(start.time + cost, 0 if cost else start.wave + 1)
            done.append(end)
            send = dataflow.makes(action, rank)
            if send is not None:
                receive = received_by(send)
                made[receive] = end
                if receive in waiting:
                    ready.append(waiting.pop(receive))
    for rank, (done, actions) in enumerate(zip(moments, schedule.actions, strict=True)):
        if len(done) < len(actions):
            place = Position(rank, len(done))
            raise ScheduleError(
                f"communication can't be inserted: rank {place.rank} #{place.index} "
                f"{actions[place.index]} never gets its input",
                (),
            )
    return moments
