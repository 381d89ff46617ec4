"""Barriers before OPTIM_STEPs: what ranks do together before any of them steps.

    rank 0   … 0B7 0OPTIM_STEP ─┐
    rank 1   … 1B7 1OPTIM_STEP ─┴ barrier: its action, then each steps

Between processes the action itself waits for the others: it sums tied gradients, or takes the norm
of all. Within one process it is carried out by the last rank that arrives, on a stream that has
waited for those of the others; and what these do next waits for it.

    rank 0's stream   … 0B7 ─mark──┐          ┌─wait─ 0OPTIM_STEP
    rank 1's stream   … 1B7 ───── wait ─ action ─mark─ 1OPTIM_STEP
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs
from torch import nn

from schedir.runtime.accelerator import Accelerator, Mark


class Barrier:
    """An action that is carried out once `parties` ranks of this process have arrived.

    It makes new gradients for the parameters `remade`, on its own stream.
    """

    def __init__(
        self,
        parties: int,
        action: Callable[[], None],
        accelerator: Accelerator,
        remade: Sequence[nn.Parameter] = (),
    ) -> None:
        self._parties = parties
        self._action = action
        self._accelerator = accelerator
        self._remade = remade
        self._arrived: list[Mark] = []
        self._done: Mark | None = None
        self._passed = 0

    def arrive(self) -> int:
        """A rank is there; the result is the turn that it waits for, for `is_past`."""
        turn = self._passed
        self._arrived.append(self._accelerator.mark())
        if len(self._arrived) == self._parties:
            for mark in self._arrived:
                mark.wait()
            self._arrived.clear()
            self._action()
            self._done = self._accelerator.mark()
            self._passed += 1
        return turn

    def is_past(self, turn: int) -> bool:
        """Whether all have arrived in that turn."""
        return self._passed > turn

    def leave(self) -> None:
        """A rank goes on: its stream waits for the action, and uses what that has made."""
        if self._done is not None:
            self._done.wait()
        for parameter in self._remade:
            if parameter.grad is not None:
                self._accelerator.used(parameter.grad)

    def reset(self) -> None:
        """Forget who has arrived: a step has failed."""
        self._arrived.clear()


@attrs.frozen
class Barriers:
    """All barriers of this process: those of `tied` stages, and those `common` to all stages."""

    tied: Sequence[tuple[set[int], Barrier]]
    common: Sequence[Barrier]

    def before(self, stages: Iterable[int]) -> list[Barrier]:
        """Those before consecutive OPTIM_STEPs of these stages, on one rank."""
        return [*(barrier for tie, barrier in self.tied if tie.intersection(stages)), *self.common]

    def reset(self) -> None:
        """A step has failed: nobody waits any more."""
        for barrier in (*(barrier for _, barrier in self.tied), *self.common):
            barrier.reset()
