"""REDUCE_GRAD and OPTIM_STEP as operations, and what comes before OPTIM_STEPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from schedir.runtime.call import Call
from schedir.runtime.gradients.nonfinite import NonFinite
from schedir.runtime.gradients.reduction import Barrier, Reduction
from schedir.runtime.program.instruction import Operation
from schedir.runtime.stage.replicas import Replicas
from schedir.runtime.stage.stage import Stage


class ReduceGrad(Operation):
    """REDUCE_GRAD: posts the sums of the gradients over all processes that run the stage."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction

    def run(self, call: Call) -> None:
        """Run the action."""
        # Without an update the sum can wait: gradients add up here until there is one.
        if call.request.updates or self.reduction.each_call:
            self.reduction.post()


class SumReplicas(Operation):
    """REDUCE_GRAD of a stage that several ranks of this process hold."""

    def __init__(self, replicas: Replicas, rank: int) -> None:
        self.replicas, self.rank = replicas, rank

    def is_blocked(self, call: Call) -> bool:
        """Whether the sum before this one is not taken yet."""
        return not self.replicas.is_over(self.rank)

    def run(self, call: Call) -> None:
        """Run the action."""
        if call.request.updates:
            self.replicas.arrive(self.rank)


class PassBarriers(Operation):
    """Before a rank's consecutive OPTIM_STEPs: its own sums end, those over `replicas` here too,
    are scaled where that is due, all barriers are passed, and it may `look` at what is applied."""

    listed: ClassVar[bool] = False

    def __init__(
        self,
        rank: int,
        reductions: Sequence[Reduction],
        replicas: Sequence[Replicas],
        scales: Sequence[Callable[[], None]],
        barriers: Sequence[Barrier],
        look: Callable[[], None] | None,
    ) -> None:
        self.rank, self.reductions, self.scales = rank, reductions, scales
        self.replicas, self.barriers, self.look = replicas, barriers, look
        self._turns: list[int] | None = None

    def is_blocked(self, call: Call) -> bool:
        """Whether some rank of this process has not arrived yet."""
        if not call.request.updates:
            return False
        for replicas in self.replicas:
            if not replicas.is_over(self.rank):
                return True
        turns = self._arrive()
        return not all(
            barrier.is_past(turn) for barrier, turn in zip(self.barriers, turns, strict=True)
        )

    def run(self, call: Call) -> None:
        """Run it."""
        if call.request.updates:
            self._arrive()
            for barrier in self.barriers:
                barrier.leave()
            if self.look is not None:
                self.look()
        self._turns = None

    def _arrive(self) -> list[int]:
        if self._turns is None:
            for reduction in self.reductions:
                reduction.finish()
            for replicas in self.replicas:
                replicas.leave(self.rank)
            for scale in self.scales:
                scale()
            self._turns = [barrier.arrive() for barrier in self.barriers]
        return self._turns


class OptimStep(Operation):
    """OPTIM_STEP number `step` of a stage in a call: applies the accumulated gradients to the
    newest weights, unless it is left out, and clears them. This makes the next version, unless a
    replica here has."""

    computes: ClassVar[bool] = True

    def __init__(self, stage: Stage, nonfinite: NonFinite, step: int) -> None:
        self.stage, self.nonfinite, self.makes = stage, nonfinite, step + 1
        self.place = stage.index, step

    def run(self, call: Call) -> None:
        """Run the action."""
        if not call.request.updates or self.stage.weights.latest >= self.makes:
            return
        is_left_out = self.nonfinite.leaves_out(self.place)
        optimizer = self.stage.optimizer
        if optimizer is not None:  # a stage without parameters has none
            if not is_left_out:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.stage.weights.begin(self.makes)
