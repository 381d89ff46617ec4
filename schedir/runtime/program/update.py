"""Actions of whole stages as bound calls: gathering weights, summing gradients, updating; and the
work before OPTIM_STEPs."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from schedir.runtime.call import Now
from schedir.runtime.gradients.reduction import Reduction
from schedir.runtime.program.instruction import Bound, nothing
from schedir.runtime.sharded import Sharded
from schedir.runtime.stage.stage import Stage
from schedir.runtime.stage.weights import StageWeights


def reduce_grad(reduction: Reduction, now: Now) -> Bound:
    """REDUCE_GRAD: posts the sums of the gradients over all processes that run the stage."""

    def call() -> None:
        # Without an update the sum can wait: gradients add up here until there is one.
        if now.call.updates or reduction.each_call:
            reduction.post()

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
        if now.call.updates or sharded.each_call:
            sharded.reduce()

    return call


def if_updating(calls: Sequence[Bound], now: Now) -> Bound:
    """The work around OPTIM_STEPs, in calls that carry them out."""

    def call() -> None:
        if now.call.updates:
            for each in calls:
                each()

    return call if calls else nothing


def optim_step(stage: Stage, step: int, now: Now) -> Bound:
    """OPTIM_STEP number `step` of a stage in a call: applies the accumulated gradients to the
    newest weights, unless it is left out, and clears them. This makes the next version, unless a
    replica here has."""
    makes, weights, optimizer = step + 1, stage.weights, stage.optimizer
    nonfinite = stage.nonfinite

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
