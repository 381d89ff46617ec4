"""Random schedules some of whose neighbours run together."""

from __future__ import annotations

import random

import schedir
from schedir import Kind, Schedule, Together
from schedir.ir import Entry
from tests.test_random import drawn, scattered

_PAIRED = {Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT}


def joined(schedule: Schedule, chance: random.Random, share: float = 0.5) -> Schedule:
    """The schedule with some neighbours as pairs and batches."""
    lists: list[list[Entry]] = []
    for actions in schedule.flat:
        entries: list[Entry] = []
        for action in actions:
            before = entries[-1] if entries else None
            parts = before.actions if isinstance(before, Together) else (before,)
            try:
                if before is None or chance.random() >= share:
                    raise ValueError
                entries[-1] = Together((*(p for p in parts if p is not None), action))
            except ValueError:
                entries.append(action)
        lists.append(entries)
    return Schedule(schedule.name, schedule.microbatches, schedule.placement, lists)


def drawn_joined(chance: random.Random) -> Schedule:
    """A right schedule, complete, before some neighbours are joined: pairs in its compute first,
    then batches in its communication."""
    compute = drawn(chance)
    complete = scattered(schedir.insert_communication(compute), chance)
    return joined(complete, chance, chance.choice([0.3, 0.7, 1]))
