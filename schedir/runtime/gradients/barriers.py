"""Barriers before OPTIM_STEPs: what ranks do together before any of them steps.

    rank 0   … 0B7 0OPTIM_STEP ─┐
    rank 1   … 1B7 1OPTIM_STEP ─┴ barrier: its action, then each steps

Between processes the action itself waits for the others: it sums tied gradients, or takes the norm
of all. Within one process it is carried out by the last rank that arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs


class Barrier:
    """An action that is carried out once `parties` ranks of this process have arrived."""

    def __init__(self, parties: int, action: Callable[[], None]) -> None:
        self._parties = parties
        self._action = action
        self._waiting = 0
        self._passed = 0

    def arrive(self) -> int:
        """A rank is there; the result is the turn that it waits for, for `is_past`."""
        turn = self._passed
        self._waiting += 1
        if self._waiting == self._parties:
            self._action()
            self._waiting = 0
            self._passed += 1
        return turn

    def is_past(self, turn: int) -> bool:
        """Whether all have arrived in that turn."""
        return self._passed > turn

    def reset(self) -> None:
        """Forget who has arrived: a step has failed."""
        self._waiting = 0


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
