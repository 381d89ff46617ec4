"""An entry of a rank's list as it is carried out: an action and the operation that does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import attrs

from schedir.ir import Action
from schedir.runtime.call import Call
from schedir.runtime.transports.transport import Work, wait_for


class Operation:
    """What one action does; all that it works on is resolved once, when the list is compiled.

    `computes` where the time it takes is compute, `listed` where it is what its action says, rather
    than what has to be done before that. `receives` is where the works of the receives are that it
    waits for.
    """

    computes: ClassVar[bool] = False
    listed: ClassVar[bool] = True

    @property
    def receives(self) -> list[Work]:
        """Empty at all times but for compute that consumes what another rank sends."""
        return []

    def run(self, call: Call) -> None:
        """Do it; what it waits for has been waited for."""
        raise NotImplementedError

    def is_blocked(self, call: Call) -> bool:
        """Whether another rank of this process has to come first; asked where there are several."""
        return False


@attrs.frozen(eq=False)
class Instruction:
    """An action of the list and what carries it out: first `wait`, if there are `receives` under
    way, then `run`.

    `index` is its place in the list that is carried out, `listed_at` that in the list before its
    receives were moved: the one that users have before them, and errors name.
    """

    rank: int
    index: int
    listed_at: int
    action: Action
    operation: Operation
    run: Callable[[Call], None]
    wait: Callable[[], None]
    receives: list[Work]

    def is_blocked(self, call: Call) -> bool:
        """Whether it has to wait for another rank of this process."""
        if not all(work.is_completed() for work in self.receives):
            return True
        return self.operation.is_blocked(call)


def instruction(
    rank: int,
    index: int,
    listed_at: int,
    action: Action,
    operation: Operation,
    arrived: Sequence[list[Work]] = (),
) -> Instruction:
    """An instruction that waits for what its operation receives.

    `arrived` are the works of the sends that have arrived once that is there.
    """
    receives = operation.receives

    def wait() -> None:
        wait_for(receives)
        for sends in arrived:
            wait_for(sends)

    return Instruction(rank, index, listed_at, action, operation, operation.run, wait, receives)
