"""Insert the sends and receives between stages on different ranks: compute-only → complete.

All ranks list their communication in one global order, that of a run at the textbook costs:

    time     0    1    2    3    4    5    6    7         F = 1, B = 2
    rank 0   0F0  0F1            |    0B0       0B1
                 ↘    ↘          ↗              ↗         a transfer is listed right after the
    rank 1        1F0  1B0       1F1  1B1                 compute that makes its payload, before
                                                          anything that the receiver ends later
Every list is then a part of one order of all compute and all transfers. A wait always leads from a
later entry of that order to an earlier one, so no cycle can exist, whatever part of the order a
transport enforces: the result is clean under every channel model.

The order also keeps the REDUCE_GRADs of a stage together: each waits for its turn on all replicas.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from schedir.errors import UnsoundError
from schedir.graph.compile import Transfers, graph_of
from schedir.graph.paths import HAPPENS, TEXTBOOK, TEXTBOOK_BEGINS, finish, textbook_prices, waits
from schedir.ir import (
    COMMUNICATION,
    COUNTERPARTS,
    KIND_INDEX,
    KINDS,
    Columns,
    Ints,
    Kind,
    Schedule,
    Sources,
    expect_schedule,
    starts_of,
)


def insert_communication(schedule: Schedule) -> Schedule:
    """The schedule with its communication; unchanged if it already has any.

    Raises UnsoundError if some compute action never gets its input, or if a rank lists an action of
    a stage that it does not hold; `schedir.check` says why. Raises TypeError for anything that is
    not a Schedule.

    >>> import schedir
    >>> schedule = schedir.Schedule.of("mine", [0, 1], ["0F0 0B0", "1F0 1B0"])
    >>> for entries in schedir.insert_communication(schedule).actions:
    ...     print(*entries)
    0F0 0SEND_ACT0 0RECV_GRAD0 0B0
    1RECV_ACT0 1F0 1B0 1SEND_GRAD0
    """
    expect_schedule(schedule)
    if schedule.is_complete:
        return schedule
    transfers = graph_of(schedule).transfers
    if (transfers.maker < 0).any():
        raise UnsoundError("communication can't be inserted: some action is missing")
    return _merge(schedule, transfers, *_run(schedule))


def strip_communication(schedule: Schedule) -> Schedule:
    """The schedule without its sends and receives."""
    columns = schedule.columns
    kept = np.flatnonzero(~columns.is_kind(*COMMUNICATION))
    return schedule.take(kept, starts_of(columns.rank[kept], schedule.ranks))


def as_inserted(schedule: Schedule) -> bool:
    """True if the schedule lists communication, and exactly as `insert_communication` would; stored
    with the schedule, by `insert_communication` too."""

    def found() -> bool:
        if not schedule.columns.is_kind(*COMMUNICATION).any():
            return False
        try:
            return insert_communication(strip_communication(schedule)) == schedule
        except UnsoundError:
            return False

    return schedule.once(as_inserted, found)


def _run(schedule: Schedule) -> tuple[Ints, Ints, Ints]:
    """When each action of a compute-only schedule begins and ends at the textbook costs, and its
    number in one order of all actions; by place."""
    columns, takes = schedule.columns, textbook_prices(schedule.columns).takes
    # Else as if the collectives of a stage were each rank's own: a proof will say if they meet.
    for meet in (True, False):
        waiting = waits(schedule, "host", meet=meet)
        never, node = waiting.stuck[waiting.node], waiting.node
        if not never.any():
            begins = finish(waiting, takes)[node]
            return begins, begins + takes, waiting.turn[node]
    user, made = graph_of(schedule).needs
    place = int(user[never[user] & never[made]].min())
    rank, index = columns.position(place)
    raise UnsoundError(
        f"communication can't be inserted: rank {rank} #{index} {columns.action(place)} never gets "
        "its input"
    )


def _merge(
    schedule: Schedule, transfers: Transfers, begins: Ints, ends: Ints, turn: Ints
) -> Schedule:
    """The compute of every rank, with its ends of the transfers, in the global order, given the
    run of the compute."""
    columns, made = schedule.columns, ends[transfers.maker]
    # One order of all transfers: by time, then microbatch, sending stage and receiving stage.
    order = np.lexsort(
        (transfers.stage, columns.stage[transfers.maker], transfers.microbatch, made)
    )
    made, maker = made[order], transfers.maker[order]
    kind, stage, microbatch = (
        each[order] for each in (transfers.kind, transfers.stage, transfers.microbatch)
    )
    rank = _both(transfers.source[order], transfers.target[order])
    # At one time: what takes time and ends there, then transfers, then what takes none.
    turns, between = _both(np.arange(len(order))), _both(3 * made + 1)
    moment = np.append(3 * ends + 2 * (TEXTBOOK[columns.kind] == 0), between)
    longest = moment.max(initial=0) + 1
    placed = np.argsort(np.append(columns.rank, rank) * longest + moment, kind="stable")
    complete = _listed(
        schedule,
        placed,
        _both(_SENT[kind], kind),
        _both(columns.stage[maker], stage),
        rank,
        _both(microbatch),
        _both(maker),
    )
    complete.memo[HAPPENS] = (moment * len(placed) + np.append(turn, turns))[placed]
    complete.memo[as_inserted] = True
    # Where a sum waits for other ranks, what is listed after it need not.
    if all(len(places) == 1 for places in graph_of(schedule).collectives):
        begun = np.append(begins, _both(made))[placed]
        for ahead in (False, True):
            complete.memo[TEXTBOOK_BEGINS, "edge", ahead] = begun
    return complete


def _both(sends: Ints, receives: Ints | None = None) -> Ints:
    """What both ends of every transfer have, in the order of the transfers; the same by default."""
    ends: Ints = np.stack((sends, sends if receives is None else receives), axis=1).ravel()
    return ends


_SENT = np.array([KIND_INDEX[COUNTERPARTS.get(kind, (kind, 0))[0]] for kind in KINDS])
"""The kind of the send, by the kind of the receive."""


def past(columns: Columns, kinds: Iterable[Kind]) -> Ints:
    """For every place, the first entry after its own that is not all of these kinds, by its first
    place, or the end of its rank's list."""
    heads = columns.heads[columns.entry]
    stops = np.append(np.where(columns.is_kind(*kinds), len(columns), heads), len(columns))
    first = np.minimum.accumulate(stops[::-1])[::-1]
    return np.minimum(first[columns.last + 1], columns.starts[columns.rank + 1])


def inserted(
    schedule: Schedule,
    kind: Kind | Ints,
    stage: Ints,
    rank: Ints,
    before: Ints,
    microbatch: Ints | int = -1,
    like: Ints | None = None,
) -> Schedule:
    """The schedule with a new action of `kind` before each place in `before`, in the list of its
    `rank`.

    `kind` is one for all, or an index in KINDS for each. Several actions before one place keep
    their order. The end of a rank's list is the start of the next rank's. `microbatch` is -1 for an
    action of a whole stage. Each new action takes the line of Python of the place in `like`, if
    given. All arrays have shape [new actions].
    """
    by_rank, number = np.argsort(rank, kind="stable"), len(schedule.columns)
    order = np.insert(np.arange(number), before[by_rank], number + by_rank)
    return _listed(schedule, order, kind, stage, rank, microbatch, like)


def _listed(
    schedule: Schedule,
    order: Ints,
    kind: Kind | Ints,
    stage: Ints,
    rank: Ints,
    microbatch: Ints | int,
    like: Ints | None,
) -> Schedule:
    """The schedule with new actions, as `inserted` has them, in an order of its places, after which
    the new actions are counted on."""
    columns = schedule.columns

    def merged(own: Ints, new: Ints | int) -> Ints:
        both: Ints = np.concatenate((own, np.broadcast_to(new, len(rank))))[order]
        return both

    sources = schedule.sources
    if sources is not None:
        lines = -1 if like is None else sources.line_of[like]
        sources = Sources(sources.lines, merged(sources.line_of, lines))
    lists = Columns(
        starts_of(merged(columns.rank, rank), schedule.ranks),
        merged(columns.kind, KIND_INDEX[kind] if isinstance(kind, Kind) else kind),
        merged(columns.stage, stage),
        merged(columns.microbatch, microbatch),
        merged(columns.version, -1),
        np.concatenate((columns.joined, np.zeros(len(rank), np.bool_)))[order],
    )
    return attrs.evolve(schedule, actions=lists, sources=sources)
