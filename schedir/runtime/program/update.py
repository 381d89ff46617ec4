"""Actions of whole stages as bound calls: summing gradients, and updating, with the work before
OPTIM_STEPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import attrs
from torch import nn

from schedir.runtime.call import Now
from schedir.runtime.gradients.nonfinite import NonFinite
from schedir.runtime.gradients.reduction import Barrier, Reduction
from schedir.runtime.program.instruction import Bound
from schedir.runtime.sharded import Sharded, settle
from schedir.runtime.stage.replicas import Replicas
from schedir.runtime.stage.stage import Stage
from schedir.runtime.stage.weights import StageWeights


def reduce_grad(post: Bound, each_call: bool, now: Now) -> Bound:
    """REDUCE_GRAD: posts the sums of the gradients of all processes, or ranks of this one, that run
    the stage; with `each_call` also where the call does not update."""

    def call() -> None:
        # Without an update the sum can wait: gradients add up here until there is one.
        if each_call or now.call.updates:
            post()

    return call


def until_gathered(sharded: Sharded, weights: StageWeights, wait: Bound | None) -> Bound:
    """The wait of the first action that uses the weights, after its own wait: torch puts others in
    the module's place."""

    def call() -> None:
        if wait is not None:
            wait()
        sharded.wait()
        weights.compute_with(sharded.parameters)

    return call


@attrs.frozen(eq=False)
class BeforeSteps:
    """The work before a rank's consecutive OPTIM_STEPs, in this order: 1. finish sums of gradients
    over processes, 2. finish sums over `replicas` in this process, 3. sum what is split
    otherwise than its parameter, of the `split` ones, 4. scale sums that need it,
    5. pass the barriers: ties, then clipping, 6. check what is about to be applied (`look`).

    The ranks of this process come to the barriers one after the other, and then all `leave` them.
    """

    now: Now
    reductions: Sequence[Reduction]
    replicas: Sequence[Replicas]
    split: Sequence[nn.Parameter]
    scales: Sequence[Callable[[], None]]
    barriers: Sequence[Barrier]
    look: Callable[[], None] | None

    def arrive(self) -> None:
        """Do what this rank does, and come to the barriers."""
        if self.now.call.updates:
            for reduction in self.reductions:
                reduction.finish()
            for replicas in self.replicas:
                replicas.barrier.leave()
            settle(self.split)
            for scale in self.scales:
                scale()
            for barrier in self.barriers:
                barrier.arrive()

    def leave(self) -> None:
        """Go on, once all have come."""
        if self.now.call.updates:
            for barrier in self.barriers:
                barrier.leave()
            if self.look is not None:
                self.look()


def optim_step(stage: Stage, nonfinite: NonFinite, step: int, now: Now) -> Bound:
    """OPTIM_STEP number `step` of a stage in a call: applies the accumulated gradients to the
    newest weights, unless it is left out, and clears them. This makes the next version, unless a
    replica here has."""
    makes, weights, optimizer = step + 1, stage.weights, stage.optimizer

    def call() -> None:
        if not now.call.updates or weights.latest >= makes:
            return
        began = perf_counter()
        if optimizer is not None:  # a stage without parameters has none
            if not nonfinite.leaves_out:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        weights.begin(makes)
        stage.busy[0] += perf_counter() - began

    return call
