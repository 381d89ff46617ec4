"""An entry of a rank's list as it is carried out: an action and the bound calls that do it."""

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
    """An action of the list and what carries it out: first `wait`, where there is one, then `run`.

    `index` is its place in the list that is carried out, `listed_at` that in the list before its
    receives were moved: the one that users have before them, and errors name. `receives` is where
    the works of the receives are that it waits for, and `blocked` says whether another rank of this
    process has to come first. It `computes` where the time it takes is compute, and is `listed`
    where it is what its action says, rather than what has to be done before that.

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
        if not all(work.is_completed() for work in self.receives):
            return True
        return self.blocked is not None and self.blocked()


def nothing() -> None:
    """Do nothing: of an entry that is there to be waited for, or observed."""
