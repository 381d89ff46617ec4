"""Moves tensors between ranks. gloo: posting never blocks, first in, first out per pair."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """A send or receive under way."""

    def wait(self) -> bool:
        """Wait until it is done."""


class GlooTransport:
    """Point-to-point transfers on a process group of their own, apart from all collectives."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send; `tensor`, contiguous, must stay untouched until the work is done."""
        work: Work = self._group.send([tensor], peer, 0)
        return work

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive into `buffer`, which must have exactly the sent tensor's size."""
        work: Work = self._group.recv([buffer], peer, 0)
        return work

    def close(self) -> None:
        """Give the process group back."""
        dist.destroy_process_group(self._group)
