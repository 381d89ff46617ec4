"""The actions of a list as bound calls, each resolved once; their tensors lie in cells.

What an action waits for has been waited for when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from schedir.errors import ExecutionError
from schedir.runtime.gradients.reduction import Reduction
from schedir.runtime.request import STEP, Request
from schedir.runtime.stage.cells import Cell
from schedir.runtime.stage.rng import seed_generators
from schedir.runtime.stage.statistics import Statistics
from schedir.runtime.stage.weights import StageWeights


class StepState:
    """What all instructions of a rank share during one call.

    `step` counts the calls of `step`, for the seeds. `autocast` are the types of device on which
    the caller computes in lower precision, which forwards alone do.
    """

    def __init__(self, seed: int, step: int) -> None:
        self.seed = seed
        self.step = step
        self.busy = 0.0
        self.request: Request = STEP
        self.keeps_outputs = False
        self.autocast: Sequence[str] = ()

    def begin(self, request: Request, keeps_outputs: bool, devices: Iterable[str]) -> None:
        """A call begins, under whatever autocast its caller is."""
        self.request, self.keeps_outputs, self.busy = request, keeps_outputs, 0.0
        self.autocast = tuple(kind for kind in devices if torch.is_autocast_enabled(kind))

    @contextmanager
    def forwards_apart(self) -> Iterator[None]:
        """Run a list inside: backwards and updates are in the types of what they work on."""
        self._set_autocast(False)
        try:
            yield
        finally:
            self._set_autocast(True)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward inside, in the precision that the caller has asked for."""
        self._set_autocast(True)
        try:
            yield
        finally:
            self._set_autocast(False)

    def _set_autocast(self, enabled: bool) -> None:
        for device in self.autocast:
            torch.set_autocast_enabled(device, enabled)


class Stage:
    """One local stage: its module, its weights, and what the last stage needs for the loss.

    `holder` has the module, and the loss where that is one, as its children. With `recompute` a
    forward keeps its input alone, and the backward runs it again.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        holder: nn.Module,
        weights: StageWeights,
        device: torch.device,
        loss_fn: Callable[..., Tensor] | None,
        recompute: bool,
        reduction: Reduction | None,
        state: StepState,
    ) -> None:
        self.index = index
        self.module = module
        self.holder = holder
        self.weights = weights
        self.device = device
        self.loss_fn = loss_fn
        self.recompute = recompute
        self.reduction = reduction
        self.statistics = Statistics(holder)
        self.state = state

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """What is told of eval mode: the module, and the loss where that is one."""
        if self.holder is self.module:
            return (self.module,)
        return tuple(self.holder.children())

    def output(self, cell: Cell, keep_input: bool) -> Any:
        """Run the module on the cell's input; `keep_input` if it will be run again."""
        state, wiring = self.state, cell.wiring
        seed_generators(state.seed, state.step, self.index, cell.draw)
        extra = _copy_of(cell.extra) if wiring.mutates_extra else cell.extra
        if self.index == 0:
            given = _copy_of(cell.batch) if any(wiring.mutates) else cell.batch
            return wiring.call(self.module, given, extra)
        arguments = _arguments(cell)
        if not keep_input:
            cell.inputs = ()
        output = wiring.call(self.module, wiring.before.structure(arguments), extra)
        if wiring.watched is not None:
            # No fake run could tell whether the module changes its inputs.
            changed = [number for number, tensor in enumerate(arguments) if tensor._version]
            reason = wiring.watched.forbid(changed)
            if reason is not None:
                raise ExecutionError(reason)
        return output

    def loss(self, cell: Cell, output: Any) -> Tensor:
        """The last stage's loss."""
        assert self.loss_fn is not None  # asked of the last stage
        target, keywords = cell.target, cell.loss_keywords
        if cell.wiring.mutates_target:
            target, keywords = _copy_of(target), _copy_of(keywords)
        loss = self.loss_fn(output, target, **keywords)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            got = type(loss).__name__
            if isinstance(loss, Tensor):
                got = f"{loss.dtype} of shape {list(loss.shape)}"
            raise ExecutionError(
                f"loss_fn must return a real scalar tensor, the microbatch's mean, not {got}"
            )
        return loss


def _copy_of(tree: Any) -> Any:
    """A copy of the tensors; what stands there twice is copied once, and so stays one tensor."""
    copies: dict[object, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        return copies.setdefault(key, tensor.clone())

    return tree_map_only(Tensor, copied, tree)


def _arguments(cell: Cell) -> list[Tensor]:
    """The inputs as leaves that a backward can stop at."""
    leaves, arguments = [], []
    wiring = cell.wiring
    for tensor, meta, mutated in zip(cell.inputs, wiring.before.metas, wiring.mutates, strict=True):
        leaf = tensor.detach().requires_grad_(meta.requires_grad)
        leaves.append(leaf)
        # A leaf can't be changed in place, and a neighbour's output must not be.
        arguments.append(leaf.clone() if mutated else leaf)
    for number in wiring.turned:
        leaves[number].register_hook(partial(cell.turned.__setitem__, number))
    cell.leaves = tuple(leaves)
    return arguments
