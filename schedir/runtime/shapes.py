"""What crosses each boundary, found without running a user's module on real data.

A stand-in for a stage's module runs once on fake tensors (FakeTensorMode), with its real
parameters, under the active autocast and without hooks: shapes and types come out, no value is
computed and nothing of the module changes. Running it on uninitialised memory instead would poison
BatchNorm's statistics and index embeddings out of range.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from schedir.runtime.boundary import Boundary, empty
from schedir.runtime.calls import Call
from schedir.runtime.microbatches import Microbatch


@attrs.frozen
class FirstInput:
    """What goes into the first stage: a microbatch of the user's, rather than a boundary."""

    batch: Microbatch

    @property
    def tree(self) -> Any:
        """Its structure."""
        return self.batch


_LOG = logging.getLogger(FakeTensorMode.__module__)

Given: TypeAlias = Boundary | FirstInput


class Trace:
    """One fake run of a stage: what goes out, and which inputs get a gradient.

    `extra` is what the stage is given beside its input. `mutates` says which inputs the module
    changes in place; of the first stage's microbatch, which of its tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        given: Given,
        call: Call,
        extra: Any,
        trains: bool,
    ) -> None:
        self._trains = trains
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._leaves: list[Tensor] = []
        with self._faking():
            stand_in = _twin(module, self._mode, {})
            if isinstance(given, FirstInput):
                tree = self._fake(given.batch)
                watched = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
            else:
                self._leaves = [
                    empty(meta, device).requires_grad_(meta.requires_grad) for meta in given.metas
                ]
                # Not the leaves themselves: a first layer that works in place can't have those.
                watched = [leaf.clone() for leaf in self._leaves]
                tree = given.structure(watched)
            before = [leaf._version for leaf in watched]
            self.output = call(stand_in, tree, self._fake(extra))
            self.mutates = tuple(
                leaf._version != version for leaf, version in zip(watched, before, strict=True)
            )

    @contextmanager
    def _faking(self) -> Iterator[None]:
        """Fake mode, with gradients, and without a trace of it in autocast's cache of weights."""
        caching = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        said, _LOG.disabled = _LOG.disabled, True  # what fails is said by the error alone
        try:
            with self._mode, torch.set_grad_enabled(self._trains):
                yield
        finally:
            torch.set_autocast_cache_enabled(caching)
            _LOG.disabled = said

    def _fake(self, tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, self._fake_tensor, tree)

    def _fake_tensor(self, tensor: Tensor) -> Tensor:
        # An inference tensor can't be faked as it is; its like can.
        return self._mode.from_tensor(torch.empty_like(tensor) if tensor.is_inference() else tensor)

    def loss(
        self, loss_fn: Callable[..., Tensor], target: Microbatch, keywords: Mapping[str, Any]
    ) -> Tensor:
        """The fake loss of the last stage."""
        with self._faking():
            if isinstance(loss_fn, nn.Module):
                loss_fn = _twin(loss_fn, self._mode, {})
            return loss_fn(self.output, self._fake(target), **self._fake(dict(keywords)))

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
