"""Moves tensors between GPUs: one communicator and one stream for each directed pair of ranks.

NCCL has no tags, and matches the transfers of two ranks in order. Both directions of a pair on one
communicator would deadlock above some undefined size, unless they are posted as one. A transfer
waits on the GPU for the compute that was queued before it, and compute waits for the transfer by an
event. The host never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from schedir.runtime.processes.groups import Asked, Groups, NcclGroup, Post
from schedir.runtime.transports.communicators import Channel, ranks_of
from schedir.runtime.transports.transport import Work

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


class NcclTransport:
    """Transfers between the processes of a pipeline; `processes[rank]` runs a rank.

    `communicators` has the channels of each communicator, all channels of the schedule. `groups` is
    asked for them, and has them once it has connected. A single transfer is posted as a batch of
    one: other ranks may post their end of it in a batch, and the work of a batch keeps no tensor
    alive while somebody watches it.
    """

    channel: ClassVar[str] = "rank"  # CUDA promises no two streams progress of their own
    laxest: ClassVar[str] = "edge"
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

    def tagged(self, tag: int) -> NcclTransport:
        """NCCL has no tags: what is posted in order meets in order."""
        return self

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send, after the compute that is queued."""
        return self._lanes[self._rank, peer].post([Post(tensor, peer, sends=True)])[0]

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive; waiting for it has the compute that is queued next wait."""
        return self._lanes[peer, self._rank].post([Post(buffer, peer, sends=False)])[0]

    def together(self, posts: Sequence[Post]) -> list[Work]:
        """Post several as one, on the communicator that their channels share."""
        (lane,) = {self._lane(post) for post in posts}
        return [*lane.post(posts)]

    def _lane(self, post: Post) -> _Lane:
        return self._lanes[(self._rank, post.peer) if post.sends else (post.peer, self._rank)]


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
