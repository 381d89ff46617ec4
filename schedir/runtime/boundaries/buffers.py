"""What receives go into on a device that queues: buffers that are used again.

There a transfer has a stream of its own. The memory of a buffer that is freed goes to nobody before
the host has seen that stream come past, and the host may be a whole step ahead of the device, with
all the buffers of a step. One that is used again is free as soon as its last use is *queued*: what
is posted waits on the device for what the rank's stream holds by then.

    host          RECV0 → a   F0   B0   RECV1 → a   F1        a is free once B0 has been queued
    rank's stream             F0   B0 ──┐
    transport's   RECV0 → a             └── RECV1 → a         and is filled after it

A buffer is free when nothing refers to its memory: no cell, no graph, no send under way, and not
the module, which may keep what it was given, or a view of it. So what it keeps is never filled
again; what it does with it on streams of its own, it has to wait for itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from schedir.runtime.boundaries.boundary import TensorMeta, empty

_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def _users(buffer: Tensor) -> tuple[int, int]:
    """How many refer to its memory: tensors, and Python."""
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_NOBODY = _users(torch.empty(1))


class Pool:
    """The buffers of one rank, whose stream is the one that uses them.

    There come to be as many of each layout as are in use at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[_Layout, list[Tensor]] = {}
        self._taken: set[_Layout] = set()

    def take(self, meta: TensorMeta) -> Tensor:
        """A buffer for a tensor to come; it is given back by forgetting it."""
        layout = meta.shape, meta.stride, meta.dtype
        self._taken.add(layout)
        buffers = self._buffers.setdefault(layout, [])
        for buffer in buffers:
            if _users(buffer) == _NOBODY:
                return _alias(buffer)
        buffers.append(empty(meta, self._device))
        return _alias(buffers[-1])

    def trim(self) -> None:
        """Let go of what somebody has kept, and of layouts that were not asked for: a call is
        over."""
        taken, self._taken = self._taken, set()
        self._buffers = {
            layout: _unused(buffers) for layout, buffers in self._buffers.items() if layout in taken
        }


def _alias(buffer: Tensor) -> Tensor:
    """The same memory, as a tensor that nothing has been done to."""
    return buffer.data


def _unused(buffers: Sequence[Tensor]) -> list[Tensor]:
    return [buffer for buffer in buffers if _users(buffer) == _NOBODY]
