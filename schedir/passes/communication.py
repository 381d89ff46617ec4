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
from typing import TypeAlias

import attrs

from schedir.errors import ScheduleError
from schedir.ir.actions import COMMUNICATION, Action, Kind
from schedir.ir.dataflow import Dataflow, received_by, trace
from schedir.ir.schedule import Schedule, Source

_COST = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: 1,
    Kind.REDUCE_GRAD: 0,
    Kind.OPTIM_STEP: 0,
}


_Moment: TypeAlias = tuple[int, int]
"""When a compute action completes: the time, and a count that orders the free ones at that time."""

_Entry: TypeAlias = tuple[_Moment, bool, tuple[int, int, int], Action, Source | None]
"""A line of the global order: when, whether it is a transfer, a tie-break that is unique among
equals (so that sorting looks no further), what, and the line of Python behind it."""


def insert_communication(schedule: Schedule) -> Schedule:
    """The schedule with its communication; unchanged where it is complete already.

    Raises ScheduleError where some compute action never gets its input; `schedir.check` on the
    same schedule says why.
    """
    if schedule.is_complete:
        return schedule
    entries = _run(schedule, trace(schedule))
    for rank_entries in entries:
        rank_entries.sort()
    return attrs.evolve(
        schedule,
        actions=[[entry[3] for entry in rank_entries] for rank_entries in entries],
        sources=tuple(tuple(entry[4] for entry in rank_entries) for rank_entries in entries)
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


def _run(schedule: Schedule, dataflow: Dataflow) -> list[list[_Entry]]:
    """Run the compute, each rank in list order: what completes when, and what is sent then."""
    entries: list[list[_Entry]] = [[] for _ in schedule.actions]
    reached = [0] * schedule.ranks
    completed: list[_Moment] = [(0, 0)] * schedule.ranks
    made: dict[Action, _Moment] = {}  # keyed by the receive
    waiting: dict[Action, int] = {}
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        actions = schedule.actions[rank]
        for index in range(reached[rank], len(actions)):
            action = actions[index]
            time, wave = completed[rank]
            need = dataflow.needs(action, rank)
            if need is not None:
                if need not in made:
                    waiting[need] = rank
                    break
                time, wave = max((time, wave), made[need])
            cost = _COST[action.kind]
            end = completed[rank] = (time + cost, 0 if cost else wave + 1)
            source = schedule.source_of(rank, index)
            entries[rank].append((end, False, (index, 0, 0), action, source))
            reached[rank] = index + 1
            send = dataflow.makes(action, rank)
            peer = None if send is None else dataflow.peer(send)
            if send is None or send.microbatch is None or peer is None:
                continue
            receive = received_by(send)
            order = (send.microbatch, send.stage, receive.stage)
            entries[rank].append((end, True, order, send, source))
            entries[peer].append((end, True, order, receive, source))
            made[receive] = end
            if receive in waiting:
                ready.append(waiting.pop(receive))
    for rank, (index, actions) in enumerate(zip(reached, schedule.actions, strict=True)):
        if index < len(actions):
            raise ScheduleError(
                f"communication can't be inserted: rank {rank} #{index} {actions[index]} never "
                "gets its input",
                (),
            )
    return entries
