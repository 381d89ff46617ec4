"""REDUCE_GRAD and OPTIM_STEP as bound calls."""

from __future__ import annotations

from time import perf_counter

import torch

from schedir.runtime.gradients.reduction import Reduction
from schedir.runtime.stage.stage import Stage, StepState


class ReduceGrad:
    """REDUCE_GRAD: posts the sums of the gradients over all processes that run the stage."""

    def __init__(self, reduction: Reduction, state: StepState) -> None:
        self.reduction, self.state = reduction, state

    def __call__(self) -> None:
        """Run the action."""
        # Without an update the sum can wait: gradients add up here until there is one.
        if self.state.request.updates or self.reduction.keeps_earlier:
            self.reduction.post()


class OptimStep:
    """OPTIM_STEP: applies the accumulated gradients to the newest weights, and clears them."""

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer | None, makes: int) -> None:
        self.stage, self.optimizer, self.makes = stage, optimizer, makes

    def __call__(self) -> None:
        """Run the action."""
        if not self.stage.state.request.updates:
            return
        started = perf_counter()
        if self.optimizer is not None:  # a stage without parameters has none
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.stage.weights.begin(self.makes)
        self.stage.state.busy += perf_counter() - started
