"""A number that tells batches, and weights, apart: cheap enough to be taken at every step."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_MOST = 512  # elements of a batch's tensor that are looked at, evenly spread
_OF_A_PARAMETER = 64
_WHOLE, _READY = 1, 2  # the forms of a batch: in one, or cut into microbatches

NOTHING = 0
"""The fingerprint of what can't be compared: of no batch, or of an iterator, which is read once."""


def of_batch(batch: Any) -> int:
    """The fingerprint of a whole batch, or of a list of ready microbatches.

    Batches that were drawn apart differ, equal ones are equal on every rank. Of a tensor on a GPU
    its shape and type alone count, since the host would wait for its values.
    """
    if isinstance(batch, (Tensor, tuple, Mapping)):
        form = _WHOLE
    elif isinstance(batch, Sequence):
        form = _READY
    else:
        return NOTHING
    return of_tensors(_tensors(batch)) << 2 | form


def differ(one: int, other: int) -> bool:
    """Whether two batches are known to be different; only those of one form can be compared."""
    return one != other and NOTHING not in (one, other) and (one ^ other) & 3 == 0


def of_tensors(tensors: Iterable[Tensor]) -> int:
    """The fingerprint of some tensors, in their order."""
    found = 0
    for tensor in tensors:
        shape = hash((tensor.dtype.itemsize, *tensor.shape))  # of integers: the same everywhere
        found = zlib.crc32(shape.to_bytes(8, "little", signed=True), found)
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            found = zlib.crc32(_sample(tensor), found)
    return found


def sample_of_weights(parameters: Iterable[Tensor]) -> Tensor:
    """Some bytes of some parameters, where these are; their fingerprint is `of_sample`."""
    samples = [torch.empty(0, dtype=torch.uint8, device="cpu")]
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        samples.append(flat[:: max(1, len(flat) // _OF_A_PARAMETER)].contiguous().view(torch.uint8))
    return torch.cat(samples[1:] or samples)


def of_sample(sample: Tensor) -> int:
    """The fingerprint of what was sampled, once it is on the host."""
    return zlib.crc32(sample.numpy().tobytes()) if len(sample) else 0


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        for value in batch:
            yield from _tensors(value)


def _sample(tensor: Tensor) -> bytes:
    """Some of a tensor's elements, or all of a small one's."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.detach()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:  # numpy lacks most of these
        tensor = tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.uint8)
    values = tensor.numpy()
    if values.size > _MOST:
        flat = values.reshape(-1) if values.flags.c_contiguous else values.flat
        values = flat[:: values.size // _MOST]
    return values.tobytes()
