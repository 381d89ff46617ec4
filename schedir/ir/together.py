"""Several actions as one entry of a rank's list: overlapped pairs, and batches of communication.

(0F4;7B3)                   a forward and a backward as one piece of compute: it starts when the
                            inputs of both are there, and hands on both outputs when it ends
(0SEND_ACT1;0RECV_GRAD0)    sends and receives posted as one, so that no order among them can
                            block; each still meets its own partner on its channel
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import attrs

from schedir.ir.action import Action
from schedir.ir.kinds import COMMUNICATION, CONSUMES, HOMES

OVERLAPS = HOMES | frozenset(CONSUMES)
"""The kinds that may be part of an overlapped pair: compute that uses another stage's result."""


def _as_tuple(actions: Iterable[Action]) -> tuple[Action, ...]:
    return tuple(actions)


@attrs.frozen
class Together:
    """Several actions as one entry, in list order.

    The entry is an overlapped pair (one FORWARD, and one BACKWARD or BACKWARD_INPUT of another
    stage or microbatch), or a batch of sends and receives. Raises ValueError for any other group,
    and TypeError for anything that is not an Action.

    >>> import schedir
    >>> pair = schedir.Together([schedir.forward(0, 4), schedir.backward(7, 3)])
    >>> print(pair, len(pair.actions))
    (0F4;7B3) 2
    """

    actions: tuple[Action, ...] = attrs.field(converter=_as_tuple)

    def __attrs_post_init__(self) -> None:
        actions = self.actions
        for action in actions:
            if isinstance(action, Together):
                raise ValueError(f"{action} can't stand in another entry: list its actions there")
            if not isinstance(action, Action):
                raise TypeError(f"{action!r} is not an Action")
        if len(actions) < 2:
            raise ValueError("two or more actions run together; one is an entry by itself")
        communicates = [action for action in actions if action.kind in COMMUNICATION]
        if len(communicates) == len(actions):
            action, times = Counter(actions).most_common(1)[0]
            if times > 1:
                raise ValueError(f"{action} is in the entry {times} times")
            return
        alone = [a for a in actions if a.kind not in COMMUNICATION | OVERLAPS]
        if alone:
            raise ValueError(
                f"{alone[0]} runs alone: a forward (F) runs together with a backward (B or I), and "
                "sends and receives with each other"
            )
        if communicates:
            computes = next(a for a in actions if a.kind not in COMMUNICATION)
            raise ValueError(
                f"{computes} computes and {communicates[0]} communicates: these don't run together"
            )
        if len(actions) > 2 or sum(action.kind in HOMES for action in actions) != 1:
            raise ValueError("an overlapped pair has one forward (F) and one backward (B or I)")
        one, other = sorted(actions, key=lambda action: action.kind not in HOMES)
        if (one.stage, one.microbatch) == (other.stage, other.microbatch):
            raise ValueError(f"{other} needs {one}, so the two can't start together")

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.actions))})"


Entry: TypeAlias = Action | Together
"""What stands at one index of a rank's list."""


def together(*actions: Action) -> Together:
    """Run the actions as one entry: a forward and a backward, or a batch of sends and receives.

    Raises what `Together` raises.

    >>> import schedir
    >>> print(schedir.together(schedir.send_act(0, 1), schedir.recv_grad(0, 0)))
    (0SEND_ACT1;0RECV_GRAD0)
    """
    return Together(actions)


def flat(entries: Iterable[Entry]) -> Iterator[Action]:
    """The actions of the entries, one after the other."""
    for entry in entries:
        if isinstance(entry, Together):
            yield from entry.actions
        else:
            yield entry
