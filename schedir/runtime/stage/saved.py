"""The tensors that a forward saves for its backward, which can be moved to other memory.

Autograd gets a `Held` for each tensor that it saves, and returns it in the backward to ask for the
tensor:

    F         ── Held ── tensor
    OFFLOAD   ── Held ── its layout        the tensor is gone, unless others have it
    RELOAD    ── Held ── tensor            in new memory

Only autograd holds these objects, so a backward frees them as usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import ref

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from schedir.errors import ExecutionError
from schedir.runtime.accelerator import Mark
from schedir.runtime.memory import is_plain


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


class Saved:
    """The tensors that the forward of one (stage, microbatch) has saved.

    `away` are copies on the host, each with the saved tensors that share its memory; `memories` is
    the memory that they have come back to, valid after `arrived`.
    """

    def __init__(self) -> None:
        self._held: list[ref[Held]] = []
        self.away: list[tuple[Tensor, list[Held]]] = []
        self.memories: list[Tensor] = []
        self.arrived: Mark | None = None

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
