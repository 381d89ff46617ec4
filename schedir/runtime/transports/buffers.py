"""Buffers for sends and receives on a GPU, which are used again.

On a GPU a transport has its own streams. Memory that it has used is given out again only when the
host has seen that stream pass, but the host may be a whole step ahead of the GPU, with all that is
sent and received in a step. A buffer of the pool is free as soon as its last use is *queued*: what
is posted next waits on the GPU for everything on the rank's stream by then.

    host          RECV0 → a   F0   B0   RECV1 → a   F1        a is free once B0 has been queued
    rank's stream             F0   B0 ──┐
    transport's   RECV0 → a             └── RECV1 → a         and is filled after it

A buffer is free when nothing refers to its memory: no cell, no graph, no send under way, and not
the module, which may keep its input, or a view of it. So a tensor that the module keeps is never
overwritten. If the module uses it on its own streams, the module has to wait for these.

A tensor to send is copied into a buffer first. So the output itself can be freed at once; otherwise
its memory would be held until the host has seen the send.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from schedir.runtime.processes.groups import Post
from schedir.runtime.transports.transport import BatchPoster, Work

_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def _users(buffer: Tensor) -> tuple[int, int]:
    """The number of references to a tensor's memory: from tensors, and from Python."""
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_NOBODY = _users(torch.empty(1))


class Pool:
    """The buffers of one rank, whose stream is the one that uses them.

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
        return self._take((shape, stride, dtype))

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, in a buffer."""
        layout = tuple(tensor.shape), tensor.stride(), tensor.dtype
        return self._take(layout).copy_(tensor.detach())

    def _take(self, layout: _Layout) -> Tensor:
        self._taken.add(layout)
        buffers = self._buffers.setdefault(layout, [])
        for buffer in buffers:
            if _users(buffer) == _NOBODY:
                return _alias(buffer)
        shape, stride, dtype = layout
        buffers.append(torch.empty_strided(shape, stride, dtype=dtype, device=self.device))
        return _alias(buffers[-1])

    def trim(self) -> None:
        """After a call whose sends have arrived, drop buffers that somebody has kept, and layouts
        that were not used."""
        taken, self._taken = self._taken, set()
        self._buffers = {
            layout: _unused(buffers) for layout, buffers in self._buffers.items() if layout in taken
        }


def _alias(buffer: Tensor) -> Tensor:
    """A fresh tensor on the same memory."""
    return buffer.data


def _unused(buffers: Sequence[Tensor]) -> list[Tensor]:
    return [buffer for buffer in buffers if _users(buffer) == _NOBODY]


@attrs.frozen(eq=False)
class _UnderWay:
    """A transfer that keeps its buffer until it is waited for; a plain work might not."""

    work: Work
    buffer: Tensor

    def wait(self) -> bool:
        """Wait until it is done."""
        return self.work.wait()


@attrs.frozen(eq=False)
class FromBuffers:
    """Posts sends from buffers of a pool; tensors on the host are sent as they are."""

    poster: BatchPoster
    pool: Pool

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Post a send of a copy."""
        buffer = self._copy(tensor)
        return _UnderWay(self.poster.send(buffer, peer), buffer)

    def together(self, posts: Sequence[Post]) -> list[Work]:
        """Post several, of sends copies."""
        own = [attrs.evolve(p, tensor=self._copy(p.tensor)) if p.sends else p for p in posts]
        works = self.poster.together(own)
        return [_UnderWay(work, post.tensor) for work, post in zip(works, own, strict=True)]

    def receive(self, buffer: Tensor, peer: int) -> Work:
        """Post a receive."""
        return self.poster.receive(buffer, peer)

    def _copy(self, tensor: Tensor) -> Tensor:
        there = tensor.device.type == self.pool.device.type
        return self.pool.copy(tensor) if there else tensor
