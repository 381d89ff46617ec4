"""Moves tensors from rank to rank: over gloo, within one process, or between GPUs by NCCL.

Both sides know the layout of what is moved. Each channel is first in, first out, and posting never
blocks. Payloads that carry their description, as in the first call of an input signature, have tags
of their own, or go by `Control.described` if the transport has none.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import ClassVar, Protocol, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from schedir.errors import ExecutionError
from schedir.graph.compile import graph_of
from schedir.ir import Schedule
from schedir.runtime.accelerator import Accelerator, Mark
from schedir.runtime.processes.failure import WaitError
from schedir.runtime.processes.groups import Asked, Groups, NcclGroup, Post


class Work(Protocol):
    """A send or receive under way; wait for it once.

    A send is done when its tensor may change, and when it will arrive even if this process ends.
    """

    def wait(self) -> bool:
        """Wait until it is done; if the transport `queues`, make the device wait.

        Raises RuntimeError if it can't complete any more, or if the other side does not come within
        the timeout of `Groups`, with "timed out" or "timeout" in the message.
        """


class Poster(Protocol):
    """Takes sends and receives. Both raise WaitError if the other side is gone."""

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send; `tensor`, contiguous, must stay untouched until the work is done."""

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive into `buffer`, contiguous, of exactly the sent tensor's size. Sends and
        receives of one tag meet in order, whichever side posts first."""


class Transport(Poster, Protocol):
    """The point-to-point transfers of one rank.

    `channel` is the channel model under which lists are proved for it: how much of their order it
    keeps. `early`: receives may be posted before the call is known, because transfers with another
    tag never meet them. `queues`: waiting for a work makes the device wait, and not the host.
    """

    channel: ClassVar[str]
    early: ClassVar[bool]
    queues: ClassVar[bool]

    def tagged(self, tag: int) -> Transport:
        """The same transport for traffic under a tag, a small integer that both sides agree on. A
        transport without tags returns itself, and is not `early`."""
        return self

    def together(self, posts: Sequence[Post]) -> list[Work]:
        """Post several sends and receives as one, so that no order among them can block; returns
        the work of each. Where posts never block each other, that is one after the other."""
        return [
            (self.send if post.sends else self.receive)(post.tensor, post.peer) for post in posts
        ]


def wait_for(works: list[Work]) -> None:
    """Wait for each of the works, and drop them: with gloo a work can be waited for only once.

    Raises WaitError if one of them can't complete any more.
    """
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise WaitError(error) from error
    works.clear()


class GlooTransport(Transport):
    """Transfers between the processes of a pipeline; `processes[rank]` runs a rank.

    Traffic to higher ranks and traffic to lower ranks each have a group, and so a connection. With
    one connection, a payload often comes in while its receiver is posting a send: gloo's thread
    finds the connection locked, tries again at once, and keeps the core from the thread that holds
    the lock, for up to a timer tick of 4 ms. Collectives have other groups.

    A send meets only a receive with the same tag.
    """

    channel = "async"
    early = True
    queues = False

    def __init__(self, processes: Sequence[int], rank: int, groups: Groups) -> None:
        ordered = tuple(sorted(processes))
        self._tag = 0
        self._numbers = [ordered.index(process) for process in processes]
        up, down = (groups.make(f"transfers {way}", ordered) for way in ("up", "down"))
        self._to = [up if peer > rank else down for peer in range(len(processes))]
        self._from = [down if peer > rank else up for peer in range(len(processes))]

    def tagged(self, tag: int) -> GlooTransport:
        """The same connections, for traffic that meets no other."""
        beside = copy.copy(self)
        beside._tag = tag
        return beside

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send."""
        return self._to[peer].send([tensor], self._numbers[peer], self._tag)

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive."""
        return self._from[peer].recv([buffer], self._numbers[peer], self._tag)


@attrs.define(eq=False)
class End:
    """One end of a transfer within a process: its tensor.

    On a GPU `ready` is a mark on its rank's stream, and `copied` a mark after the copy.
    """

    tensor: Tensor
    ready: Mark | None = None
    copied: Mark | None = None

    def wait(self) -> bool:
        """Have the current stream wait; both ends have met."""
        if self.copied is not None:
            self.copied.wait()
        return True


class InProcessTransport:
    """Transfers between the ranks of one process: sends wait in a queue for their receives."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        # By ranks, tag, and whether they send: the ends that have met no other end.
        self._waiting: dict[tuple[int, int, int, bool], deque[End]] = {}

    def of(self, rank: int) -> Endpoint:
        """The transfers of one rank."""
        return Endpoint(self, rank, tag=0)

    def clear(self) -> None:
        """After a step that failed, drop the ends that have met no other end."""
        self._waiting.clear()

    def post(self, channel: tuple[int, int, int], tensor: Tensor, sends: bool) -> Work:
        """Post one end; the j-th send of a channel meets its j-th receive."""
        mark = self._accelerator.mark if self._accelerator.queues else None
        end = End(tensor, mark and mark())
        waiting = self._waiting.get((*channel, not sends))
        if not waiting:
            self._waiting.setdefault((*channel, sends), deque()).append(end)
            return end
        met = waiting.popleft()
        source, target = (end, met) if sends else (met, end)
        if (source.tensor.shape, source.tensor.dtype) != (target.tensor.shape, target.tensor.dtype):
            raise ExecutionError(
                f"rank {channel[0]} sends {source.tensor.dtype}{list(source.tensor.shape)}, but "
                f"rank {channel[1]} expects {target.tensor.dtype}{list(target.tensor.shape)}"
            )
        if met.ready is not None:
            met.ready.wait()
            if self._accelerator.makes(met.tensor):  # rather than the host, as a mask
                # The other rank's stream may free it before this one has come to the copy.
                self._accelerator.used(met.tensor)
        target.tensor.detach().copy_(source.tensor.detach())
        end.copied = met.copied = mark and mark()
        return end


@attrs.frozen
class Endpoint(Transport):
    """One rank's side of the transfers within a process."""

    channel = "async"
    early = False
    queues = False  # the ranks take turns, and none waits for what has not come
    hub: InProcessTransport
    rank: int
    tag: int

    def tagged(self, tag: int) -> Endpoint:
        """The same for traffic under a tag."""
        return attrs.evolve(self, tag=tag)

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send."""
        return self.hub.post((self.rank, peer, self.tag), tensor, sends=True)

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive."""
        return self.hub.post((peer, self.rank, self.tag), buffer, sends=False)


Channel: TypeAlias = tuple[int, int]
"""The ranks that it leads from and to."""

_TAKEN = frozenset(
    {
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
"""What every GPU's NCCL takes; of the newer ones' some take float8 as well."""


class NcclTransport(Transport):
    """Transfers between GPUs: one communicator and one stream for each directed pair of ranks.

    NCCL has no tags, and matches the transfers of two ranks in order. Both directions of a pair on
    one communicator would deadlock above some undefined size, unless they are posted as one. A
    transfer waits on the GPU for the compute that was queued before it, and compute waits for the
    transfer by an event. The host never waits.

    Transfers that are posted as one need one communicator, and a channel needs the same one at both
    of its ends. So channels that are in one batch anywhere share a communicator over all of their
    ranks. Each other channel has its own, and so a stream that nothing else holds up.

        together (0→1, 1→0)            ranks 0, 1      0→1  1→0
        together (1→2)                 ranks 1, 2      1→2
                                       ranks 1, 2      2→1

    `processes[rank]` runs a rank. `communicators` has the channels of each communicator, all
    channels of the schedule. `groups` is asked for them, and has them once it has connected. A
    single transfer is posted as a batch of one: other ranks may post their end of it in a batch,
    and the work of a batch keeps no tensor alive while somebody watches it.
    """

    channel = "rank"  # CUDA promises no two streams progress of their own
    early = False  # the host would have to wait for what it then learns
    queues = True

    def __init__(
        self,
        processes: Sequence[int],
        rank: int,
        communicators: Sequence[Sequence[Channel]],
        device: torch.device,
        groups: Groups,
    ) -> None:
        self._rank = rank
        self._lanes: dict[Channel, Callable[[Sequence[Post]], Iterable[Work]]] = {}
        for channels in communicators:
            if rank not in (ranks := ranks_of(channels)):
                continue
            members = sorted(processes[rank] for rank in ranks)
            positions = {rank: members.index(processes[rank]) for rank in ranks}
            ends = tuple((processes[source], processes[target]) for source, target in channels)
            listed = ",".join(f"{source}-{target}" for source, target in ends)
            asked = Asked(f"channel/{listed}", tuple(members), ends)
            post = partial(_post, groups.ask(asked, device), positions)
            self._lanes.update(dict.fromkeys(channels, post))

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send, after the compute that is queued."""
        return self.together([Post(tensor, peer, sends=True)])[0]

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive; waiting for it has the compute that is queued next wait."""
        return self.together([Post(buffer, peer, sends=False)])[0]

    def together(self, posts: Sequence[Post]) -> list[Work]:
        """Post several as one, on the communicator that their channels share."""
        own = self._rank
        channels = [(own, post.peer) if post.sends else (post.peer, own) for post in posts]
        (post,) = {self._lanes[channel] for channel in channels}
        return [*post(posts)]


def _post(group: NcclGroup, positions: dict[int, int], posts: Sequence[Post]) -> list[dist.Work]:
    """Post several as one on a communicator in which ranks have these `positions`."""
    own = [Post(_carried(p.tensor), positions[p.peer], p.sends) for p in posts]
    # One work of all, which may be waited for more than once.
    return [group.together(own)] * len(own)


def _carried(tensor: Tensor) -> Tensor:
    """The tensor as NCCL takes it: the same memory, as bytes if NCCL does not know the type."""
    return tensor if tensor.dtype in _TAKEN else tensor.reshape(-1).view(torch.uint8)


def batched(schedule: Schedule) -> set[frozenset[Channel]]:
    """The channels of each batch of a schedule, on whatever rank it is listed."""
    columns, transfers = schedule.columns, graph_of(schedule).transfers
    if not columns.together:
        return set()
    channels = [*zip(transfers.source.tolist(), transfers.target.tolist(), strict=True)]
    by_entry = defaultdict[int, set[Channel]](set)
    for places in (transfers.send, transfers.receive):
        for entry, channel in zip(columns.entry[places].tolist(), channels, strict=True):
            by_entry[entry].add(channel)
    return {*map(frozenset, by_entry.values())}


def communicators_of(schedule: Schedule) -> list[tuple[Channel, ...]]:
    """The channels of each communicator that a schedule needs."""
    transfers = graph_of(schedule).transfers
    channels = zip(transfers.source.tolist(), transfers.target.tolist(), strict=True)
    return communicators(channels, batched(schedule))


def communicators(
    channels: Iterable[Channel], together: Iterable[Collection[Channel]]
) -> list[tuple[Channel, ...]]:
    """The channels of each communicator; `together` are the sets that are posted as one.

    The order is the same on all processes. Both directions between two ranks are next to each
    other.
    """
    shared = {channel: {channel} for channel in channels}
    for joined in together:
        every = set[Channel]().union(*(shared[channel] for channel in joined))
        shared.update(dict.fromkeys(every, every))
    found: dict[int, list[Channel]] = {}
    for channel in sorted(shared, key=lambda channel: (sorted(channel), channel)):
        found.setdefault(id(shared[channel]), []).append(channel)
    return [tuple(one) for one in found.values()]


def ranks_of(channels: Iterable[Channel]) -> tuple[int, ...]:
    """The ranks at the ends of channels, in order."""
    return tuple(sorted({rank for channel in channels for rank in channel}))


@attrs.define(eq=False)
class _Part:
    """A transfer that keeps its tensor until it is waited for; a plain work might not.

    The part of a batch has its `work` once that is posted; several may wait for it.
    """

    post: Post | None
    work: Work | None = None

    def wait(self) -> bool:
        """Wait until it is done."""
        work, self.work, self.post = self.work, None, None
        if work is not None:
            work.wait()
        return True


@attrs.frozen(eq=False)
class _Whole:
    """The works of a batch: a consumer of one of its receives waits for all."""

    parts: Sequence[_Part]

    def wait(self) -> bool:
        """Wait until all of it is done."""
        return all(part.wait() for part in self.parts)


class Batch:
    """Stands in for the transport, collects what the actions of an entry post, and posts it as one.

    (0SEND_ACT1;0RECV_GRAD0)    0SEND_ACT1, 0RECV_GRAD0, post    each says what it posts
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._parts: list[_Part] = []

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Take a send. Waiting for it waits for nothing else: it may be known to have arrived when
        the rest has not."""
        return self._take(Post(tensor, peer, sends=True))

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Take a receive."""
        self._take(Post(buffer, peer, sends=False))
        return _Whole(self._parts)

    def _take(self, post: Post) -> _Part:
        self._parts.append(_Part(post))
        return self._parts[-1]

    def post(self) -> None:
        """Post what has been taken."""
        parts, self._parts = self._parts, []
        if posts := [part.post for part in parts if part.post is not None]:
            for part, work in zip(parts, self._transport.together(posts), strict=True):
                part.work = work


_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def _users(buffer: Tensor) -> tuple[int, int]:
    """The number of references to a tensor's memory: from tensors, and from Python."""
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_NOBODY = _users(torch.empty(1))


class Pool:
    """The buffers of one rank, whose stream is the one that uses them.

    On a GPU a transport has its own streams. Memory that it has used is given out again only when
    the host has seen that stream pass, but the host may be a whole step ahead of the GPU, with all
    that is sent and received in a step. A buffer of the pool is free as soon as its last use is
    *queued*: what is posted next waits on the GPU for everything on the rank's stream by then.

        host          RECV0 → a   F0   B0   RECV1 → a   F1        a is free once B0 has been queued
        rank's stream             F0   B0 ──┐
        transport's   RECV0 → a             └── RECV1 → a         and is filled after it

    A buffer is free when nothing refers to its memory: no cell, no graph, no send under way, and
    not the module, which may keep its input, or a view of it. So a tensor that the module keeps is
    never overwritten. If the module uses it on its own streams, the module has to wait for these.

    It keeps as many of each layout as are in use at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[_Layout, list[Tensor]] = {}
        self._taken: set[_Layout] = set()

    def empty(
        self, shape: tuple[int, ...], stride: tuple[int, ...], *, dtype: torch.dtype
    ) -> Tensor:
        """A buffer to receive a tensor into. Drop all references to give it back."""
        layout = shape, stride, dtype
        self._taken.add(layout)
        buffers = self._buffers.setdefault(layout, [])
        found = next((buffer for buffer in buffers if _users(buffer) == _NOBODY), None)
        if found is None:
            found = torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
            buffers.append(found)
        return found.data  # a fresh tensor on the same memory

    def trim(self) -> None:
        """After a call whose sends have arrived, drop buffers that somebody has kept, and layouts
        that were not used."""
        taken, self._taken = self._taken, set()
        self._buffers = {
            layout: [buffer for buffer in buffers if _users(buffer) == _NOBODY]
            for layout, buffers in self._buffers.items()
            if layout in taken
        }


@attrs.frozen(eq=False)
class FromBuffers:
    """Posts sends from buffers of a pool, but tensors on the host as they are. So an output can be
    freed at once; otherwise its memory would be held until the host has seen the send."""

    poster: Poster
    pool: Pool

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send of a copy."""
        if tensor.device.type != self.pool.device.type:
            return self.poster.send(tensor, peer)
        buffer = self.pool.empty(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype)
        work = self.poster.send(buffer.copy_(tensor.detach()), peer)
        return work if isinstance(work, _Part) else _Part(Post(buffer, peer, sends=True), work)

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive."""
        return self.poster.receive(buffer, peer)
