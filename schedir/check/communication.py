"""S302 to S306: each send meets its receive, and compute has its input."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedir.check.diagnostics import Diagnostic, locate, move
from schedir.check.rules import communication as rules
from schedir.ir import COMMUNICATION, Action, Ints, Kind, Schedule, Transfers, reduces_by_stage

_ROWS_AROUND = 2


def communication(schedule: Schedule) -> Iterator[Diagnostic]:
    """What is wrong with the sends and receives. Expects a sound structure."""
    transfers = schedule.dataflow.transfers
    yield from _no_peer(schedule)
    yield from _at_its_compute(schedule, transfers)
    yield from _unmatched(schedule, transfers)
    yield from _mis_paired(schedule, transfers)
    yield from unmatched_reduces(schedule)


def _no_peer(schedule: Schedule) -> Iterator[Diagnostic]:
    """Each send and receive stands on the rank that runs its stage, its peer on another one."""
    columns, flow = schedule.columns, schedule.dataflow
    places = columns.where(*COMMUNICATION)
    rank, peer = columns.rank[places], flow.peers[places]
    runs = flow.runs[columns.stage[places], columns.microbatch[places]]
    for place in places[(peer < 0) | (peer == rank) | (runs != rank)].tolist():
        alone = flow.peers[place] < 0
        local = flow.peers[place] == columns.rank[place]
        yield rules.NoPeer(
            locations=(locate(schedule, place),),
            reason="end" if alone else "local" if local else "elsewhere",
        )


def _at_its_compute(schedule: Schedule, transfers: Transfers) -> Iterator[Diagnostic]:
    """A receive stands before the compute that uses it, a send behind the compute that makes it."""
    columns = schedule.columns
    for number in np.flatnonzero(
        (transfers.receive < 0) | (transfers.receive > transfers.user)
    ).tolist():
        user, receive = int(transfers.user[number]), int(transfers.receive[number])
        late = receive >= 0
        yield rules.MissingReceive(
            locations=(locate(schedule, user), *([locate(schedule, receive)] if late else [])),
            receive=_receive(transfers, number),
            moves=(move(columns, receive, "before", user),) if late else (),
        )
    early = (transfers.send >= 0) & (transfers.send < transfers.maker)
    for number in np.flatnonzero(early).tolist():
        send, maker = int(transfers.send[number]), int(transfers.maker[number])
        yield rules.SendBeforeCompute(
            locations=(locate(schedule, send), locate(schedule, maker)),
            moves=(move(columns, send, "behind", maker),),
        )


def _receive(transfers: Transfers, number: int) -> Action:
    kind = Kind.RECV_GRAD if transfers.is_gradient[number] else Kind.RECV_ACT
    return Action(kind, int(transfers.stage[number]), int(transfers.microbatch[number]))


def _send(transfers: Transfers, number: int) -> Action:
    gradient = bool(transfers.is_gradient[number])
    kind = Kind.SEND_GRAD if gradient else Kind.SEND_ACT
    stage = int(transfers.stage[number]) + (1 if gradient else -1)
    return Action(kind, stage, int(transfers.microbatch[number]))


def _unmatched(schedule: Schedule, transfers: Transfers) -> Iterator[Diagnostic]:
    """Every send has its receive, every receive its send."""
    for number in np.flatnonzero((transfers.send >= 0) & (transfers.receive < 0)).tolist():
        yield rules.Unmatched(
            locations=(locate(schedule, int(transfers.send[number])),),
            other=_receive(transfers, number),
            rank=int(transfers.target[number]),
        )
    for number in np.flatnonzero((transfers.receive >= 0) & (transfers.send < 0)).tolist():
        yield rules.Unmatched(
            locations=(locate(schedule, int(transfers.receive[number])),),
            other=_send(transfers, number),
            rank=int(transfers.source[number]),
        )


def _mis_paired(schedule: Schedule, transfers: Transfers) -> Iterator[Diagnostic]:
    """The sends and receives of a channel stand in the same order.

    What is unmatched would shift all behind it, so only what has both ends is compared.
    """
    order, follows = transfers.by_channel
    receives = transfers.receive[order]
    swapped = np.flatnonzero(follows[1:] & (receives[1:] < receives[:-1])) + 1
    firsts = np.flatnonzero(~follows)
    for channel in np.unique(np.searchsorted(firsts, swapped, side="right") - 1).tolist():
        end = firsts[channel + 1] if channel + 1 < len(firsts) else len(order)
        yield _swapped(schedule, transfers, order[firsts[channel] : end])


def _swapped(schedule: Schedule, transfers: Transfers, channel: Ints) -> Diagnostic:
    """The finding for a channel, given its transfers in the order of the sends."""
    columns = schedule.columns
    received = channel[np.argsort(transfers.receive[channel])]
    wrong = np.flatnonzero(channel != received)
    turn = int(wrong[0])
    rows = range(max(0, turn - _ROWS_AROUND), min(len(channel), turn + _ROWS_AROUND + 2))
    pairs = tuple(
        (
            row,
            locate(schedule, int(transfers.send[channel[row]])),
            locate(schedule, int(transfers.receive[received[row]])),
            bool(channel[row] == received[row]),
        )
        for row in rows
    )
    receive, send = (int(transfers.receive[received[turn]]), int(transfers.send[channel[turn]]))
    # The receive that belongs here, and the send that belongs here, wherever they are now; or the
    # one that stands here goes to its own place.
    right_receive = int(transfers.receive[channel[turn]])
    right_send = int(transfers.send[received[turn]])
    own_turn_of_receive = int(np.flatnonzero(channel == received[turn])[0])
    own_turn_of_send = int(np.flatnonzero(received == channel[turn])[0])
    moves = (
        move(columns, right_receive, "before", receive, "post"),
        move(columns, receive, "behind", int(transfers.receive[received[own_turn_of_receive]])),
        move(columns, right_send, "before", send, "post"),
        move(columns, send, "behind", int(transfers.send[channel[own_turn_of_send]])),
    )
    return rules.MisPaired(
        locations=(
            locate(schedule, receive),
            locate(schedule, send),
            locate(schedule, right_send),
        ),
        wrong=len(wrong),
        transfers=len(channel),
        pairs=pairs,
        moves=moves,
    )


def unmatched_reduces(schedule: Schedule) -> Iterator[Diagnostic]:
    """A replicated stage has the same number of REDUCE_GRADs on each of its ranks."""
    for stage, by_rank in reduces_by_stage(schedule).items():
        least = min(by_rank, key=lambda rank: len(by_rank[rank]))
        for places in by_rank.values():
            for place in places[len(by_rank[least]) :]:
                yield rules.Unmatched(
                    locations=(locate(schedule, place),),
                    other=Action(Kind.REDUCE_GRAD, stage),
                    rank=least,
                )
