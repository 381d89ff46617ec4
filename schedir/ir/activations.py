"""How many activations a rank holds at once.

An activation lives from its FORWARD to its BACKWARD, or to its BACKWARD_WEIGHT.
"""

from __future__ import annotations

import numpy as np

from schedir.ir.actions import HOLDS_ACTIVATION, RELEASES_ACTIVATION
from schedir.ir.columns import Columns


def peak_activations(columns: Columns) -> list[tuple[int, int]]:
    """For each rank the most (stage, microbatch) activations that live at once in its list, and
    the index of the FORWARD that makes the last of them (0 where there is none)."""
    change = columns.is_kind(*HOLDS_ACTIVATION).astype(np.int64)
    change -= columns.is_kind(*RELEASES_ACTIVATION)
    peaks = []
    for start, end in zip(columns.starts[:-1].tolist(), columns.starts[1:].tolist(), strict=True):
        live = np.cumsum(change[start:end])
        index = int(live.argmax()) if end > start else 0
        peaks.append((max(int(live[index]), 0) if end > start else 0, index))
    return peaks
