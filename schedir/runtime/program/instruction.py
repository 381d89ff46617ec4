"""An entry of a rank's list as it runs, an action and its bound calls; and who observes it.

An observer is a function Instruction → Instruction that wraps an instruction's wait and run:

    observer        around the wait                     around the run
    Recorder        leaves two marks                    leaves two marks
    profiler        a range "wait for 0F1"              a range "0F1"

So an instruction without an observer costs nothing, and the loop that runs a list does not know of
observers. Permanent observers wrap instructions when the list is compiled; for the others each call
checks once whether they are on. An instruction has its rank and its index in the list, so an
observer can record when each entry of each rank starts and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs
from torch._C._autograd import _enable_record_function
from torch.autograd.profiler import record_function

from schedir.ir import COMMUNICATION, Action
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


Observer: TypeAlias = Callable[[Instruction], Instruction]


def profiler_ranges(instruction: Instruction) -> Instruction:
    """Show in a profile what an instruction waits for and what it does: each range costs what a
    send does."""
    name, wait, run = str(instruction.action), instruction.wait, instruction.run
    if instruction.action.kind in COMMUNICATION:
        run = unseen(run)
    return attrs.evolve(
        instruction,
        wait=None if wait is None else _in_range(f"wait for {name}", wait),
        run=_in_range(name if instruction.listed else f"wait for {name}", run),
    )


def unseen(post: Bound) -> Bound:
    """A call that posts, hidden from a profiler that runs.

    Work that one has seen posted tells it when it ends, and if that is after the profile, as for
    receives posted ahead, writes into memory that was freed.
    """

    def hidden() -> None:
        _enable_record_function(False)
        try:
            post()
        finally:
            _enable_record_function(True)

    return hidden


def _in_range(name: str, function: Bound) -> Bound:
    def in_range() -> None:
        with record_function(name):
            function()

    return in_range


def observed(
    instructions: Sequence[Instruction], observers: Iterable[Observer]
) -> Sequence[Instruction]:
    """The instructions with what the observers put around them."""
    for observer in observers:
        instructions = list(map(observer, instructions))
    return instructions
