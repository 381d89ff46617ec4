"""Moves tensors between GPUs: one communicator and one stream for each directed pair of ranks.

NCCL has no tags and matches what two ranks post in order; both directions of a pair on one
communicator would deadlock past an undefined size. A transfer waits on the GPU for the compute
that was queued before it, and compute waits for it by an event: the host never does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from schedir.runtime.processes.groups import Group, Groups
from schedir.runtime.transports.transport import Work


class NcclTransport:
    """Between the processes of a pipeline, of which `processes[rank]` runs a rank.

    `channels` are the pairs (source, target) of ranks that send to each other.
    """

    channel: ClassVar[str] = "rank"  # CUDA promises no two streams progress of their own
    early: ClassVar[bool] = False  # the host would have to wait for what it then learns

    def __init__(
        self,
        processes: Sequence[int],
        rank: int,
        channels: Iterable[tuple[int, int]],
        device: torch.device,
        groups: Groups,
    ) -> None:
        self._groups: dict[tuple[int, int], Group] = {}
        self._rank = rank
        self._number = {peer: processes[peer] > processes[rank] for peer in range(len(processes))}
        # In one order on all ranks: communicators that are made in another one wait on each other.
        for source, target in sorted(channels):
            if rank not in (source, target):
                continue
            pair = sorted((processes[source], processes[target]))
            purpose = f"channel/{processes[source]}-{processes[target]}"
            self._groups[source, target] = groups.make(purpose, pair, device)
            # The first transfer makes the communicator.
            warm = torch.zeros(1, device=device)
            if rank == source:
                self.send(warm, target).wait()
            else:
                self.receive(warm, source).wait()
            torch.cuda.synchronize(device)

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send, after the compute that is queued."""
        work: Work = self._groups[self._rank, peer].send([tensor], int(self._number[peer]), 0)
        return work

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive; waiting for it has the compute that is queued next wait."""
        work: Work = self._groups[peer, self._rank].recv([buffer], int(self._number[peer]), 0)
        return work
