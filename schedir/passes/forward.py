"""Keep only the forwards of a schedule, for evaluation."""

from __future__ import annotations

import attrs
import numpy as np

from schedir.ir import Kind, Schedule, starts_of

_KEPT = tuple(kind for kind in Kind if kind.meaning.evaluates)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a complete schedule and their transfers, in its order, at the newest weights.

    It can't deadlock if the schedule doesn't, because it keeps only a part of the waits.
    """
    kept = schedule.columns.where(*_KEPT)
    starts = starts_of(schedule.columns.rank[kept], schedule.ranks)
    forwards = schedule.take(kept, starts)
    newest = attrs.evolve(forwards.columns, version=np.full(len(kept), -1))
    return attrs.evolve(forwards, actions=newest)
