"""Parameters and running statistics that lie in the memory of another stage as well.

A stage trains its own. One that several stages reach would be stepped by each of them, or get the
gradients of one alone; on processes of their own they would part without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import attrs
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy


@attrs.frozen(eq=False)
class Held:
    """A tensor as one stage holds it; `trained` where that makes another one of it: a parameter, or
    the running statistics of a normalisation."""

    stage: int
    name: str
    tensor: Tensor
    trained: bool

    @property
    def first(self) -> int:
        """The first byte that it takes in."""
        return self.tensor.data_ptr()

    @property
    def end(self) -> int:
        """The byte behind its last one."""
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps)
        return self.first + extent * self.tensor.itemsize


def shared_memory(
    stages: Mapping[int, nn.Module], known: Collection[int] = ()
) -> tuple[Held, Held] | None:
    """Two tensors of different stages, of which one is trained, in the same memory; None for none.

    Tensors whose ids are `known` may be shared. Parts of one tensor that do not overlap are apart,
    as those of a flat buffer of all weights.
    """
    by_storage: dict[int, list[Held]] = defaultdict(list)
    for stage, module in sorted(stages.items()):
        for held in _held(stage, module):
            if id(held.tensor) in known:
                continue
            for other in (others := by_storage[held.tensor.untyped_storage().data_ptr()]):
                concerned = other.stage != stage and (other.trained or held.trained)
                if concerned and _overlap(other, held):
                    return other, held
            others.append(held)
    return None


def _held(stage: int, module: nn.Module) -> Iterator[Held]:
    """What a stage holds: as parameters and buffers, and in other attributes of its modules."""
    seen: set[tuple[int, bool]] = set()
    for path, part in module.named_modules():
        before = f"{path}." if path else ""
        statistics = isinstance(part, _NormBase)
        for name, tensor in _tensors_of(part):
            trained = name in part._parameters or (statistics and name in part._buffers)
            key = id(tensor), trained  # alive as long as the module is
            if key not in seen and _has_memory(tensor):
                seen.add(key)
                yield Held(stage, before + name, tensor, trained)


def _tensors_of(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for registered in (part._parameters, part._buffers):
        yield from ((name, tensor) for name, tensor in registered.items() if tensor is not None)
    for name, value in vars(part).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from _tensors_in(name, value, depth=3)


def _tensors_in(name: str, value: object, depth: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an attribute that torch does not know of: in lists, tuples and dicts too, and
    those of modules in there."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{name}.{inner}", tensor
    elif isinstance(value, (list, tuple, dict)) and depth:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from _tensors_in(f"{name}[{key!r}]", entry, depth - 1)


def _has_memory(tensor: Tensor) -> bool:
    """Whether it lies in memory that can be compared: a lazy, sparse or meta tensor does not."""
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return False
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a subclass that wraps others
        return False


def _overlap(one: Held, other: Held) -> bool:
    """Whether two tensors of one storage have an element in common."""
    if one.end <= other.first or other.end <= one.first:
        return False
    if one.tensor.is_contiguous() and other.tensor.is_contiguous():
        return True
    # Columns of one matrix lie between each other: mark the bytes of the one, and look for them.
    first, end = min(one.first, other.first), max(one.end, other.end)
    marks = torch.zeros(end - first, dtype=torch.bool, device="cpu")
    _bytes(marks, one, first).fill_(True)
    return bool(_bytes(marks, other, first).any())


def _bytes(marks: Tensor, held: Held, first: int) -> Tensor:
    """The marks of the bytes that a tensor takes in; `first` is the byte of the first mark."""
    tensor, size = held.tensor, held.tensor.itemsize
    strides = [stride * size for stride in tensor.stride()]
    return marks.as_strided([*tensor.shape, size], [*strides, 1], held.first - first)
