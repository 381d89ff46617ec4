"""Keep only the forwards of a schedule, for evaluation."""

from __future__ import annotations

import attrs
import numpy as np

from schedir.ir import GATHERS, KINDS, RELEASES, Columns, Ints, Kind, Schedule, starts_of

_KEPT = tuple(kind for kind in Kind if kind.meaning.evaluates)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a complete schedule and their transfers, in its order, at the newest weights;
    of sharded stages the weights that they use are gathered.

    It can't deadlock if the schedule doesn't, because it keeps only a part of the waits.
    """
    kept = schedule.columns.where(*_KEPT)
    if schedule.columns.is_kind(*GATHERS).any():
        kept = np.setdiff1d(kept, _unused(schedule.columns, kept))
    starts = starts_of(schedule.columns.rank[kept], schedule.ranks)
    forwards = schedule.take(kept, starts)
    newest = attrs.evolve(forwards.columns, version=np.full(len(kept), -1))
    return attrs.evolve(forwards, actions=newest)


def _unused(columns: Columns, kept: Ints) -> list[int]:
    """The places of gatherings that no forward uses, with those of their releases."""
    found: list[int] = []
    gathered: dict[tuple[int, int], int] = {}  # by rank and stage, what is not used yet
    for place in kept.tolist():
        kind, at = KINDS[columns.kind[place]], (int(columns.rank[place]), int(columns.stage[place]))
        if kind in GATHERS:
            gathered[at] = place
        elif kind is Kind.FORWARD:
            gathered.pop(at, None)
        elif kind in RELEASES and at in gathered:
            found += [gathered.pop(at), place]
    return found
