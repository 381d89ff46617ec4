"""The memory of tensors: which of them share it, and how saved ones move to other memory.

Autograd may give two leaves views of one buffer: an input of a stage and a parameter, say, if both
are summands of the same shape. The next backward adds to the parameter's `.grad` in place, while
the other gradient may still wait to be sent, or to be used by the neighbouring stage.

After a boundary every tensor has its own memory. In one piece with the stages before, a stage that
changes a tensor in place would also change the tensors that share its memory there.

Autograd gets a `Held` for each tensor that a forward saves for its backward, and returns it in the
backward to ask for the tensor:

    F         ── Held ── tensor
    OFFLOAD   ── Held ── its layout        the tensor is gone, unless others have it
    RELOAD    ── Held ── tensor            in new memory

Only autograd holds these objects, so a backward frees them as usual.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import TypeGuard
from weakref import ref

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from schedir.errors import ExecutionError
from schedir.runtime.accelerator import Mark


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


def sharing(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    held: Iterable[Tensor],
    lent: Iterable[Tensor],
    before: Aliases,
) -> tuple[frozenset[int], Aliases]:
    """The outputs of a module that may be changed before the next stage has used them, because
    their memory is `held` by the module or `lent` by the user; and the aliases among the outputs,
    if those among the inputs are `before`."""
    of_module, of_user = storages(held), storages(lent)
    given = [storages([tensor]) for tensor in inputs]
    own = [storages([tensor]) for tensor in outputs]
    kept = {o for o, memory in enumerate(own) if memory & of_module}
    changeable = kept.union(o for o, memory in enumerate(own) if memory & of_user)
    # The inputs whose memory each output has.
    passed = [{i for i, theirs in enumerate(given) if memory & theirs} for memory in own]

    def shared(o: int, other: int) -> bool:
        return bool(own[o] & own[other]) or any(
            (min(i, j), max(i, j)) in before.pairs for i in passed[o] for j in passed[other]
        )

    return frozenset(changeable), Aliases(
        frozenset(kept.union(o for o, numbers in enumerate(passed) if numbers & before.kept)),
        frozenset(pair for pair in combinations(range(len(own)), 2) if shared(*pair)),
    )


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """The storages that hold the elements of the tensors, by their identities."""
    return {part.untyped_storage()._cdata for tensor in tensors for part in plain_parts(tensor)}


class Occupied:
    """The memory that some tensors take, each with what lies between its first and last byte."""

    def __init__(self, tensors: Iterable[Tensor | None] = ()) -> None:
        self._outlines: dict[int, list[NDArray[np.void]]] = {}
        for tensor in tensors:
            if tensor is not None:
                self.add(tensor)

    def add(self, tensor: Tensor) -> bool:
        """Take the tensor's memory; says whether another one has taken a part of it before."""
        overlaps = False
        for part in plain_parts(tensor):
            if part.numel():
                held = part.untyped_storage()
                storage: int = held.data_ptr() or held._cdata  # of meta tensors there is no address
                outline, taken = _outline(part), self._outlines.setdefault(storage, [])
                overlaps |= any(np.may_share_memory(outline, other) for other in taken)
                taken.append(outline)
        return overlaps


def any_shared(tensors: Iterable[Tensor]) -> bool:
    """Whether two of them share memory."""
    occupied = Occupied()
    return any(occupied.add(tensor) for tensor in tensors)


def keep_apart(parameters: Sequence[nn.Parameter], others: Sequence[Tensor | None]) -> None:
    """Copy each parameter's gradient that shares memory with another tensor or gradient."""
    tensors = [p.grad for p in parameters if p.grad is not None]
    tensors += [tensor for tensor in others if tensor is not None]
    apart = len({tensor.untyped_storage()._cdata for tensor in filter(is_plain, tensors)})
    if apart == len(tensors):  # nearly always each is plain, and has a storage of its own
        return
    occupied = Occupied(others)
    for parameter in parameters:
        if parameter.grad is not None and occupied.add(parameter.grad):
            parameter.grad = parameter.grad.clone()


@attrs.frozen(eq=False)
class Owned:
    """A tensor that a stage holds, or a plain part of one. `trained` if training changes it: a
    parameter, or the running statistics of a normalisation."""

    stage: int
    name: str
    tensor: Tensor
    trained: bool


def shared_memory(
    stages: Mapping[int, nn.Module], known: Collection[int] = ()
) -> tuple[Owned, Owned] | None:
    """Find two tensors of different stages that overlap in memory, one of them trained; or None.

    Tensors whose ids are `known` may be shared. Parts of one tensor that do not overlap are not
    shared, such as the views of a flat buffer of all weights.
    """
    by_storage: dict[int, list[tuple[Owned, NDArray[np.void]]]] = defaultdict(list)
    for stage, module in sorted(stages.items()):
        for owned in _owned(stage, module, known):
            outline = _outline(owned.tensor)
            for other, taken in (others := by_storage[owned.tensor.untyped_storage().data_ptr()]):
                concerned = other.stage != stage and (other.trained or owned.trained)
                # The columns of a matrix interleave, and do not overlap.
                if concerned and np.shares_memory(outline, taken):
                    return other, owned
            others.append((owned, outline))
    return None


def _owned(stage: int, module: nn.Module, known: Collection[int]) -> Iterator[Owned]:
    """The tensors of a stage: parameters, buffers, and those in other attributes of modules."""
    seen: set[tuple[int, bool]] = set()
    for path, part in module.named_modules():
        before = f"{path}." if path else ""
        statistics = isinstance(part, _NormBase)
        for name, tensor in _tensors_of(part):
            trained = name in part._parameters or (statistics and name in part._buffers)
            key = id(tensor), trained  # alive as long as the module is
            if key in seen or id(tensor) in known or is_lazy(tensor):
                continue
            seen.add(key)
            for plain in filter(_has_memory, plain_parts(tensor)):
                yield Owned(stage, before + name, plain, trained)


def _tensors_of(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for registered in (part._parameters, part._buffers):
        yield from ((name, tensor) for name, tensor in registered.items() if tensor is not None)
    for name, value in vars(part).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from _tensors_in(name, value, depth=3)


def _tensors_in(name: str, value: object, depth: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an attribute that torch does not register: also in lists, tuples, dicts, and
    modules inside of these."""
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
    """Whether a plain tensor has an address: not one on the device meta, or a fake one."""
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:
        return False


def _outline(tensor: Tensor) -> NDArray[np.void]:
    """An array at the place of a plain tensor, to compare with others; it is not to be read."""
    size = tensor.element_size()
    at = {
        "version": 3,
        "typestr": f"|V{size}",
        "shape": tuple(tensor.shape),
        "strides": tuple(size * step for step in tensor.stride()),
        "data": (1 + tensor.data_ptr(), True),  # numpy takes no address 0, which is that of meta
    }
    return np.asarray(SimpleNamespace(__array_interface__=at))


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The parts of a tensor that have memory: the tensor itself, or the tensors inside a sparse one
    or a wrapper subclass. Other layouts are unknown, and count as nothing."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        parts = (getattr(tensor, name) for name in flatten()[0])
        for part in parts:
            if isinstance(part, Tensor):
                yield from plain_parts(part)
    elif tensor.layout is torch.strided:
        yield tensor
    else:
        for part in _PARTS.get(tensor.layout, ()):
            yield part(tensor)


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether it is a plain tensor with memory, and not one that wraps others."""
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter)
        and (value.layout is torch.strided and not value.is_quantized)
    )


_BY_ROW = Tensor.crow_indices, Tensor.col_indices, Tensor.values
_BY_COLUMN = Tensor.ccol_indices, Tensor.row_indices, Tensor.values
_PARTS: Mapping[torch.layout, Sequence[Callable[[Tensor], Tensor]]] = {
    torch.sparse_coo: (Tensor._indices, Tensor._values),
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
}


@attrs.define(eq=False)
class Held:
    """A tensor that autograd has saved, with its version at that time. While it is away, it has a
    `layout` in place of the tensor; once released, neither."""

    tensor: Tensor | None
    version: int
    layout: tuple[torch.dtype, torch.Size, tuple[int, ...], int] | None = None

    def leave(self) -> None:
        """Forget the tensor, but for its layout."""
        tensor = self.tensor
        assert tensor is not None  # asked of what is there
        self.layout = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        self.tensor = None

    def come_back(self, memory: Tensor) -> None:
        """Have the tensor again, in other memory, given as bytes."""
        assert self.layout is not None  # asked of what is away
        dtype, shape, stride, offset = self.layout
        self.tensor = memory.view(dtype).as_strided(shape, stride, offset)
        self.version, self.layout = self.tensor._version, None

    def release(self) -> None:
        """Forget it: no backward will come for it."""
        self.tensor = self.layout = None


@attrs.define(eq=False)
class Saved:
    """The tensors that the forward of one (stage, microbatch) has saved.

    `away` are copies on the host, each with the saved tensors that share its memory; `memories` is
    the memory that they have come back to, valid after `arrived`.
    """

    _held: list[ref[Held]] = attrs.field(factory=list)
    away: list[tuple[Tensor, list[Held]]] = attrs.field(factory=list)
    memories: list[Tensor] = attrs.field(factory=list)
    arrived: Mark | None = None

    def hooks(self) -> saved_tensors_hooks:
        """Take in what is saved inside."""
        return saved_tensors_hooks(self._pack, unpacked)

    def _pack(self, tensor: Tensor) -> Held:
        # By an output itself autograd would hold itself; a leaf unpacks to itself.
        is_leaf = tensor.is_leaf and tensor.requires_grad
        held = Held(tensor if is_leaf else tensor.detach(), tensor._version)
        self._held.append(ref(held))
        return held

    def tensors(self) -> list[Tensor]:
        """Those that a backward may still ask for, and that are here."""
        return [held.tensor for held in self._alive() if held.tensor is not None]

    def movable(self, others: Iterable[object], device: torch.device) -> list[list[Held]]:
        """What can be moved from a device, by the memory that it shares: all tensors of that go
        together, or it would not be free. Not that of `others`, nor what has been changed since."""
        stay = {t.untyped_storage()._cdata for t in others if is_plain(t)}
        found: dict[int, list[Held]] = {}
        for held in self._alive():
            tensor = held.tensor
            if tensor is None or not is_plain(tensor):
                continue
            memory = tensor.untyped_storage()
            found.setdefault(memory._cdata, []).append(held)
            if (
                (tensor.device.type != device.type or not memory.nbytes())
                or (memory.nbytes() % tensor.element_size() or tensor.is_conj() or tensor.is_neg())
                or tensor._version != held.version
            ):
                stay.add(memory._cdata)
        return [each for memory, each in found.items() if memory not in stay]

    def _alive(self) -> Iterator[Held]:
        for at in self._held:
            held = at()
            if held is not None:
                yield held


def unpacked(held: Held) -> Tensor:
    """What was saved. Raises ExecutionError where that is away, RuntimeError where it is gone or,
    as torch does but not where hooks have it, where it has changed since."""
    tensor = held.tensor
    if tensor is None and held.layout is None:
        raise RuntimeError("the backward of the inputs has been here, and freed what was saved")
    if tensor is None:
        raise ExecutionError(
            "a backward asks for what an OFFLOAD has moved to the host: only the one that a RELOAD "
            "is listed for may"
        )
    if tensor._version != held.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {list(tensor.shape)} of {tensor.dtype} is at version {tensor._version}; "
            f"expected version {held.version} instead"
        )
    return tensor
