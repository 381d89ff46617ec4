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
    that it waits for. It `computes` if its time counts as compute. It is `listed` if it does its
    action, and not something that has to be done before the action.

    Among the ranks of one process it comes `after` events, each of which must have happened so many
    times; what it `does` are events. They are the actions that it posts, and the meetings to which
    its rank comes.

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
    after: Sequence[tuple[object, int]] = ()
    does: Sequence[object] = ()
    computes: bool = False
    listed: bool = True
    cell: Cell | None = None
    stage: Stage | None = None
    peer: int | None = None
    sums: Sequence[Reduction] = ()
    parts: Sequence[Instruction] = ()


def nothing() -> None:
    """Do nothing: of an entry that is there to be waited for, or observed."""
