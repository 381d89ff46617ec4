"""How many activations a rank holds at once.

An activation lives from its FORWARD to its BACKWARD, or to its BACKWARD_WEIGHT. In an overlapped
pair both activations live at once, in whichever order the two are listed.
"""

from __future__ import annotations

import numpy as np

from schedir.ir.actions import HOLDS_ACTIVATION, RELEASES_ACTIVATION
from schedir.ir.columns import Columns


def peak_activations(columns: Columns) -> list[tuple[int, int]]:
    """For each rank the most (stage, microbatch) activations that live at once in its list, and
    how many actions stand in the list before the FORWARD that makes the last of them (0 where there
    is none)."""
    change = columns.is_kind(*HOLDS_ACTIVATION).astype(np.int64)
    change -= columns.is_kind(*RELEASES_ACTIVATION)
    # As if the FORWARD of a pair were listed first.
    order = np.arange(len(columns))
    forwards = np.flatnonzero(columns.joined & (change > 0))
    order[forwards], order[forwards - 1] = forwards - 1, forwards
    change = change[order]
    peaks = []
    for start, end in zip(columns.starts[:-1].tolist(), columns.starts[1:].tolist(), strict=True):
        live = np.cumsum(change[start:end])
        most = int(live.argmax()) if end > start else 0
        forward = int(order[start + most]) - start if end > start else 0
        peaks.append((int(live.max(initial=0)), forward))
    return peaks
