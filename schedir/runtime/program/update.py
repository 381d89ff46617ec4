"""Actions of whole stages as bound calls: gathering weights, summing gradients, updating; and the
work before OPTIM_STEPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from torch import nn

from schedir.runtime.call import Now
from schedir.runtime.gradients.nonfinite import NonFinite
from schedir.runtime.gradients.reduction import Barrier, Reduction
from schedir.runtime.program.instruction import Bound
from schedir.runtime.sharded import Sharded, settle
from schedir.runtime.stage.replicas import Replicas
from schedir.runtime.stage.stage import Stage
from schedir.runtime.stage.weights import StageWeights


def reduce_grad(reduction: Reduction, now: Now) -> Bound:
    """REDUCE_GRAD: posts the sums of the gradients over all processes that run the stage."""

    def call() -> None:
        # Without an update the sum can wait: gradients add up here until there is one.
        if now.call.request.updates or reduction.each_call:
            reduction.post()

    return call


def sum_replicas(replicas: Replicas, rank: int, now: Now) -> Bound:
    """REDUCE_GRAD of a stage that several ranks of this process hold."""

    def call() -> None:
        if now.call.request.updates:
            replicas.arrive(rank)

    return call


def unshard(sharded: Sharded, now: Now) -> Bound:
    """UNSHARD: begins to gather the weights."""
    return sharded.gather


def until_gathered(sharded: Sharded, weights: StageWeights, wait: Bound | None) -> Bound:
    """The wait of the first action that uses the weights, after its own wait: torch puts others in
    the module's place."""

    def call() -> None:
        if wait is not None:
            wait()
        sharded.wait()
        weights.compute_with(sharded.parameters)

    return call


def reshard(sharded: Sharded, now: Now) -> Bound:
    """RESHARD: gives the full weights up."""
    return sharded.release


def reduce_shards(sharded: Sharded, now: Now) -> Bound:
    """REDUCE_GRAD of sharded weights: sums the full gradients into those of the shards."""

    def call() -> None:
        if now.call.request.updates or sharded.each_call:
            sharded.reduce()

    return call


class PassBarriers:
    """The work before a rank's consecutive OPTIM_STEPs, in this order: 1. finish sums of gradients
    over processes, 2. finish sums over `replicas` in this process, 3. sum what is split
    otherwise than its parameter, of the `split` ones, 4. scale sums that need it,
    5. pass the barriers: ties, then clipping, 6. check what is about to be applied (`look`)."""

    def __init__(
        self,
        now: Now,
        rank: int,
        reductions: Sequence[Reduction],
        replicas: Sequence[Replicas],
        split: Sequence[nn.Parameter],
        scales: Sequence[Callable[[], None]],
        barriers: Sequence[Barrier],
        look: Callable[[], None] | None,
    ) -> None:
        self._now, self._rank, self._reductions, self._scales = now, rank, reductions, scales
        self._replicas, self._barriers, self._look = replicas, barriers, look
        self._split = split
        self._turns: list[int] | None = None

    def is_blocked(self) -> bool:
        """Whether some rank of this process has not arrived yet."""
        if not self._now.call.request.updates:
            return False
        for replicas in self._replicas:
            if not replicas.is_over(self._rank):
                return True
        turns = self._arrive()
        return not all(
            barrier.is_past(turn) for barrier, turn in zip(self._barriers, turns, strict=True)
        )

    def run(self) -> None:
        """Run it."""
        if self._now.call.request.updates:
            self._arrive()
            for barrier in self._barriers:
                barrier.leave()
            if self._look is not None:
                self._look()
        self._turns = None

    def _arrive(self) -> list[int]:
        if self._turns is None:
            for reduction in self._reductions:
                reduction.finish()
            for replicas in self._replicas:
                replicas.leave(self._rank)
            settle(self._split)
            for scale in self._scales:
                scale()
            self._turns = [barrier.arrive() for barrier in self._barriers]
        return self._turns


def optim_step(stage: Stage, nonfinite: NonFinite, step: int, now: Now) -> Bound:
    """OPTIM_STEP number `step` of a stage in a call: applies the accumulated gradients to the
    newest weights, unless it is left out, and clears them. This makes the next version, unless a
    replica here has."""
    makes, weights, optimizer = step + 1, stage.weights, stage.optimizer

    def call() -> None:
        if not now.call.request.updates or weights.latest >= makes:
            return
        began = perf_counter()
        if optimizer is not None:  # a stage without parameters has none
            if not nonfinite.leaves_out:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        weights.begin(makes)
        stage.busy[0] += perf_counter() - began

    return call
