"""How many activations a rank holds at once."""

from __future__ import annotations

from collections.abc import Sequence

from schedir.ir import Action, Kind


def peak_activations(actions: Sequence[Action]) -> int:
    """The most (stage, microbatch) activations that live at once in one rank's list.

    An activation lives from its FORWARD to its BACKWARD, or to its BACKWARD_WEIGHT.
    """
    live = peak = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            live += 1
            peak = max(peak, live)
        elif action.kind is Kind.BACKWARD or action.kind is Kind.BACKWARD_WEIGHT:
            live -= 1
    return peak
