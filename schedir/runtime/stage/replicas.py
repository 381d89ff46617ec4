"""Replicas of a stage whose ranks all run in this process: they share its module.

Every rank adds up its own gradients, as separate processes do, so that the sums are the same. While
it is a rank's turn, its gradients are the parameters' `.grad`:

    rank 0   0B0  0B2 ─ 0REDUCE_GRAD ┐             0OPTIM_STEP  steps
    rank 1   0B1  0B3 ─ 0REDUCE_GRAD ┴ their sum   0OPTIM_STEP  finds that done

The first rank that comes to an OPTIM_STEP runs it. The version before it is kept if other ranks
still read it (`readers_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from schedir.runtime.accelerator import Accelerator, Mark
from schedir.runtime.gradients.reduction import Barrier
from schedir.runtime.stage.weights import StageWeights


class Replicas:
    """The replicas of one stage on `ranks` of this process, which take turns.

    A rank comes to the `barrier` once its gradients are complete, and leaves it after their sum.
    """

    def __init__(
        self, ranks: Sequence[int], weights: StageWeights, accelerator: Accelerator
    ) -> None:
        self._ranks, self._weights, self._accelerator = ranks, weights, accelerator
        self.barrier = Barrier(len(ranks), self._sum, accelerator, weights.newest)
        self._scaled = 0  # the steps whose sums are
        self._grads: dict[int, Sequence[Tensor | None]] = {}
        self._turn = ranks[0]
        self._latest: Mark | None = None

    def begin(self) -> None:
        """A call begins: what the parameters have accumulated before is of the first rank."""
        self._grads = {rank: [None] * len(self._weights.newest) for rank in self._ranks}
        self._scaled = 0
        self._turn, self._latest = self._ranks[0], None

    def in_turn(self, run: Callable[[], object], rank: int | None = None) -> Callable[[], None]:
        """What uses the stage, one after the other; with `rank` it adds to that rank's gradients.

        On a device the ranks have streams of their own, and the module, its buffers and versions
        are of all.
        """

        def taken() -> None:
            if self._latest is not None:
                self._latest.wait()
            if rank is not None and rank != self._turn:
                self._give_turn(rank)
            run()
            if self._accelerator.queues:
                self._latest = self._accelerator.mark()

        return taken

    def _give_turn(self, rank: int) -> None:
        parameters = self._weights.newest
        self._grads[self._turn] = [parameter.grad for parameter in parameters]
        for parameter, grad in zip(parameters, self._grads[rank], strict=True):
            parameter.grad = grad
        self._turn = rank
        self._weights.look_at_gradients()

    def scale(self, step: int, scale: Callable[[], None]) -> None:
        """Before an OPTIM_STEP of that number: scale the sum, once for all ranks."""
        if self._latest is not None:
            self._latest.wait()
        if self._scaled <= step:
            self._scaled = step + 1
            scale()
            if self._accelerator.queues:
                self._latest = self._accelerator.mark()
        for parameter in self._weights.newest:
            if parameter.grad is not None:
                self._accelerator.used(parameter.grad)

    def _sum(self) -> None:
        """Make the gradients of all ranks, in their order, those of the first."""
        first = self._ranks[0]
        self._give_turn(first)
        others = [self._grads[rank] for rank in self._ranks[1:]]
        for parameter, *parts in zip(self._weights.newest, *others, strict=True):
            for part in parts:
                if part is not None:
                    self._accelerator.used(part)
                    if parameter.grad is not None:
                        self._accelerator.used(parameter.grad)
                    parameter.grad = part if parameter.grad is None else parameter.grad + part
        self._grads = {rank: [None] * len(self._weights.newest) for rank in self._ranks}
        self._weights.look_at_gradients()
        if self._accelerator.queues:
            self._latest = self._accelerator.mark()

    def restore(self) -> None:
        """A call is over: what is not summed yet becomes the parameters' `.grad` as well."""
        if self._grads:
            self._sum()
            self._grads = {}

    def reset(self) -> None:
        """A call has failed: nobody comes any more."""
        self.barrier.reset()
        self._grads = {}
