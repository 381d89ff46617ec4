"""Moves tensors between GPUs: one communicator and one stream for each directed pair of ranks.

NCCL has no tags, and matches the transfers of two ranks in order. Both directions of a pair on one
communicator would deadlock above some undefined size, unless they are posted as one. A transfer
waits on the GPU for the compute that was queued before it, and compute waits for the transfer by an
event. The host never waits.

Transfers that are posted as one need one communicator, and a channel needs the same one at both of
its ends. So channels that are in one batch anywhere share a communicator over all of their ranks.
Each other channel has its own, and so a stream that nothing else holds up.

    together (0→1, 1→0)            ranks 0, 1      0→1  1→0
    together (1→2)                 ranks 1, 2      1→2
                                   ranks 1, 2      2→1
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import ClassVar, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from schedir.graph.compile import graph_of
from schedir.ir import Schedule
from schedir.runtime.processes.groups import Asked, Groups, NcclGroup, Post
from schedir.runtime.transports.transport import Transport, Work

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
    """Transfers between the processes of a pipeline; `processes[rank]` runs a rank.

    `communicators` has the channels of each communicator, all channels of the schedule. `groups` is
    asked for them, and has them once it has connected. A single transfer is posted as a batch of
    one: other ranks may post their end of it in a batch, and the work of a batch keeps no tensor
    alive while somebody watches it.
    """

    channel: ClassVar[str] = "rank"  # CUDA promises no two streams progress of their own
    early: ClassVar[bool] = False  # the host would have to wait for what it then learns
    queues: ClassVar[bool] = True

    def __init__(
        self,
        processes: Sequence[int],
        rank: int,
        communicators: Sequence[Sequence[Channel]],
        device: torch.device,
        groups: Groups,
    ) -> None:
        self._rank = rank
        self._lanes: dict[Channel, _Lane] = {}
        for channels in communicators:
            if rank not in (ranks := ranks_of(channels)):
                continue
            members = sorted(processes[rank] for rank in ranks)
            positions = {rank: members.index(processes[rank]) for rank in ranks}
            listed = ",".join(f"{processes[s]}-{processes[t]}" for s, t in channels)
            asked = Asked(f"channel/{listed}", tuple(members), sums=False)
            # What is posted first makes the communicator, and connects the ends of the channels.
            ends = [
                (target if sends else source, sends)
                for source, target in channels
                for sends in (True, False)
                if rank == (source if sends else target)
            ]
            warm_up = partial(_warm_up, positions=positions, ends=ends, device=device)
            lane = _Lane(groups.ask(asked, warm_up), positions)
            self._lanes.update(dict.fromkeys(channels, lane))

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
        (lane,) = {self._lanes[channel] for channel in channels}
        return [*lane.post(posts)]


@attrs.frozen(eq=False)
class _Lane:
    """A communicator, with the `positions` of ranks in it."""

    group: NcclGroup
    positions: dict[int, int]

    def post(self, posts: Sequence[Post]) -> Sequence[dist.Work]:
        own = [Post(_carried(p.tensor), self.positions[p.peer], p.sends) for p in posts]
        # One work of all, which may be waited for more than once.
        return [self.group.together(own)] * len(own)


def _warm_up(
    group: NcclGroup,
    positions: dict[int, int],
    ends: Sequence[tuple[int, bool]],
    device: torch.device,
) -> Sequence[dist.Work]:
    """Post a number at each of these ends, given by the peer and by whether it sends."""
    posts = [Post(torch.zeros(1, device=device), peer, sends) for peer, sends in ends]
    return _Lane(group, positions).post(posts)


def _carried(tensor: Tensor) -> Tensor:
    """The tensor as NCCL takes it: the same memory, as bytes if NCCL does not know the type."""
    return tensor if tensor.dtype in _TAKEN else tensor.reshape(-1).view(torch.uint8)


def batched(schedule: Schedule) -> set[frozenset[Channel]]:
    """The channels of each batch of a schedule, on whatever rank it is listed."""
    columns, transfers = schedule.columns, graph_of(schedule).transfers
    if not columns.together:
        return set()
    channels = [*zip(transfers.source.tolist(), transfers.target.tolist(), strict=True)]
    by_entry: dict[int, set[Channel]] = {}
    for places in (transfers.send, transfers.receive):
        for entry, channel in zip(columns.entry[places].tolist(), channels, strict=True):
            by_entry.setdefault(entry, set()).add(channel)
    return {frozenset(found) for found in by_entry.values()}


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
