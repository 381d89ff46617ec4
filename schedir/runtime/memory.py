"""The memory of tensors: which of them share it, and how saved ones move to other memory.

Autograd may give two leaves views of one buffer: an input of a stage and a parameter, say, if both
are summands of the same shape. The next backward adds to the parameter's `.grad` in place, while
the other gradient may still wait to be sent, or to be used by the neighbouring stage.

After a boundary every tensor has its own memory. In one piece with the stages before, a stage that
changes a tensor in place would also change the tensors that share its memory there.

Autograd gets a `Held` for each tensor that a forward saves for its backward, and returns it in the
backward to ask for the tensor:

    F         ── Held ── tensor
    OFFLOAD   ── Held ── its copy          the tensor is gone, unless others have it
    RELOAD    ── Held ── tensor            in new memory

Only autograd holds these objects, so a backward frees them as usual.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeGuard
from weakref import ref

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError
from schedir.runtime.accelerator import Mark

Aliases: TypeAlias = Mapping[int, frozenset[int | None]]
"""The tensors of a boundary, by number, that changing in place has effects beyond: the others that
each shares memory with, and None if a module before the boundary keeps its memory, as a buffer or
a hidden state."""


def refuse_changes(changed: Iterable[int], aliases: Aliases) -> None:
    """Raise ExecutionError if one of the inputs that a stage changes in place is an alias."""
    for number in sorted(aliases.keys() & {*changed}):
        if None in aliases[number]:
            raise ExecutionError(
                f"the stage changes tensor {number} of its input in place, whose memory a stage "
                "before keeps for itself; after the boundary it is a copy, so change a copy "
                "(clone()) instead"
            )
        other = min(n for n in aliases[number] if n is not None)
        raise ExecutionError(
            f"the stage changes tensor {number} of its input in place, which shares memory with "
            f"tensor {other} in the stage before; after the boundary they are two tensors: "
            "return only one of them, or a copy (clone()) of it"
        )


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
    # The inputs whose memory each output has.
    passed = [{i for i, theirs in enumerate(given) if memory & theirs} for memory in own]
    after: dict[int, frozenset[int | None]] = {}
    for o, memory in enumerate(own):
        aliases = {alias for i in passed[o] for alias in before.get(i, ())}
        kept = {None} if memory & of_module else aliases & {None}
        others = {p for p in range(len(own)) if memory & own[p] or aliases & passed[p]}
        if found := kept | others - {o}:
            after[o] = frozenset(found)
    changeable = (o for o, memory in enumerate(own) if memory & (of_module | of_user))
    return frozenset(changeable), after


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """The storages that hold the elements of the tensors, by their identities."""
    return {part.untyped_storage()._cdata for tensor in tensors for part in plain_parts(tensor)}


class Occupied:
    """The memory that some tensors take, each for its owner."""

    def __init__(self, tensors: Iterable[Tensor | None] = ()) -> None:
        self._taken: defaultdict[int, list[tuple[NDArray[np.void], Any]]] = defaultdict(list)
        for tensor in tensors:
            if tensor is not None:
                self.add(tensor)

    def add(self, tensor: Tensor, owner: object = None) -> list[Any]:
        """Take the tensor's memory for its owner; gives the owners who have a part of it.

        The columns of a matrix interleave, and do not overlap.
        """
        owners: list[Any] = []
        for part in plain_parts(tensor):
            if part.numel():
                memory = part.untyped_storage()
                # Of meta tensors there is no address.
                taken = self._taken[memory.data_ptr() or memory._cdata]
                outline = _outline(part)
                owners += [own for other, own in taken if np.shares_memory(outline, other)]
                taken.append((outline, owner))
        return owners


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
    occupied = Occupied()
    for stage, module in sorted(stages.items()):
        for owned in _owned(stage, module, known):
            for other in occupied.add(owned.tensor, owned):
                if other.stage != stage and (other.trained or owned.trained):
                    return other, owned
    return None


def _owned(stage: int, module: nn.Module, known: Collection[int]) -> Iterator[Owned]:
    """The tensors of a stage: parameters, buffers, and those in other attributes of modules."""
    seen: set[tuple[int, bool]] = set()
    for path, part in module.named_modules():
        before = f"{path}." if path else ""
        statistics = part._buffers if isinstance(part, _NormBase) else ()
        for attribute, value in attributes(part).items():
            trained = attribute in part._parameters or attribute in statistics
            for name, tensor in _tensors_in(attribute, value):
                key = id(tensor), trained  # alive as long as the module is
                if key in seen or id(tensor) in known or is_lazy(tensor):
                    continue
                seen.add(key)
                for plain in filter(_has_memory, plain_parts(tensor)):
                    yield Owned(stage, before + name, plain, trained)


INTERNAL = frozenset(vars(nn.Module()))
"""The attributes that every module has; all else is its own."""


def attributes(part: nn.Module) -> dict[str, Any]:
    """What a module holds itself, by name: parameters, buffers, and attributes of its own."""
    own = {name: value for name, value in vars(part).items() if name not in INTERNAL}
    return {**part._parameters, **part._buffers, **own}


def _tensors_in(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an attribute: also in lists, tuples, dicts, and modules inside of these."""
    for path, leaf in pytree.tree_leaves_with_path(value):
        at = name + pytree.keystr(path)
        if isinstance(leaf, Tensor):
            yield at, leaf
        elif isinstance(leaf, nn.Module):
            for inner, tensor in (*leaf.named_parameters(), *leaf.named_buffers()):
                yield f"{at}.{inner}", tensor


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
    """A tensor that autograd has saved, with its version at that time; None once no backward will
    come for it. While it is `away`, it is on the host."""

    tensor: Tensor | None
    version: int
    away: bool = False

    def move(self, memory: Tensor, away: bool) -> None:
        """Have the tensor in other memory, given as bytes."""
        old = self.tensor
        assert old is not None  # asked of what a backward may still ask for
        moved = memory.view(old.dtype).as_strided(old.shape, old.stride(), old.storage_offset())
        self.tensor, self.version, self.away = moved, moved._version, away


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

    def here(self) -> Iterator[tuple[Held, Tensor]]:
        """What a backward may still ask for, and is not away."""
        for held in filter(None, (at() for at in self._held)):
            if held.tensor is not None and not held.away:
                yield held, held.tensor

    def movable(self, others: Iterable[object], device: torch.device) -> list[list[Held]]:
        """What can be moved from a device, by the memory that it shares: all tensors of that go
        together, or it would not be free. Not that of `others`, nor what has been changed since."""
        stay = {t.untyped_storage()._cdata for t in others if is_plain(t)}
        found: defaultdict[int, list[Held]] = defaultdict(list)
        for held, tensor in self.here():
            if not is_plain(tensor):
                continue
            memory = tensor.untyped_storage()
            found[memory._cdata].append(held)
            if (
                (tensor.device.type != device.type or not memory.nbytes())
                or (memory.nbytes() % tensor.element_size() or tensor.is_conj() or tensor.is_neg())
                or tensor._version != held.version
            ):
                stay.add(memory._cdata)
        return [each for memory, each in found.items() if memory not in stay]


def unpacked(held: Held) -> Tensor:
    """What was saved. Raises ExecutionError where that is away, RuntimeError where it is gone or,
    as torch does but not where hooks have it, where it has changed since."""
    tensor = held.tensor
    if tensor is None:
        raise RuntimeError("the backward of the inputs has been here, and freed what was saved")
    if held.away:
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
