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

That order keeps the REDUCE_GRADs of a stage together too: each waits for its turn on all replicas.
"""

from __future__ import annotations

from typing import TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from schedir.errors import UnsoundError
from schedir.ir.clock import TEXTBOOK, Time, posted_after, run
from schedir.ir.collectives import collective_turns
from schedir.ir.columns import KIND_INDEX, Bools, Columns, Ints, summed_at_last
from schedir.ir.dataflow import Transfers
from schedir.ir.kinds import COMMUNICATION, COUNTERPARTS, Kind
from schedir.ir.schedule import Schedule, Sources, expect_schedule, starts_of

T = TypeVar("T", np.int64, np.bool_)


def insert_communication(schedule: Schedule) -> Schedule:
    """The schedule with its communication; unchanged where it is complete already.

    Raises UnsoundError where some compute action never gets its input; `schedir.check` on the
    same schedule says why. Raises TypeError for what is no Schedule.
    """
    expect_schedule(schedule)
    if schedule.is_complete:
        return schedule
    transfers = schedule.dataflow.transfers
    if (transfers.maker < 0).any():
        raise UnsoundError("communication can't be inserted: some action is missing")
    ends = _ends(schedule, transfers)
    return _merge(schedule, transfers, ends)


def strip_communication(schedule: Schedule) -> Schedule:
    """The schedule without its sends and receives."""
    columns = schedule.columns
    kept = np.flatnonzero(~columns.is_kind(*COMMUNICATION))
    return schedule.take(kept, starts_of(columns.rank[kept], schedule.ranks))


def _ends(schedule: Schedule, transfers: Transfers) -> Ints:
    """When each action is done, each rank in list order, at the textbook costs."""
    columns = schedule.columns
    needs = schedule.dataflow.arrivals.copy()
    posts, crossing = columns.last[transfers.maker], np.arange(len(transfers))
    ends = _run(columns, needs, posts, crossing)
    turns = [places for places in collective_turns(schedule) if len(places) > 1]
    if turns:
        # The replicas of a stage reach each of its REDUCE_GRADs together, if that is possible.
        for number, places in enumerate(turns, len(transfers)):
            needs[list(places)] = number
            posts = np.append(posts, [columns.before(place) for place in places])
            crossing = np.append(crossing, [number] * len(places))
        together = _run(columns, needs, posts, crossing)
        ends = ends if -1 in together else together
    if -1 in ends:
        place = ends.index(-1)
        rank, index = columns.position(place)
        raise UnsoundError(
            f"communication can't be inserted: rank {rank} #{index} {columns.action(place)} never "
            "gets its input"
        )
    return np.array(ends, np.int64)[columns.last]


def _run(columns: Columns, needs: Ints, posts: Ints, exchanges: Ints) -> list[Time]:
    """When each action ends; of an overlapped pair, only the last part's is right. Each of the
    `exchanges` has an end that is posted after one of `posts`."""
    alone = np.arange(exchanges.max(initial=-1) + 1)  # nothing holds the next one up
    posted = posted_after(posts, exchanges, len(columns), alone)
    costs = summed_at_last(columns, TEXTBOOK[columns.kind]).tolist()
    return run(columns.starts.tolist(), costs, needs.tolist(), posted).ends


def _merge(schedule: Schedule, transfers: Transfers, ends: Ints) -> Schedule:
    """The compute of every rank with its ends of the transfers, in the global order."""
    columns, sources = schedule.columns, schedule.sources
    made = ends[transfers.maker]
    sender = columns.stage[transfers.maker]
    # One order of all transfers: by time, then microbatch, sending stage and receiving stage.
    order = np.lexsort((transfers.stage, sender, transfers.microbatch, made))
    is_act = (sender < transfers.stage)[order]

    def ends_of(sends: NDArray[T], receives: NDArray[T]) -> NDArray[T]:
        """Both ends of every transfer, in that order."""
        both: NDArray[T] = np.stack((sends, receives), axis=1).ravel()
        return both

    # At one time: what takes time and ends there, then transfers, then what takes none.
    free = TEXTBOOK[columns.kind] == 0
    moment = np.concatenate((3 * ends + 2 * free, np.repeat(3 * made[order] + 1, 2)))
    rank = np.concatenate((columns.rank, ends_of(transfers.source[order], transfers.target[order])))
    merged = np.argsort(rank * (moment.max() + 1) + moment, kind="stable")

    def entries(compute: NDArray[T], sends: NDArray[T], receives: NDArray[T]) -> NDArray[T]:
        both: NDArray[T] = np.concatenate((compute, ends_of(sends, receives)))[merged]
        return both

    sends = Kind.SEND_ACT, Kind.SEND_GRAD
    receives = (COUNTERPARTS[kind][0] for kind in sends)
    microbatch = transfers.microbatch[order]
    none, alone = np.full(len(order), -1), np.zeros(len(order), np.bool_)
    complete = Columns(
        starts_of(rank[merged], schedule.ranks),
        entries(
            columns.kind,
            _either(is_act, *sends),
            _either(is_act, *receives),
        ),
        entries(columns.stage, sender[order], transfers.stage[order]),
        entries(columns.microbatch, microbatch, microbatch),
        entries(columns.version, none, none),
        entries(columns.joined, alone, alone),
    )
    if sources is not None:
        line = sources.line_of[transfers.maker[order]]
        sources = Sources(sources.lines, entries(sources.line_of, line, line))
    return attrs.evolve(schedule, actions=complete, sources=sources)


def _either(condition: Bools, one: Kind, other: Kind) -> Ints:
    return np.where(condition, KIND_INDEX[one], KIND_INDEX[other])
