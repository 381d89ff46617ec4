"""Actions of whole stages as bound calls: summing gradients, and updating, with the work before
OPTIM_STEPs."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from schedir.runtime.call import Now
from schedir.runtime.program.instruction import Bound, nothing
from schedir.runtime.sharded import Sharded
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
