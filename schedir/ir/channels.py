"""The channel models: how much of each list's order a transport enforces.

    model   stands for                                             order that blocks
    host    blocking send/recv calls (MPI_Ssend; dist.send)        every action of the rank
    rank    one order of all communication per rank, which is      all communication of the rank
            what NCCL can be relied on for
    pair    one stream per unordered pair (torch's NCCL isend,     communication with one peer
            at its best)
    edge    one stream per directed pair                           communication on one channel
    async   posts never block (gloo isend/irecv)                   none

`pair` and `edge` need a driver that never couples streams, which CUDA does not promise: hardware
queues are few, the first launch of a kernel waits for the whole device, and a posted NCCL receive
is a running kernel. All such waits lead from what a rank posts later to what it posted earlier,
so that a list that is clean under `rank` is safe whatever the driver does.

In all of them a transfer happens when both its ends are posted (zero buffering: what is clean
without buffers is clean with any), communication needs all compute listed before it on its rank
to have run, and compute needs the receives that it consumes.

A batch is posted as one, and nothing orders its parts among each other; it stands in the queue of
each of its parts, and what waits for one of them waits for all: what is queued behind it, and the
compute that consumes it, so that `edge` may block where `async` does not. Under `host` a batch is
its parts, one after the other.
"""

from __future__ import annotations

CHANNELS_IN_WORDS = {
    "host": "blocking send and receive calls",
    "rank": "one order of all communication per rank, what NCCL can be relied on for",
    "pair": "one stream per pair of ranks, and a driver that never couples streams",
    "edge": "one stream per direction of a pair, and such a driver",
    "async": "posts never block, as on gloo",
}
"""The models, strictest first, and what each stands for."""
CHANNELS = tuple(CHANNELS_IN_WORDS)
"""Their names: each enforces a part of the order that the one before does."""
DEFAULT_CHANNEL = "rank"
"""What schedules are judged under unless somebody says otherwise: what is clean under it runs on
gloo and on NCCL."""

TRANSPORTS = {"nccl": "rank", "gloo": "async", "mpi": "host"}
"""The transports that may be named in place of a model, and the model of each: of MPI's blocking
calls, as its standard allows any send to block."""


def channel_model(name: object) -> str:
    """The channel model that a model's or a transport's name stands for.

    Raises ValueError where the name is neither.
    """
    known = (*CHANNELS, *TRANSPORTS)
    for each in known:
        if name == each:
            return TRANSPORTS.get(each, each)
    raise ValueError(f"unknown channel model {name!r}; known: {', '.join(known)}")
