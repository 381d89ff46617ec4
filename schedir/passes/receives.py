"""Post receives earlier, as far as a transport and the receive buffers allow.

A receive that is posted late holds up the transfer, and over gloo it may cost a whole timer tick of
4 ms. Each posted receive occupies a buffer until the last compute that uses it. So receives move
ahead only while the rank needs no more buffers than its list needs at its peak, or than `room`
allows:

    listed    RECV0 F0 RECV1 F1 RECV2 F2 B0 B1 B2        3 buffers at the peak
    ahead     RECV0 RECV1 RECV2 F0 F1 F2 B0 B1 B2        3 buffers at the peak

The channel model limits how far a receive moves. Under `rank` all communication stays in order, so
a receive moves over compute only; under `async` it moves over anything. A batch stays in its place,
and no receive moves over a batch that also receives. Moving ahead removes waits and adds none, so a
clean list stays clean under the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from schedir.graph.compile import graph_of
from schedir.graph.paths import compute_before, queues
from schedir.ir import (
    RECEIVES,
    Bools,
    Ints,
    Schedule,
    Ties,
    channel_model,
    expect_schedule,
    is_number,
    ties_of,
)
from schedir.ir.schedule import shared_steps
from schedir.passes.communication import insert_communication

SPARE_BYTES = 2**20
"""Of receive buffers where the list needs fewer: nothing beside a model, and small transfers, which
would wait for a timer tick rather than for data, are all posted ahead."""


def advance_receives(
    schedule: Schedule,
    channel: str = "rank",
    room: int | None = None,
    *,
    ties: Iterable[Iterable[int]] = (),
) -> Schedule:
    """Move each receive as far ahead as the channel model and the receive buffers allow.

    The receives of a rank keep their order, and so do all other entries. `room` is the number of
    receive buffers that a rank may hold at once, if its list needs fewer at its peak; None allows
    only as many as the list needs. `ties` are the groups of stages that share parameters, because
    ranks communicate to add up the gradients of tied stages. A compute-only schedule gets its
    communication first.

    Raises ValueError for an unknown channel model, a negative `room` or a bad tie, TypeError for
    anything that is not a Schedule, and everything that `insert_communication` raises.

    >>> import schedir
    >>> schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    >>> print(*schedule.actions[1])
    1RECV_ACT0 1F0 1RECV_ACT1 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP
    >>> print(*schedir.advance_receives(schedule).actions[1])
    1RECV_ACT0 1RECV_ACT1 1F0 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP
    """
    expect_schedule(schedule)
    channel = channel_model(channel)
    if room is not None and not is_number(room):
        raise ValueError(f"room must be a number of buffers of at least 0, or None, not {room!r}")
    complete = insert_communication(schedule)
    order = _in_order(complete, channel, room, ties_of(complete, ties))
    return complete.take(order, complete.columns.starts)


def posted_after(schedule: Schedule, channel: str, room: int) -> Ints:
    """For every place of a complete schedule, the compute after which it is posted, -1 for none, if
    receives are moved ahead as `advance_receives` does it. Shape [actions]; stored with the
    schedule."""

    def found() -> Ints:
        order = _in_order(schedule, channel, room, ())
        before = compute_before(schedule.columns.take(order, schedule.columns.starts))
        after = np.empty_like(before)
        after[order] = np.where(before < 0, -1, order[before])
        return after

    return schedule.once(("posted after", channel, room), found)


def _in_order(complete: Schedule, channel: str, room: int | None, ties: Ties) -> Ints:
    """The places of a complete schedule, in the order in which they are posted."""
    columns = complete.columns
    graph, receives = graph_of(complete), columns.is_kind(*RECEIVES)
    moves = receives & ~columns.shared
    queue = queues(graph, channel)
    if channel == "rank":
        steps = shared_steps(complete, ties)
        queue[steps] = columns.rank[steps]
    held_by = _held_by(queue, moves)
    if columns.together:
        # Receives keep their order, those in batches too.
        held_by = np.maximum(held_by, _held_by(np.where(receives, columns.rank, -1), moves))
    many = np.bincount(columns.rank[receives])
    if room is not None and room >= many.max(initial=0):
        # There is a buffer for each: it goes right behind the entry that it must stay after.
        last = np.where(held_by < 0, columns.starts[columns.rank] - 1, columns.last[held_by])
        behind = np.maximum.accumulate(np.where(moves, last, -1))
        return np.argsort(2 * np.where(moves, behind, np.arange(len(moves))) + moves, kind="stable")
    # An activation is used until its backward, a gradient until its W.
    transfers = graph.transfers
    weight = graph.weight_gradients[transfers.stage, transfers.microbatch]
    last_use = np.maximum(np.maximum(weight, transfers.user), transfers.receive)[transfers.matched]
    freed = np.bincount(last_use, minlength=len(columns))
    gained = freed - (receives & ~moves)
    held = held_by.tolist()
    order: list[int] = []
    waiting = iter([*np.flatnonzero(moves).tolist(), len(columns)])
    pending = next(waiting)
    for start, end in pairwise(columns.starts.tolist()):
        own = slice(start, end)
        taken = np.cumsum(receives[own]) - (np.cumsum(freed[own]) - freed[own])
        buffers = max(int(taken.max(initial=0)), room or 0)
        entries = zip(
            *(each[own].tolist() for each in (moves, columns.joined, gained)), strict=True
        )
        for place, (receive, goes_on, back) in enumerate(entries, start):
            # One that has come to its own place is posted in any case: that is within the peak.
            while pending == place or (
                pending < end and buffers > 0 and held[pending] < place and not goes_on
            ):
                order.append(pending)
                buffers -= 1
                pending = next(waiting)
            if not receive:
                order.append(place)
            buffers += back
    return np.array(order, np.int64)


def _held_by(queue: Ints, receives: Bools) -> Ints:
    """For every place, the last place before it in its queue that is not one of `receives`; -1 for
    none."""
    held = np.full(len(queue), -1)
    order = np.argsort(queue, kind="stable")
    order = order[queue[order] >= 0]
    own = queue[order]
    last = np.maximum.accumulate(np.where(receives[order], -1, np.arange(len(order))))
    there = last >= np.searchsorted(own, own)
    held[order[there]] = order[last[there]]
    return held
