"""What crosses each boundary, found without running a user's module on real data.

A stage's module runs once on fake tensors (FakeTensorMode), with its real parameters, under the
active autocast and without hooks: shapes and types come out, no value is computed and no buffer
changes. Running it on uninitialised memory instead would poison BatchNorm's statistics and index
embeddings out of range.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError
from schedir.runtime.microbatches import Microbatch


@attrs.frozen
class TensorMeta:
    """What is known of a tensor that crosses a boundary before it does.

    `stride` is the layout that it arrives in: the sender's own where that is dense (channels last,
    say, or transposed), since kernels round differently for another one, and else the nearest.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        grad = ", requires grad" if self.requires_grad else ""
        return f"{name}{list(self.shape)}{grad}"


Boundary: TypeAlias = tuple[TensorMeta, ...]
"""The tensors that one microbatch sends across one boundary."""

Declared: TypeAlias = Tensor | Sequence[Tensor]


def meta_of(tensor: Tensor) -> TensorMeta:
    """A tensor's metadata."""
    dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
    return TensorMeta(
        tuple(tensor.shape), tuple(dense.stride()), tensor.dtype, tensor.requires_grad
    )


def empty(meta: TensorMeta, device: torch.device) -> Tensor:
    """A buffer for a tensor to come."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


def payload(tensor: Tensor, meta: TensorMeta) -> Tensor:
    """The tensor's elements as they lie in memory in the agreed layout, one-dimensional.

    Of a buffer made by `empty` it is a view; a tensor in another layout is copied.
    """
    tensor = tensor.detach()
    if tensor.stride() != meta.stride:
        tensor = torch.empty_strided(
            meta.shape, meta.stride, dtype=meta.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def boundary_of(output: object, stage: int) -> tuple[Tensor, ...]:
    """The tensors of a stage's output: one tensor, or a tuple or list of them."""
    outputs = (output,) if isinstance(output, Tensor) else output
    if not isinstance(outputs, (tuple, list)) or not all(isinstance(t, Tensor) for t in outputs):
        raise ExecutionError(
            f"stage {stage} must return a tensor or a tuple of tensors to the next stage, not "
            f"{type(output).__name__}"
        )
    return tuple(outputs)


def declared(output: Declared, stage: int) -> Boundary:
    """A boundary that the user declared by example; floating point tensors require grad."""
    return tuple(
        attrs.evolve(meta_of(t), requires_grad=t.dtype.is_floating_point)
        for t in boundary_of(output, stage)
    )


def call(module: nn.Module, inputs: Microbatch) -> Any:
    """Run the first stage's module on a microbatch: a tensor, or a tuple or dict of arguments."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, Tensor):
        return module(inputs)
    return module(*inputs)


@attrs.frozen
class FirstInput:
    """What goes into the first stage: a microbatch of the user's, rather than a boundary."""

    batch: Microbatch


Given: TypeAlias = Boundary | FirstInput


class Trace:
    """One fake run of a stage: what goes out, and which inputs get a gradient."""

    def __init__(self, module: nn.Module, device: torch.device, given: Given) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._leaves: list[Tensor] = []
        self.mutates: tuple[bool, ...] = ()
        with self._mode, _untouched(module, self._mode), torch.enable_grad():
            if not isinstance(given, FirstInput):
                self._leaves = [
                    empty(meta, device).requires_grad_(meta.requires_grad) for meta in given
                ]
                # Not the leaves themselves: a first layer that works in place can't have those.
                arguments = [leaf.clone() for leaf in self._leaves]
                before = [argument._version for argument in arguments]
                self.output = module(*arguments)
                self.mutates = tuple(
                    argument._version != version
                    for argument, version in zip(arguments, before, strict=True)
                )
            else:
                self.output = call(module, self._fake(given.batch))

    def _fake(self, tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, self._mode.from_tensor, tree)

    def loss(self, loss_fn: Callable[[Any, Any], Tensor], target: Microbatch) -> Tensor:
        """The fake loss of the last stage."""
        with self._mode, torch.enable_grad():
            return loss_fn(self.output, self._fake(target))

    def gradients(self, outputs: Sequence[Tensor]) -> tuple[bool, ...]:
        """Which inputs get a gradient, where just `outputs` do."""
        wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
        roots = [output for output in outputs if output.requires_grad]
        if not wanted or not roots:
            return tuple(False for _ in self._leaves)
        with self._mode:
            found = torch.autograd.grad(
                roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True
            )
        arrives = {id(leaf): grad is not None for leaf, grad in zip(wanted, found, strict=True)}
        return tuple(arrives.get(id(leaf), False) for leaf in self._leaves)


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@contextmanager
def _untouched(module: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Keep a fake run from being noticed: hooks must see real data only, and buffers keep theirs.

    Fake tensors stand in for the buffers, since an operation on real ones alone, such as
    BatchNorm's `num_batches_tracked.add_(1)`, would run for real.
    """
    hooks = [(m, name, getattr(m, name)) for m in module.modules() for name in _HOOKS]
    buffers = [
        (m._buffers, name, buffer)
        for m in module.modules()
        for name, buffer in m._buffers.items()
        if buffer is not None
    ]
    try:
        for owner, name, _ in hooks:
            setattr(owner, name, OrderedDict())
        for holder, name, buffer in buffers:
            holder[name] = mode.from_tensor(buffer)
        yield
    finally:
        for owner, name, found in hooks:
            setattr(owner, name, found)
        for holder, name, buffer in buffers:
            holder[name] = buffer
