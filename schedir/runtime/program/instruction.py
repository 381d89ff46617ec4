"""An entry of a rank's list as it runs: an action and its bound calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs

from schedir.ir import Action
from schedir.runtime.gradients.reduction import Reduction
from schedir.runtime.stage.activations import Cell
from schedir.runtime.transports.transport import Work

if TYPE_CHECKING:
    from schedir.runtime.stage.stage import Stage

Bound: TypeAlias = Callable[[], object]
"""A call with all that it works on: what one action does, resolved when the list is compiled."""


@attrs.frozen(eq=False)
class Instruction:
    """An action of the list and its bound calls: first `wait`, if there is one, then `run`.

    `index` is its place in the list that runs, `listed_at` its place in the list before receives
    were moved: users see that one, and errors name it. `receives` has the works of the receives
    that it waits for, `arrived` those of the sends that have arrived by then, and `blocked` says
    whether another rank of this process has to come first. It
    `computes` if its time counts as compute. It is `listed` if it does its action, and not
    something that has to be done before the action.

    For observers: the `cell` and `stage` that it works on, the `peer` of a transfer, the `sums`
    that it posts or ends, and the `parts` of a batch that it posts.
    """

    rank: int
    index: int
    listed_at: int
    action: Action
    run: Bound
    wait: Bound | None = None
    receives: list[Work] = attrs.field(factory=list)
    arrived: Sequence[list[Work]] = ()
    blocked: Callable[[], bool] | None = None
    computes: bool = False
    listed: bool = True
    cell: Cell | None = None
    stage: Stage | None = None
    peer: int | None = None
    sums: Sequence[Reduction] = ()
    parts: Sequence[Instruction] = ()

    def is_blocked(self) -> bool:
        """Whether it has to wait for another rank of this process."""
        # Where no gradient travels, a backward comes before its activation has been received.
        for works in (self.receives, *self.arrived):
            if not all(work.is_completed() for work in works):
                return True
        return self.blocked is not None and self.blocked()


def nothing() -> None:
    """Do nothing: of an entry that is there to be waited for, or observed."""
