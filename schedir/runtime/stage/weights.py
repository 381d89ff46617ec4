"""The weights of one stage: their live versions, and ranks of one process that share them.

A version that is not read after its OPTIM_STEP is the module's own parameters, updated in place. A
version that is still read then gets its own leaf tensors, which are installed in the module during
its forwards and backwards: activation checkpointing runs the module again in the backward, and
needs the same weights. Swapping `param.data` instead would give silently wrong gradients, because a
saved leaf unpacks to the parameter itself.

Replicas of a stage whose ranks all run in this process share its module. Every rank adds up its own
gradients, as separate processes do, so that the sums are the same. While it is a rank's turn, its
gradients are the parameters' `.grad`:

    rank 0   0B0  0B2 ─ 0REDUCE_GRAD ┐             0OPTIM_STEP  steps
    rank 1   0B1  0B3 ─ 0REDUCE_GRAD ┴ their sum   0OPTIM_STEP  finds that done

The first rank that comes to an OPTIM_STEP runs it. The version before it is kept if other ranks
still read it (`readers_of`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import TypeAlias

import torch
from torch import Tensor, nn

from schedir.graph.alive import StageVersions, weight_versions
from schedir.graph.compile import graph_of
from schedir.ir import Schedule
from schedir.runtime.accelerator import Accelerator
from schedir.runtime.gradients.reduction import Barrier
from schedir.runtime.memory import keep_apart

run_backward = partial(
    torch.autograd.Variable._execution_engine.run_backward,
    keep_graph=False,
    create_graph=False,
    inputs=(),
    allow_unreachable=True,
    accumulate_grad=True,
)
"""torch.autograd.backward of some roots and their gradients, without its look at their shapes: that
takes as long as the forward of a small stage."""

Readers: TypeAlias = Mapping[int, int]
"""The number of ranks here that read a version, of those that are read after the OPTIM_STEP that
replaces them."""


def readers_of(schedule: Schedule, ranks: Iterable[int]) -> dict[int, Readers]:
    """The readers of old versions, by stage; ranks of one process share a stage's weights.

    Then the first of them that comes to an OPTIM_STEP carries it out; all have come to the sum of
    the gradients before it, but may read the old version after that.
    """
    sums = graph_of(schedule).sums
    starts = schedule.columns.starts.tolist()
    lists: dict[int, list[tuple[int, StageVersions]]] = defaultdict(list)
    for rank in ranks:
        for stage, versions in weight_versions(schedule.columns, rank).items():
            lists[stage].append((starts[rank], versions))
    found: dict[int, Readers] = {}
    for stage, own in lists.items():
        read = Counter(version for _, versions in own for version in versions.last_read)
        found[stage] = {
            version: read[version]
            for start, versions in own
            for version, at in enumerate(versions.steps)
            if versions.last_read.get(version, -1)
            > (at if len(own) == 1 else sums.get(start + at, start + at) - start)
        }
    return found


Copy: TypeAlias = dict[nn.Parameter, nn.Parameter]
"""The parameters of an older version, by the module's own."""

NEWEST = -1
"""In place of a version: the module's own parameters."""


class StageWeights:
    """The parameters of a stage's module, and the older versions that are still needed.

    `newest` are the module's own parameters, which gradients go to. `readers` has the versions that
    are still read when they are replaced. `accumulators` makes the autograd nodes that add to
    gradients, if the first forward must not make them; they are held here, and so outlive the
    graphs that use them. `latest` is the newest version in this call. It `stashes` if older
    versions are kept, as copies. It `collects` if it has to take in the gradients of a backward:
    the first ones of parameters, or those of copies.
    """

    def __init__(
        self,
        module: nn.Module,
        readers: Readers,
        accumulators: Callable[[Iterable[nn.Parameter]], object] | None = None,
    ) -> None:
        self.newest = list(module.parameters())
        self._readers, self._accumulators = readers, accumulators
        self._held = [accumulators(self.newest)] if accumulators else []
        self.stashes = bool(readers)
        self.latest = 0
        # A parameter may stand at several places of a module; all of them are swapped together.
        self._places = [
            (holder._parameters, name, parameter)
            for holder in module.modules()
            for name, parameter in holder._parameters.items()
            if parameter is not None
        ]
        self._stashed: dict[int, Copy] = {}
        self._reading: dict[int, int] = {}  # of these, on how many ranks they are still read
        self._pool: list[Copy] = []
        self._installed = self._own = dict(zip(self.newest, self.newest, strict=True))
        self.expect_gradients(self.newest)

    @property
    def copies(self) -> Sequence[nn.Parameter]:
        """Those of older versions that are kept now."""
        return [kept for copy in self._stashed.values() for kept in copy.values()]

    def begin(self, version: int) -> None:
        """`version` is the newest now: keep a copy of it if it will outlive its OPTIM_STEP."""
        torch.clear_autocast_cache()  # it holds casts of what the parameters were before
        self.latest = version
        self.expect_gradients(self.newest)
        if version not in self._readers:
            return
        copy = self._stashed[version] = self._pool.pop() if self._pool else self._copy()
        self._reading[version] = self._readers[version]
        with torch.no_grad():
            for parameter, kept in copy.items():
                kept.copy_(parameter)
                kept.requires_grad_(parameter.requires_grad)

    def _copy(self) -> Copy:
        copy = {p: nn.Parameter(torch.empty_like(p), p.requires_grad) for p in self.newest}
        if self._accumulators:
            self._held.append(self._accumulators(copy.values()))
        return copy

    def expect_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients go to these parameters now: the full ones of a sharded stage, or the newest,
        after they have been given others."""
        self._without_gradient = [p for p in parameters if p.requires_grad and p.grad is None]
        self.collects = True

    def install(self, version: int) -> None:
        """Make `version` the one that the module runs with."""
        parameters = self._stashed.get(version, self._own)
        if parameters is not self._installed:
            for holder, name, parameter in self._places:
                holder[name] = parameters[parameter]
            self._installed = parameters

    def collect(
        self,
        version: int,
        output_grads: Sequence[Tensor | None] = (),
        input_grads: Sequence[Tensor | None] = (),
    ) -> None:
        """Take in the gradients that a backward has made at a version.

        None shares memory with another or with those of the stage's outputs and inputs, which its
        neighbours have or get: the next backward adds to it in place. Those of an older version go
        to the module's own parameters, past these parameters' hooks.
        """
        if version in self._stashed:
            copy = self._stashed[version]
            made = {p: kept.grad for p, kept in copy.items() if kept.grad is not None}
            # Autograd copies gradients that somebody else holds as well.
            run_backward((*made,), (*made.values(),))
            for kept in copy.values():
                kept.grad = None
            return
        if self._without_gradient:  # else autograd has added to what was there
            keep_apart(self._without_gradient, (*output_grads, *input_grads))
            self._without_gradient = [p for p in self._without_gradient if p.grad is None]
        self.collects = self.stashes or bool(self._without_gradient)

    def release(self, version: int) -> None:
        """A rank's last read of `version` is done; after that of all, its storage goes back to the
        pool."""
        if version in self._stashed:
            self._reading[version] -= 1
            if not self._reading[version]:
                self._drop(version)

    def _drop(self, version: int) -> None:
        copy = self._stashed.pop(version)
        for kept in copy.values():
            kept.grad = None  # a step that failed may have left some
        self._pool.append(copy)

    def forget_gradients(self) -> None:
        """Drop the gradients that a call has made in part."""
        for parameter in self.newest:
            parameter.grad = None

    def restore(self) -> None:
        """Install the module's own parameters again, and drop all older versions."""
        for version in list(self._stashed):
            self._drop(version)
        self.install(NEWEST)


class Replicas:
    """The replicas of one stage on `ranks` of this process, which take turns.

    A rank comes to the `barrier` once its gradients are complete, and leaves it after their sum.
    """

    def __init__(
        self, ranks: Sequence[int], weights: StageWeights, accelerator: Accelerator
    ) -> None:
        self._ranks, self._weights, self._accelerator = ranks, weights, accelerator
        self.barrier = Barrier(len(ranks), self._sum, accelerator, weights.newest)
        self.begin()

    def begin(self) -> None:
        """A call begins: what the parameters have accumulated before is of the first rank."""
        self._turn = self._ranks[0]
        self._others: dict[int, Sequence[Tensor | None]] = {}  # the gradients of the other ranks
        self._scaled = 0  # the steps whose sums are
        self._latest = self._accelerator.mark()

    def in_turn(self, run: Callable[[], object], rank: int | None = None) -> Callable[[], None]:
        """What uses the stage, one after the other; with `rank` it adds to that rank's gradients.

        On a device the ranks have streams of their own, and the module, its buffers and versions
        are of all.
        """

        def taken() -> None:
            self._latest.wait()
            if rank is not None and rank != self._turn:
                self._give_turn(rank)
            run()
            self._latest = self._accelerator.mark()

        return taken

    def _give_turn(self, rank: int) -> None:
        parameters = self._weights.newest
        self._others[self._turn] = [parameter.grad for parameter in parameters]
        for parameter, grad in zip(parameters, self._others.pop(rank, repeat(None)), strict=False):
            parameter.grad = grad
        self._turn = rank
        self._weights.expect_gradients(parameters)

    def scale(self, step: int, scale: Callable[[], None]) -> None:
        """Before an OPTIM_STEP of that number: scale the sum, once for all ranks."""
        self._latest.wait()
        if self._scaled <= step:
            self._scaled = step + 1
            scale()
            self._latest = self._accelerator.mark()
        for parameter in self._weights.newest:
            if parameter.grad is not None:
                self._accelerator.used(parameter.grad)

    def _sum(self) -> None:
        """Make the gradients of all ranks, in their order, those of the first."""
        first, *others = self._ranks
        self._give_turn(first)
        for rank in others:
            grads = self._others.pop(rank, ())
            for parameter, part in zip(self._weights.newest, grads, strict=False):
                if part is not None:
                    self._accelerator.used(part)
                    if parameter.grad is not None:
                        self._accelerator.used(parameter.grad)
                    parameter.grad = part if parameter.grad is None else parameter.grad + part
        self._latest = self._accelerator.mark()

    def restore(self) -> None:
        """A call is over: what is not summed yet becomes the parameters' `.grad` as well."""
        if self._others:
            self._sum()

    def reset(self) -> None:
        """A call has failed: nobody comes any more."""
        self.barrier.reset()
        self._others = {}
