"""Finds tensors that share memory, and copies those that would be changed in place.

Autograd may give two leaves views of one buffer: an input of a stage and a parameter, say, if both
are summands of the same shape. The next backward adds to the parameter's `.grad` in place, while
the other gradient may still wait to be sent, or to be used by the neighbouring stage.

After a boundary every tensor has its own memory. In one piece with the stages before, a stage that
changes a tensor in place would also change the tensors that share its memory there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor, nn


@attrs.frozen
class Aliases:
    """The tensors of a boundary that are aliases, so that changing them in place has effects.

    `kept` are the numbers of tensors in the memory of a module before the boundary: a buffer, or a
    hidden state. `pairs` are tensors that share memory with each other.
    """

    kept: frozenset[int] = frozenset()
    pairs: frozenset[tuple[int, int]] = frozenset()

    def forbid(self, changed: Iterable[int]) -> str | None:
        """Why the tensors of these numbers must not be changed in place; None if they may."""
        for number in changed:
            if number in self.kept:
                return (
                    f"the stage changes tensor {number} of its input in place, whose memory a "
                    "stage before keeps for itself; after the boundary it is a copy, so change a "
                    "copy (clone()) instead"
                )
            for pair in sorted(self.pairs):
                if number in pair:
                    (other,) = {*pair} - {number}
                    return (
                        f"the stage changes tensor {number} of its input in place, which shares "
                        f"memory with tensor {other} in the stage before; after the boundary they "
                        "are two tensors: return only one of them, or a copy (clone()) of it"
                    )
        return None


NO_ALIASES = Aliases()


@attrs.frozen
class Sharing:
    """The owners of the memory of a stage's outputs, by the outputs' numbers.

    `kept` are in the module's memory, `lent` in the user's. `passed` pairs outputs with inputs that
    they share memory with, `pairs` outputs with each other.
    """

    kept: frozenset[int] = frozenset()
    lent: frozenset[int] = frozenset()
    passed: frozenset[tuple[int, int]] = frozenset()
    pairs: frozenset[tuple[int, int]] = frozenset()

    @property
    def changeable(self) -> frozenset[int]:
        """The outputs that may be changed before the next stage has used them."""
        return self.kept | self.lent

    def aliases_after(self, before: Aliases) -> Aliases:
        """The aliases among the outputs, if those among the inputs are `before`."""
        return Aliases(
            self.kept | {output for output, given in self.passed if given in before.kept},
            self.pairs
            | {
                (one, other)
                for one, i in self.passed
                for other, j in self.passed
                if one < other and tuple(sorted((i, j))) in before.pairs
            },
        )


def sharing(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    held: Iterable[Tensor],
    lent: Iterable[Tensor],
) -> Sharing:
    """Whose memory the outputs of a module are."""
    of_module, of_user = set(map(_storage, held)), set(map(_storage, lent))
    numbered = list(enumerate(map(_storage, outputs)))
    return Sharing(
        frozenset(o for o, storage in numbered if storage in of_module),
        frozenset(o for o, storage in numbered if storage in of_user),
        frozenset(
            (o, i)
            for o, storage in numbered
            for i, given in enumerate(inputs)
            if storage == _storage(given)
        ),
        frozenset(
            (o, other)
            for o, one in numbered
            for other, same in numbered
            if o < other and one == same
        ),
    )


def _storage(tensor: Tensor) -> int:
    try:
        storage: int = tensor.untyped_storage()._cdata
    except NotImplementedError:  # a sparse one has none
        return id(tensor)
    return storage


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
        held = tensor.untyped_storage()
        storage: int = held.data_ptr() or held._cdata  # one without memory is that of no other
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


def keep_apart(parameters: Sequence[nn.Parameter], others: Sequence[Tensor | None]) -> None:
    """Copy each parameter's gradient that shares memory with another tensor or gradient."""
    seen, number = set(), 0
    try:  # nearly always each has a storage of its own: a look at every step
        for parameter in parameters:
            if parameter.grad is not None:
                seen.add(parameter.grad.untyped_storage()._cdata)
                number += 1
        for tensor in others:
            if tensor is not None:
                seen.add(tensor.untyped_storage()._cdata)
                number += 1
        if len(seen) == number:
            return
    except NotImplementedError:  # a sparse one has none
        pass
    occupied = Occupied(others)
    for parameter in parameters:
        if parameter.grad is not None and occupied.add(parameter.grad):
            parameter.grad = parameter.grad.clone()


def _range(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
