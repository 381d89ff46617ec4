"""The channel models: how much of each list's order a transport enforces.

    model      stands for                                          order that blocks
    host       blocking send/recv calls (MPI_Ssend; dist.send)     every action of the rank
    rank       one order of all communication per rank, which is   all communication of the rank
               what NCCL can be relied on for
    pair       one stream per unordered pair (torch's NCCL isend,  communication with one peer
               at its best)
    edge       one stream per directed pair                        communication on one channel
    direction  a communicator for activations and one for          communication of activations,
               gradients (torch 2.14, pipeline_per_direction_p2p)  and that of gradients
    async      posts never block (gloo isend/irecv)                none

`pair`, `edge` and `direction` need a driver that never couples streams. CUDA does not promise that:
hardware queues are few, the first launch of a kernel waits for the whole device, and a posted NCCL
receive is a running kernel. All such waits lead from a later post of a rank to an earlier one. So a
list that is clean under `rank` is safe whatever the driver does.

The j-th send on a channel meets the j-th receive. From one rank to another there is one channel,
under `direction` one for activations and one for gradients. No transport of schedir works like
`direction`: lists are checked under it, and do not run.

In every model a transfer happens when both its ends are posted. (There are no buffers: a list that
is clean without buffers is clean with any.) Communication waits for all compute listed before it on
its rank. Compute waits for the receives that it uses.

A batch is posted as one entry, and nothing orders its parts. It stands in the queue of each of its
parts. An action that waits for one part waits for all: both the action queued behind it and the
compute that uses it. So `edge` may block where `async` does not. Under `host` a batch runs as its
parts, one after the other.
"""

from __future__ import annotations

CHANNELS_IN_WORDS = {
    "host": "blocking send and receive calls",
    "rank": "one order of all communication per rank, which is safe on NCCL",
    "pair": "one stream per pair of ranks, if the driver never couples streams",
    "edge": "one stream per direction of a pair of ranks, if the driver never couples streams",
    "direction": "one order of all activations and one of all gradients per rank, as torch's "
    "pipeline_per_direction_p2p has them, if the driver never couples streams",
    "async": "posts never block, as on gloo",
}
"""The models, strictest first, and what each stands for."""
CHANNELS = tuple(CHANNELS_IN_WORDS)
"""The names of the models, none before one that `enforces` more."""
DEFAULT_CHANNEL = "rank"
"""The default model. A schedule that is clean under it runs on gloo and on NCCL."""

TRANSPORTS = {"nccl": "rank", "gloo": "async", "mpi": "host"}
"""Transports that may be named instead of a model, with the model of each. MPI's is `host`, because
its standard allows any blocking send to wait for the receive."""


def enforces(channel: str, other: str) -> bool:
    """Whether a model enforces all order that another does: all before it in CHANNELS do, but
    `pair` and `edge` have other queues than `direction`."""
    apart = other == "direction" and channel in ("pair", "edge")
    return CHANNELS.index(channel) <= CHANNELS.index(other) and not apart


def channel_model(name: object) -> str:
    """The channel model that a model's or a transport's name stands for.

    Raises ValueError for any other name.
    """
    known = (*CHANNELS, *TRANSPORTS)
    for each in known:
        if name == each:
            return TRANSPORTS.get(each, each)
    raise ValueError(f"unknown channel model {name!r}; known: {', '.join(known)}")
