"""Which tensors share memory, and how those that are added to in place get memory of their own.

Autograd gives two leaves views of one buffer where both are summands of the same shape: an input of
a stage and a parameter, say. The next backward adds to the parameter's `.grad` in place, while the
other gradient may still wait to be sent, or to be used by the neighbouring stage.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Occupied:
    """The memory that some tensors take."""

    def __init__(self, tensors: Iterable[Tensor | None] = ()) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        for tensor in tensors:
            if tensor is not None:
                self.add(tensor)

    def add(self, tensor: Tensor) -> bool:
        """Take the tensor's memory; says whether another one has taken a part of it before."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return False
        storage = tensor.untyped_storage().data_ptr()
        own = _range(tensor)
        taken = self._ranges.get(storage)
        if taken is None:
            self._ranges[storage] = [own]
            return False
        overlaps = any(own[0] < end and start < own[1] for start, end in taken)
        taken.append(own)
        return overlaps


def any_shared(tensors: Iterable[Tensor]) -> bool:
    """Whether two of them share memory."""
    occupied = Occupied()
    return any(occupied.add(tensor) for tensor in tensors)


def keep_apart(parameters: Iterable[nn.Parameter], occupied: Occupied) -> None:
    """Copy each parameter's gradient that shares memory with what is taken, or with another's."""
    for parameter in parameters:
        if parameter.grad is not None and occupied.add(parameter.grad):
            parameter.grad = parameter.grad.clone()


def _range(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
