"""S302 to S306: each send meets its receive, and compute has its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from schedir.checker.changes import Change, ahead, back, in_turn, reorder
from schedir.checker.diagnostics import locate
from schedir.checker.faults import Faults, Finding
from schedir.checker.rules import communication as rules
from schedir.ir import COMMUNICATION, Action, Ints, Kind, Schedule, Transfers, reduces_by_stage

_ROWS_AROUND = 2


def communication(schedule: Schedule) -> Iterator[Faults]:
    """What is wrong with the sends and receives. Expects a sound structure."""
    transfers = schedule.dataflow.transfers
    yield _no_peer(schedule)
    yield _without_receive(schedule, transfers)
    yield _sent_early(schedule, transfers)
    yield from _unmatched(schedule, transfers)
    yield _mis_paired(schedule, transfers)
    yield from unmatched_reduces(schedule)


def _no_peer(schedule: Schedule) -> Faults:
    """Each send and receive stands on the rank that runs its stage, its peer on another one."""
    columns, flow = schedule.columns, schedule.dataflow
    places = columns.where(*COMMUNICATION)
    rank, peer = columns.rank[places], flow.peers[places]
    runs = flow.runs[columns.stage[places], columns.microbatch[places]]
    alone = places[(peer < 0) | (peer == rank) | (runs != rank)]
    pair = columns.stage[alone] * schedule.microbatches + columns.microbatch[alone]
    return Faults(
        rule=rules.NoPeer,
        keys=columns.kind[alone] * schedule.stages * schedule.microbatches + pair,
        findings=(_alone(schedule, place) for place in alone.tolist()),
    )


def _alone(schedule: Schedule, place: int) -> Finding:
    peer = schedule.dataflow.peers[place]
    local = peer == schedule.columns.rank[place]
    return Finding(
        rules.NoPeer.at(
            schedule, place, reason="end" if peer < 0 else "local" if local else "elsewhere"
        ),
    )


def _without_receive(schedule: Schedule, transfers: Transfers) -> Faults:
    """A receive stands before the compute that uses it."""
    numbers = np.flatnonzero((transfers.receive < 0) | (transfers.receive > transfers.user))
    numbers = numbers[np.argsort(transfers.user[numbers])]
    return Faults(
        rule=rules.MissingReceive,
        keys=numbers,
        findings=(_used_too_early(schedule, transfers, number) for number in numbers.tolist()),
    )


def _used_too_early(schedule: Schedule, transfers: Transfers, number: int) -> Finding:
    user, receive = int(transfers.user[number]), int(transfers.receive[number])
    action = _receive(transfers, number)
    if receive < 0:
        return Finding(rules.MissingReceive.at(schedule, user, receive=action))
    slides = (ahead(schedule, receive, user), back(schedule, user, receive))
    return Finding(
        rules.MissingReceive.at(schedule, user, receive, receive=action),
        in_turn(slides),
        of_communication=True,
    )


def _sent_early(schedule: Schedule, transfers: Transfers) -> Faults:
    """A send stands after the compute that makes its payload."""
    numbers = np.flatnonzero((transfers.send >= 0) & (transfers.send < transfers.maker))
    numbers = numbers[np.argsort(transfers.send[numbers])]
    return Faults(
        rule=rules.SendBeforeCompute,
        keys=numbers,
        findings=(
            _nothing_to_send(schedule, int(transfers.send[number]), int(transfers.maker[number]))
            for number in numbers.tolist()
        ),
    )


def _nothing_to_send(schedule: Schedule, send: int, maker: int) -> Finding:
    slides = (back(schedule, send, maker), ahead(schedule, maker, send))
    return Finding(
        rules.SendBeforeCompute.at(schedule, send, maker),
        in_turn(slides),
        of_communication=True,
    )


def _receive(transfers: Transfers, number: int) -> Action:
    kind = Kind.RECV_GRAD if transfers.is_gradient[number] else Kind.RECV_ACT
    return Action(kind, int(transfers.stage[number]), int(transfers.microbatch[number]))


def _send(transfers: Transfers, number: int) -> Action:
    send = _receive(transfers, number).counterpart
    assert send is not None  # a transfer has two ends
    return send


def _unmatched(schedule: Schedule, transfers: Transfers) -> Iterator[Faults]:
    """Every send has its receive, every receive its send."""
    ends = (
        (transfers.send, transfers.receive, transfers.target, _receive),
        (transfers.receive, transfers.send, transfers.source, _send),
    )
    for side, (listed, lacked, peers, missing) in enumerate(ends):
        numbers = np.flatnonzero((listed >= 0) & (lacked < 0))
        numbers = numbers[np.argsort(listed[numbers])]
        yield Faults(
            rule=rules.Unmatched,
            keys=2 * numbers + side,
            findings=_without_other_end(schedule, transfers, numbers, listed, peers, missing),
        )


def _without_other_end(
    schedule: Schedule,
    transfers: Transfers,
    numbers: Ints,
    listed: Ints,
    peers: Ints,
    missing: Callable[[Transfers, int], Action],
) -> Iterator[Finding]:
    for number in numbers.tolist():
        yield Finding(
            rules.Unmatched.at(
                schedule,
                listed[number],
                missing=missing(transfers, number),
                peer=int(peers[number]),
            )
        )


def _mis_paired(schedule: Schedule, transfers: Transfers) -> Faults:
    """The sends and receives of a channel stand in the same order.

    What is unmatched would shift all after it, so only what has both ends is compared.
    """
    order, _ = transfers.by_channel
    source, target = transfers.source[order], transfers.target[order]
    # The same transfers channel by channel, in the order of the receives.
    received = order[np.lexsort((transfers.receive[order], target, source))]
    wrong = np.flatnonzero(order != received)
    keys, extents = np.unique(source[wrong] * schedule.ranks + target[wrong], return_counts=True)
    return Faults(
        rule=rules.MisPaired,
        keys=keys,
        extents=extents,
        findings=(
            _swapped(schedule, transfers, order[own], received[own])
            for own in (np.flatnonzero(source * schedule.ranks + target == key) for key in keys)
        ),
    )


def _swapped(schedule: Schedule, transfers: Transfers, sent: Ints, received: Ints) -> Finding:
    """The finding for a channel, given its transfers in the order of each end."""
    sends, receives = transfers.send[sent], transfers.receive[received]
    wrong = np.flatnonzero(sent != received)
    turn = int(wrong[0])
    rows = range(max(0, turn - _ROWS_AROUND), min(len(sent), turn + _ROWS_AROUND + 2))
    pairs = tuple(
        rules.Pair(
            row,
            locate(schedule, int(sends[row])),
            locate(schedule, int(receives[row])),
            bool(sent[row] == received[row]),
        )
        for row in rows
    )
    return Finding(
        rules.MisPaired.at(
            schedule,
            receives[turn],
            sends[turn],
            transfers.send[received[turn]],
            wrong=len(wrong),
            transfers=len(sent),
            pairs=pairs,
        ),
        _pairing(schedule, transfers, sent, received),
        of_communication=True,
    )


def _pairing(
    schedule: Schedule, transfers: Transfers, sent: Ints, received: Ints
) -> Iterator[Change]:
    """What may pair a channel rightly: one end moved, or the wrong ones of an end reordered."""
    wrong = np.flatnonzero(sent != received)
    first, last = int(wrong[0]), int(wrong[-1])
    sends, receives = transfers.send[sent].tolist(), transfers.receive[received].tolist()
    slides = []

    # Between these an end can be moved without passing another one of its channel.
    def begin(places: list[int]) -> int | None:
        return places[first - 1] + 1 if first else None

    def end(places: list[int]) -> int | None:
        return places[last + 1] - 1 if last + 1 < len(places) else None

    if (received[first:last] == sent[first + 1 : last + 1]).all():
        slides += [
            ahead(schedule, receives[last], receives[first], "post", begin(receives)),
            back(schedule, sends[first], sends[last], "post", end(sends)),
        ]
    if (received[first + 1 : last + 1] == sent[first:last]).all():
        slides += [
            back(schedule, receives[first], receives[last], "post", end(receives)),
            ahead(schedule, sends[last], sends[first], "post", begin(sends)),
        ]
    yield from in_turn(slides)
    yield from reorder(schedule, transfers.receive[sent[wrong]])
    yield from reorder(schedule, transfers.send[received[wrong]])


def unmatched_reduces(schedule: Schedule) -> Iterator[Faults]:
    """A replicated stage has the same number of REDUCE_GRADs on each of its ranks."""
    for stage, by_rank in reduces_by_stage(schedule).items():
        least = min(by_rank, key=lambda rank: len(by_rank[rank]))
        for rank, places in by_rank.items():
            more = places[len(by_rank[least]) :]
            # Numbered below 0, apart from the transfers; the first ones of the stage are matched.
            first = -1 - schedule.holdings.index((stage, rank))
            yield Faults(
                rule=rules.Unmatched,
                keys=first - len(schedule.holdings) * np.arange(len(more)),
                findings=_without_counterpart(schedule, more, least),
            )


def _without_counterpart(schedule: Schedule, places: list[int], least: int) -> Iterator[Finding]:
    for place in places:
        missing = Action(Kind.REDUCE_GRAD, int(schedule.columns.stage[place]))
        yield Finding(rules.Unmatched.at(schedule, place, missing=missing, peer=least))
