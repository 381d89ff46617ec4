"""A number that tells batches, and weights, apart: cheap enough to be taken at every step."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_BLOCK = 2048  # words of 8 bytes of a batch's tensor that are summed up in one
_BLOCKS = 256  # that are looked at, 4 MiB of them: all of most batches
_WEIGHTS = np.random.Generator(np.random.PCG64(0)).integers(1 << 62, size=_BLOCK) * 2 + 1
_OF_A_PARAMETER = 64
_WHOLE, _READY = 1, 2  # the forms of a batch: in one, or cut into microbatches

NOTHING = 0
"""The fingerprint of what can't be compared: of no batch, or of an iterator, which is read once."""


def of_batch(batch: Any) -> int:
    """The fingerprint of a whole batch, or of a list of ready microbatches.

    Equal batches are equal on every rank, others differ: by all of their values up to 4 MiB of a
    tensor, by as much of a larger one. Of one on a GPU the shape and type alone count, since the
    host would wait for its values.
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
    else:  # a container that was made known to torch, or no tensor at all
        for leaf in pytree.tree_leaves(batch):
            if leaf is not batch:
                yield from _tensors(leaf)


def _sample(tensor: Tensor) -> bytes:
    """What a tensor's elements are in few bytes: all, or weighed sums of blocks and the rest.

    Of a block any word that changes changes the sum, as its weight is odd. A few elements here and
    there would tell too little: padded ids, images in a border and one-hot rows are mostly zeros.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.detach()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:  # numpy lacks most of these
        tensor = tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.uint8)
    values = tensor.numpy()
    size = _BLOCK * _WEIGHTS.itemsize // values.itemsize  # of a block, in elements
    number = values.size // size
    if number <= _BLOCKS:
        flat: Any = np.ascontiguousarray(values).reshape(-1)
        blocks = flat[: number * size]
    else:  # one somewhere in each stretch: none at the same place of every image
        stretch = number // _BLOCKS
        starts = (np.arange(_BLOCKS) * stretch + _WEIGHTS[:_BLOCKS] % stretch) * size
        flat = values.reshape(-1) if values.flags.c_contiguous else values.flat  # never copied
        blocks = np.concatenate([flat[start : start + size] for start in starts])
    sums = blocks.view(np.int64).reshape(-1, _BLOCK) @ _WEIGHTS
    return bytes(sums.tobytes() + flat[number * size :].tobytes())
