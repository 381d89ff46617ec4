"""How many activations a rank holds at once.

An activation lives from its FORWARD, or from its RECOMPUTE where it has one, to its BACKWARD, or to
its BACKWARD_WEIGHT. A forward that is run again keeps its input alone, which is no activation. In
an overlapped pair both activations live at once, in whichever order the two are listed.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from schedir.ir.columns import Bools, Columns
from schedir.ir.kinds import COMPLETES_GRADIENTS, Kind

HeldUntil: TypeAlias = Literal["W", "I"]
_RELEASED_BY: dict[HeldUntil, frozenset[Kind]] = {
    "W": COMPLETES_GRADIENTS,
    "I": frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT}),
}
HELD_UNTIL: tuple[HeldUntil, ...] = tuple(_RELEASED_BY)
"""Until when an activation of a split backward may be counted."""


def run_again(columns: Columns) -> Bools:
    """Where a FORWARD stands whose rank lists a RECOMPUTE of it."""
    again = columns.where(Kind.RECOMPUTE)
    found = np.zeros(len(columns), np.bool_)
    if len(again):
        forwards = columns.where(Kind.FORWARD)
        found[forwards] = columns.alike(forwards, again)
    return found


def makes_activation(columns: Columns) -> Bools:
    """Where an activation begins to live."""
    return columns.is_kind(Kind.FORWARD, Kind.RECOMPUTE) & ~run_again(columns)


def peak_activations(columns: Columns, until: HeldUntil = "W") -> list[tuple[int, int]]:
    """For each rank the most (stage, microbatch) activations that live at once in its list, and
    how many actions stand in the list before what makes the last of them (0 where there is none).

    That of a split backward counts until its W, or until its I: then what W needs counts as none.
    """
    change = makes_activation(columns).astype(np.int64)
    change -= columns.is_kind(*_RELEASED_BY[until])
    # As if the FORWARD of a pair were listed first.
    order = np.arange(len(columns))
    forwards = np.flatnonzero(columns.joined & (change > 0))
    order[forwards], order[forwards - 1] = forwards - 1, forwards
    change = change[order]
    peaks = []
    for start, end in zip(columns.starts[:-1].tolist(), columns.starts[1:].tolist(), strict=True):
        live = np.cumsum(change[start:end])
        most = int(live.argmax()) if end > start else 0
        makes = int(order[start + most]) - start if end > start else 0
        peaks.append((int(live.max(initial=0)), makes))
    return peaks
