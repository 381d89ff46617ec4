"""Any schedule → its receives listed ahead, as a transport allows and its buffers do.

A receive that is posted late holds up the transfer, and over gloo it may cost a whole timer tick of
4 ms. Each posted receive occupies a buffer until the compute that uses it last, so receives run
ahead only as far as the list itself needs buffers at its peak, or as there is room for more:

    listed    RECV0 F0 RECV1 F1 RECV2 F2 B0 B1 B2        3 buffers at the peak
    ahead     RECV0 RECV1 RECV2 F0 F1 F2 B0 B1 B2        3 buffers at the peak

What holds a receive back is the order that the channel model keeps: under `rank` all communication
stays in order, so that a receive moves over compute alone; under `async` over anything. A batch is
left as a whole where it is, and a receive is not moved over one that receives too. To move ahead
takes waits away and adds none, so that what is clean under the model stays clean.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from schedir.graph.compile import graph_of
from schedir.graph.paths import queues
from schedir.ir import (
    RECEIVES,
    Bools,
    Ints,
    Schedule,
    channel_model,
    expect_schedule,
    is_number,
    ties_of,
)
from schedir.ir.ties import shared_steps
from schedir.passes.communication import insert_communication


def advance_receives(
    schedule: Schedule,
    channel: str = "rank",
    room: int | None = None,
    *,
    ties: Iterable[Iterable[int]] = (),
) -> Schedule:
    """The schedule with each receive as far ahead as the channel model and its buffers allow.

    The receives of a rank keep their order, and so does all else. `room` is the number of receive
    buffers that a rank may hold at once, where its list does not need more at its peak; None for
    no more than the list needs. `ties` are the groups of stages that share parameters: where ranks
    add up the gradients of those, they communicate. A compute-only schedule gets its communication
    first.

    Raises ValueError for an unknown channel model, a negative room or what is no tie, TypeError for
    what is no Schedule, and what `insert_communication` raises.
    """
    expect_schedule(schedule)
    channel = channel_model(channel)
    if room is not None and not is_number(room):
        raise ValueError(f"room must be a number of buffers of at least 0, or None, not {room!r}")
    complete = insert_communication(schedule)
    columns = complete.columns
    receives = columns.is_kind(*RECEIVES)
    moves = receives & ~columns.shared
    queue = queues(graph_of(complete), channel)
    if channel == "rank":
        steps = shared_steps(complete, ties_of(complete, ties))
        queue[steps] = columns.rank[steps]
    held_by = _held_by(queue, moves)
    if columns.together:
        # Receives keep their order, those in batches too.
        held_by = np.maximum(held_by, _held_by(np.where(receives, columns.rank, -1), moves))
    held = held_by.tolist()
    freed = _freed(complete)
    order: list[int] = []
    for start, end in pairwise(columns.starts.tolist()):
        own = slice(start, end)
        buffers = max(_peak(receives[own], freed[own]), room or 0)
        gained = freed[own] - (receives[own] & ~moves[own])
        joined = columns.joined[own].tolist()
        order += _advanced(start, moves[own].tolist(), joined, held, gained.tolist(), buffers)
    return complete.take(np.array(order, np.int64), columns.starts)


def _advanced(
    start: int,
    moves: list[bool],
    joined: list[bool],
    held_by: list[int],
    gained: list[int],
    buffers: int,
) -> list[int]:
    """The places of a rank, which begin at `start`, in their new order.

    `moves` says which are receives that move, `joined` which belong to the entry of the one before;
    `held_by` has the place that each receive stays after, `gained` the buffers that each place of
    the rank gives back, less one that it takes where it is.
    """
    order: list[int] = []
    receives = (place for place, receive in enumerate(moves, start) if receive)
    pending = next(receives, -1)
    for place, (receive, goes_on, back) in enumerate(
        zip(moves, joined, gained, strict=True), start
    ):
        # One that has come to its own place is posted in any case: that is within the peak.
        while pending >= 0 and (
            pending == place or (buffers > 0 and held_by[pending] < place and not goes_on)
        ):
            order.append(pending)
            buffers -= 1
            pending = next(receives, -1)
        if not receive:
            order.append(place)
        buffers += back
    return order


def _held_by(queue: Ints, receives: Bools) -> Ints:
    """For every place, the last before it in its queue that is none of `receives`; -1 for none."""
    held = np.full(len(queue), -1)
    order = np.argsort(queue, kind="stable")
    order = order[queue[order] >= 0]
    if not len(order):
        return held
    own = queue[order]
    turns = np.arange(len(order))
    last = np.maximum.accumulate(np.where(receives[order], -1, turns))
    there = last >= 0
    there[there] = own[last[there]] == own[there]
    held[order[there]] = order[last[there]]
    return held


def _freed(schedule: Schedule) -> Ints:
    """For every place, the received tensors that are used there for the last time.

    An activation is used up to the backward, a gradient up to its W.
    """
    graph = graph_of(schedule)
    transfers = graph.transfers
    weight = graph.weight_gradients[transfers.stage, transfers.microbatch]
    last_use = np.maximum(np.maximum(weight, transfers.user), transfers.receive)[transfers.matched]
    return np.bincount(last_use, minlength=len(schedule.columns))


def _peak(receives: Bools, freed: Ints) -> int:
    """The most buffers that a rank's list holds at once."""
    held = np.cumsum(receives) - (np.cumsum(freed) - freed)
    return int(held.max(initial=0))
