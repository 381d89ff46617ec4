"""When receives are posted, and when sends are known to have arrived: one rank's list, compiled.

A receive may be posted before its place in the list, never out of its channel's order: that only
removes constraints. It matters: a gloo receive that is posted after its payload has been sent can
cost a whole timer tick of 4 ms. Each posted receive occupies a buffer until the backward that uses
it last, so receives run ahead only as far as the list itself needs buffers at its peak, and by a
few more where these are small:

    list      RECV0 F0 RECV1 F1 RECV2 F2 B0 B1 B2        at most 3 buffers
    posted    RECV0 RECV1 RECV2 F0 F1 F2 B0 B1 B2        at most 3 buffers

The receives that come before all else are posted before the rank knows that this step's shapes are
those of the last; see `opening`. For that all ranks know how many more buffers each may take.

A send has arrived when something comes back that its receiver sent after it had used it; then the
tensor that it holds can go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import takewhile

import attrs
import numpy as np

from schedir.ir import COMMUNICATION, RECEIVES, Action, Kind, Schedule

_RECEIVED_FOR = {
    Kind.FORWARD: Kind.RECV_ACT,
    Kind.BACKWARD: Kind.RECV_GRAD,
    Kind.BACKWARD_INPUT: Kind.RECV_GRAD,
}


def posting_order(schedule: Schedule, rank: int, more: int = 0) -> list[int]:
    """The indices of the rank's actions in the order in which they are carried out.

    `more` is the number of buffers that receives may take beyond what the list needs.
    """
    columns, flow = schedule.columns, schedule.dataflow
    start, end = (int(place) for place in columns.starts[rank : rank + 2])
    transfers = flow.transfers
    # A received activation is used up to the backward, a received gradient up to the W.
    own = np.flatnonzero((transfers.target == rank) & transfers.matched)
    stage, microbatch = transfers.stage[own], transfers.microbatch[own]
    last_use = np.maximum(flow.weight_gradients[stage, microbatch], transfers.user[own])
    frees: dict[int, int] = {}
    for place in last_use.tolist():
        frees[place - start] = frees.get(place - start, 0) + 1
    receives = (columns.where(*RECEIVES) - start).tolist()
    pending = deque(index for index in receives if 0 <= index < end - start)
    is_receive = set(pending)

    def live_at_peak() -> int:
        live = peak = 0
        for index in range(end - start):
            live += index in is_receive
            peak = max(peak, live)
            live -= frees.get(index, 0)
        return peak

    room = live_at_peak() + more
    order = []
    for index in range(end - start):
        while pending and (room > 0 or pending[0] <= index):
            order.append(pending.popleft())
            room -= 1
        if index not in is_receive:
            order.append(index)
        room += frees.get(index, 0)
    return order


def leading(schedule: Schedule, rank: int, order: Iterable[int]) -> list[Action]:
    """The receives of a rank that come before all else in an order of its list."""
    actions = (schedule.actions[rank][index] for index in order)
    return list(takewhile(lambda action: action.kind in RECEIVES, actions))


def matching_send(receive: Action) -> Action:
    """The send that a receive meets."""
    if receive.kind is Kind.RECV_ACT:
        return Action(Kind.SEND_ACT, receive.stage - 1, receive.microbatch)
    return Action(Kind.SEND_GRAD, receive.stage + 1, receive.microbatch)


def awaited(schedule: Schedule, action: Action) -> str:
    """What an action waits for of another rank, in words."""
    kind = _RECEIVED_FOR.get(action.kind, action.kind)
    transfer = attrs.evolve(action, kind=kind, version=None)
    if kind not in COMMUNICATION:
        return str(action)
    peer = schedule.dataflow.peer(transfer)
    return f"{transfer} {'from' if kind in RECEIVES else 'to'} rank {peer}"


def arrivals(schedule: Schedule, rank: int) -> dict[int, list[int]]:
    """For each compute action of the rank that consumes a receive, the sends that have arrived by
    then: as indices into the rank's list."""
    transfers, start = schedule.dataflow.transfers, int(schedule.columns.starts[rank])
    found: dict[int, list[int]] = {}
    sent = np.flatnonzero((transfers.source == rank) & transfers.matched)
    for peer in np.unique(transfers.target[sent]).tolist():
        to = sent[transfers.target[sent] == peer]
        answers = (transfers.source == peer) & (transfers.target == rank)
        back = np.flatnonzero(answers & transfers.matched)
        back = back[np.argsort(transfers.send[back])]
        # The first that the peer sends after the compute that has used what it was sent.
        first = np.searchsorted(transfers.send[back], transfers.user[to])
        for send, answer in zip(transfers.send[to].tolist(), first.tolist(), strict=True):
            if answer < len(back):
                # Of all answers from there on, the one that this rank looks at first.
                user = int(transfers.user[back[answer:]].min())
                found.setdefault(user - start, []).append(send - start)
    return found
