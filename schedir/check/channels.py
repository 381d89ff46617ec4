"""The channel models: how much of each list's order a transport enforces.

    model   stands for                                             order that blocks
    host    blocking send/recv calls (MPI_Ssend; dist.send)        every action of the rank
    rank    one communication stream per rank (NCCL, eager init)   all communication of the rank
    pair    one stream per unordered pair (torch's NCCL isend)     communication with one peer
    edge    one stream per directed pair (schedir's executor)      communication on one channel
    async   posts never block (gloo)                               none

In all of them a transfer happens when both its ends are posted (zero buffering: what is clean
without buffers is clean with any), communication needs all compute listed before it on its rank
to have run (but for receives under `async`), and compute needs the receives that it consumes.
"""

from __future__ import annotations

from collections.abc import Hashable

from schedir.ir import Action, Dataflow, Kind, channel_of

CHANNELS = ("host", "rank", "pair", "edge", "async")
"""The models, strictest first: each enforces a part of the order that the one before does."""


def queue_of(channel: str, action: Action, rank: int, dataflow: Dataflow) -> Hashable | None:
    """The queue of `rank` in which a communication action stands; None where it blocks nothing.

    The entries of one queue happen in list order. A REDUCE_GRAD has no peer: but for the models
    that order all communication, it stands in its stage's own queue.
    """
    if channel == "rank":
        return "all"
    if channel == "async":
        return None
    if action.kind is Kind.REDUCE_GRAD:
        return action.stage
    peer = dataflow.peer(action)
    if peer is None:
        return None
    return frozenset((rank, peer)) if channel == "pair" else channel_of(action, rank, peer)
