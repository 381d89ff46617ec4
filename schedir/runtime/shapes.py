"""What crosses each boundary, found without running a user's module on real data.

A stand-in for a stage's module runs once on fake tensors (FakeTensorMode), with its real
parameters, under the active autocast and without hooks: shapes and types come out, no value is
computed and nothing of the module changes. Running it on uninitialised memory instead would poison
BatchNorm's statistics and index embeddings out of range.
"""

from __future__ import annotations

import copy
import math
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

    @property
    def nbytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def describes(self, tensor: Tensor) -> bool:
        """Whether it is this tensor's metadata. At every boundary of every microbatch, so quick."""
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.requires_grad is self.requires_grad
            and (tensor.stride() == self.stride or meta_of(tensor).stride == self.stride)
        )

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


def declared(output: Declared, stage: int, trained: bool) -> Boundary:
    """A boundary that the user declared by example; if `trained`, floating point requires grad."""
    return tuple(
        attrs.evolve(meta_of(t), requires_grad=trained and t.dtype.is_floating_point)
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
    """One fake run of a stage: what goes out, and which inputs get a gradient.

    `mutates` says which inputs the module changes in place; of the first stage's microbatch, which
    of its tensors.
    """

    def __init__(self, module: nn.Module, device: torch.device, given: Given, trains: bool) -> None:
        self._trains = trains
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._leaves: list[Tensor] = []
        with self._faking():
            stand_in = _twin(module, self._mode, {})
            if isinstance(given, FirstInput):
                batch = self._fake(given.batch)
                watched = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
                before = [leaf._version for leaf in watched]
                self.output = call(stand_in, batch)
            else:
                self._leaves = [
                    empty(meta, device).requires_grad_(meta.requires_grad) for meta in given
                ]
                # Not the leaves themselves: a first layer that works in place can't have those.
                watched = [leaf.clone() for leaf in self._leaves]
                before = [leaf._version for leaf in watched]
                self.output = stand_in(*watched)
            self.mutates = tuple(
                leaf._version != version for leaf, version in zip(watched, before, strict=True)
            )

    @contextmanager
    def _faking(self) -> Iterator[None]:
        """Fake mode, with gradients, and without a trace of it in autocast's cache of weights."""
        caching = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with self._mode, torch.set_grad_enabled(self._trains):
                yield
        finally:
            torch.set_autocast_cache_enabled(caching)

    def _fake(self, tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, self._mode.from_tensor, tree)

    def loss(self, loss_fn: Callable[[Any, Any], Tensor], target: Microbatch) -> Tensor:
        """The fake loss of the last stage."""
        with self._faking():
            if isinstance(loss_fn, nn.Module):
                loss_fn = _twin(loss_fn, self._mode, {})
            return loss_fn(self.output, self._fake(target))

    def gradients(self, outputs: Sequence[Tensor]) -> tuple[bool, ...]:
        """Which inputs get a gradient, where just `outputs` do."""
        wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
        roots = [output for output in outputs if output.requires_grad]
        if not wanted or not roots:
            return tuple(False for _ in self._leaves)
        with self._faking():
            found = torch.autograd.grad(
                roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True
            )
        arrives = {id(leaf): grad is not None for leaf, grad in zip(wanted, found, strict=True)}
        return tuple(arrives.get(id(leaf), False) for leaf in self._leaves)


def _twin(module: nn.Module, mode: FakeTensorMode, twins: dict[int, nn.Module]) -> nn.Module:
    """A stand-in for a module that shares its parameters and can keep what a fake run leaves.

    A forward may count its calls, cache a mask, or update a buffer; none of it must reach the
    user's module, nor fake data the user's hooks. Buffers are fake, since an operation on real
    ones alone, such as BatchNorm's `num_batches_tracked.add_(1)`, would run for real.
    """
    if id(module) in twins:
        return twins[id(module)]
    twin = module.__new__(type(module))
    twins[id(module)] = twin
    for name, value in vars(module).items():
        if name.endswith("_hooks") and isinstance(value, OrderedDict):
            kept: object = OrderedDict()
        elif name == "_modules":
            kept = {
                key: child if child is None else _twin(child, mode, twins)
                for key, child in value.items()
            }
        elif name == "_buffers":
            kept = {
                key: buffer if buffer is None else mode.from_tensor(buffer)
                for key, buffer in value.items()
            }
        else:
            kept = copy.copy(value) if type(value) in (dict, list, set, OrderedDict) else value
        twin.__dict__[name] = kept
    return twin
