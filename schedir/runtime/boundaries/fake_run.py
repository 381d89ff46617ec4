"""What crosses each boundary, found without running a user's module on real data.

A stage's module runs once on fake tensors (FakeTensorMode), with its real parameters, under the
active autocast and without hooks, its attributes exchanged for the time: shapes and types come out,
no value is computed and nothing of the module changes. Running it on uninitialised memory instead
would poison BatchNorm's statistics and index embeddings out of range.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from schedir.runtime.batch.microbatches import Microbatch
from schedir.runtime.boundaries.boundary import Boundary, Grads, TensorMeta, empty, meta_of
from schedir.runtime.boundaries.calling import CallingConvention, convention_of
from schedir.runtime.boundaries.memory import sharing
from schedir.runtime.boundaries.standin import StandIn, State
from schedir.runtime.call import autocast_kinds


@attrs.frozen
class FirstInput:
    """What goes into the first stage: a microbatch of the user's, rather than a boundary."""

    batch: Microbatch

    @property
    def tree(self) -> Any:
        """Its structure."""
        return self.batch


StageInput: TypeAlias = Boundary | FirstInput


@attrs.frozen
class Invocation:
    """A stage's module and what it is run on: its input, and the `extra` that it is given beside
    that."""

    module: nn.Module
    given: StageInput
    extra: Any
    convention: CallingConvention = attrs.field(init=False)

    @convention.default
    def _convention(self) -> CallingConvention:
        return convention_of(self.module, self.given.tree, self.extra)


_LOG = logging.getLogger(FakeTensorMode.__module__)


class FakeRun:
    """One run of a stage on fake tensors: what goes out, and which inputs get a gradient.

    `mutates` says which inputs the module changes in place (of the first stage's microbatch, which
    of its tensors), `mutates_extra` and `mutates_target` whether anything of the other arguments,
    the latter as far as the `loss` has been run, and `mutates_parameters` whether any of its own
    parameters. `sharing` says whose memory the outputs are.
    """

    def __init__(self, invocation: Invocation, device: torch.device, trains: bool) -> None:
        module, given = invocation.module, invocation.given
        self._trains = trains
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._leaves: list[Tensor] = []
        self.mutates_target = True  # for all that is known before the loss has run
        stand_in = StandIn(module, self._fake_tensor)
        self._stand_ins = [stand_in]
        with self._faking():
            tree, watched = self._inputs(given, device)
            beside = tensors_of(extra := self._fake(invocation.extra))
            own = list(module.parameters())
            own_before = _versions(own)  # a fake view of a parameter counts on with it
            before, beside_before = _versions(watched), _versions(beside)
            self.output = invocation.convention(module, tree, extra)
            self.mutates = tuple(
                now != then for now, then in zip(_versions(watched), before, strict=True)
            )
            self.mutates_extra = _versions(beside) != beside_before
            self.mutates_parameters = _versions(own) != own_before
            held = [*stand_in.held(), *map(self._mode.from_tensor, own)]
            if isinstance(given, FirstInput):
                beside, watched = [*beside, *watched], []
            made = [x if isinstance(x, FakeTensor) else None for x in tensors_of(self.output)]
            self.sharing = sharing(made, watched, held, beside)

    def _inputs(self, given: StageInput, device: torch.device) -> tuple[Any, list[Tensor]]:
        """What the module is run on, and its tensors."""
        if isinstance(given, FirstInput):
            tree = self._fake(given.batch)
            return tree, tensors_of(tree)
        self._leaves = [
            empty(meta, device).requires_grad_(meta.requires_grad) for meta in given.metas
        ]
        # Not the leaves themselves: a first layer that works in place can't have those.
        tensors = [leaf.clone() for leaf in self._leaves]
        return given.structure(tensors), tensors

    @contextmanager
    def _faking(self) -> Iterator[None]:
        """Fake mode, with gradients, and leaving nothing in autocast's cache of weights."""
        caching = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        disabled, _LOG.disabled = _LOG.disabled, True  # the error alone says what fails
        try:
            with ExitStack() as stack:
                for stand_in in self._stand_ins:
                    stack.enter_context(stand_in.installed())
                if "torch._dynamo.eval_frame" in sys.modules:
                    # Compiled kernels would take a fake tensor's memory for real.
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(self._mode)
                stack.enter_context(torch.set_grad_enabled(self._trains))
                yield
        finally:
            torch.set_autocast_cache_enabled(caching)
            _LOG.disabled = disabled

    def _fake(self, tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, self._fake_tensor, tree)

    def _fake_tensor(self, tensor: Tensor) -> Tensor:
        # An inference tensor can't be faked as it is; its like can.
        return self._mode.from_tensor(torch.empty_like(tensor) if tensor.is_inference() else tensor)

    def loss(
        self, loss_fn: Callable[..., Tensor], target: Microbatch, keywords: Mapping[str, Any]
    ) -> Tensor:
        """The fake loss of the last stage."""
        if isinstance(loss_fn, nn.Module):
            self._stand_ins.append(StandIn(loss_fn, self._fake_tensor))
        with self._faking():
            given = (self._fake(target), self._fake(dict(keywords)))
            before = _versions(tensors_of(given))
            loss = loss_fn(self.output, given[0], **given[1])
            self.mutates_target = _versions(tensors_of(given)) != before
            return loss

    def gradients(self, outputs: Sequence[tuple[Tensor, TensorMeta]]) -> Grads:
        """The gradients of the inputs, where just `outputs` get one, each such a one."""
        wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
        roots = [(output, meta) for output, meta in outputs if output.requires_grad]
        if not wanted or not roots:
            return tuple(None for _ in self._leaves)
        with self._faking(), ExitStack() as stack:
            for kind in autocast_kinds(roots[0][0].device):  # autocast is for forwards alone
                stack.enter_context(torch.autocast(kind, enabled=False))
            found = torch.autograd.grad(
                [output for output, _ in roots],
                wanted,
                [empty(meta, output.device) for output, meta in roots],
                allow_unused=True,
            )
        metas = {
            id(leaf): meta_of(grad)
            for leaf, grad in zip(wanted, found, strict=True)
            if grad is not None
        }
        return tuple(metas.get(id(leaf)) for leaf in self._leaves)

    def state(self) -> list[State]:
        """What the module, and the loss, leave to the next forward."""
        return [state for stand_in in self._stand_ins for state in stand_in.changed()]


@contextmanager
def bounded_cache() -> Iterator[None]:
    """Fake runs inside, whose operations torch remembers no longer than that.

    It would remember them for the life of the process: a megabyte for each new input shape.
    """
    before = len(FakeTensorMode.cache)
    try:
        yield
    finally:
        for key in list(islice(FakeTensorMode.cache, before, None)):
            del FakeTensorMode.cache[key]


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a structure, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]
