"""Who feeds whom: the rank that runs each stage on each microbatch, and the peers of transfers.

The peer of a send or receive is never computed from a formula: it is the rank that runs the
neighbouring stage on that microbatch, which is the rank whose list has its FORWARD.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from schedir.ir.actions import (
    RECEIVES,
    SENDS,
    Action,
    Kind,
    recv_act,
    recv_grad,
    send_act,
    send_grad,
)
from schedir.ir.schedule import Schedule

Position: TypeAlias = tuple[int, int]
"""A place in the lists, (rank, index): `actions[rank][index]`."""


@attrs.frozen
class Dataflow:
    """Where each (stage, microbatch) runs: `ranks[stage, microbatch]`."""

    ranks: dict[tuple[int, int | None], int]

    def rank_of(self, stage: int, microbatch: int | None) -> int | None:
        """The rank that runs `stage` on `microbatch`; None if no rank does."""
        return self.ranks.get((stage, microbatch))

    def peer(self, action: Action) -> int | None:
        """The rank at the other end of a send or receive; None if there is no such rank."""
        neighbour = action.stage + (1 if action.kind in _TOWARDS_NEXT else -1)
        return self.ranks.get((neighbour, action.microbatch))

    def needs(self, action: Action, rank: int) -> Action | None:
        """The receive that a compute action on `rank` consumes; None if its input is local."""
        if action.kind is Kind.FORWARD:
            receive, neighbour = recv_act, action.stage - 1
        elif action.kind is Kind.BACKWARD or action.kind is Kind.BACKWARD_INPUT:
            receive, neighbour = recv_grad, action.stage + 1
        else:
            return None
        if self.ranks.get((neighbour, action.microbatch), rank) == rank:
            return None
        return receive(action.stage, _microbatch(action))

    def makes(self, action: Action, rank: int) -> Action | None:
        """The send that a compute action on `rank` makes the payload of; None if it stays here."""
        if action.kind is Kind.FORWARD:
            send, neighbour = send_act, action.stage + 1
        elif action.kind is Kind.BACKWARD or action.kind is Kind.BACKWARD_INPUT:
            send, neighbour = send_grad, action.stage - 1
        else:
            return None
        if self.ranks.get((neighbour, action.microbatch), rank) == rank:
            return None
        return send(action.stage, _microbatch(action))


_TOWARDS_NEXT = frozenset({Kind.SEND_ACT, Kind.RECV_GRAD})


def trace(schedule: Schedule) -> Dataflow:
    """Find the rank of every (stage, microbatch); the first FORWARD counts where several stand."""
    ranks: dict[tuple[int, int | None], int] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind is Kind.FORWARD:
                ranks.setdefault((action.stage, action.microbatch), rank)
    return Dataflow(ranks)


def received_by(send: Action) -> Action:
    """The receive that a send must meet: the same boundary, seen from the other side."""
    if send.kind is Kind.SEND_ACT:
        return recv_act(send.stage + 1, _microbatch(send))
    return recv_grad(send.stage - 1, _microbatch(send))


def matching_send(receive: Action) -> Action:
    """The send that a receive must meet. Raises ValueError at the pipeline's ends."""
    if receive.kind is Kind.RECV_ACT:
        return send_act(receive.stage - 1, _microbatch(receive))
    return send_grad(receive.stage + 1, _microbatch(receive))


def transfer_of(action: Action) -> Action:
    """The receive that stands for a transfer, given either of its ends."""
    return received_by(action) if action.kind in SENDS else action


def channel_of(action: Action, rank: int, peer: int) -> tuple[int, int]:
    """The channel (source, destination) of a send or receive on `rank`."""
    return (peer, rank) if action.kind in RECEIVES else (rank, peer)


def _microbatch(action: Action) -> int:
    if action.microbatch is None:
        raise ValueError(f"{action} names no microbatch")
    return action.microbatch
