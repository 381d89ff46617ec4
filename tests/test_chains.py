"""Passes after passes: of a right list each makes a right one, or refuses it with the reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias

import schedir
from schedir import LoadError, Schedule
from schedir.passes import advance_receives, insert_reductions, strip_communication
from tests.built_in import EVERY
from tests.sweeps import sweep
from tests.test_random import drawn, scattered

Pass: TypeAlias = Callable[[Schedule, random.Random], Schedule]


def some(schedule: Schedule, chance: random.Random) -> list[int]:
    return chance.sample(range(schedule.stages), chance.randint(1, schedule.stages))


PASSES: dict[str, Pass] = {
    "recompute": lambda schedule, chance: schedir.recompute(schedule, some(schedule, chance)),
    "offload": lambda schedule, chance: schedir.offload(
        schedule, some(schedule, chance), ahead=chance.randint(1, 3)
    ),
    "shard": lambda schedule, chance: schedir.shard(
        schedule, some(schedule, chance), ahead=chance.randrange(3)
    ),
    "without": lambda schedule, chance: schedir.without(
        schedule, chance.randrange(schedule.ranks), split=chance.random() < 0.3
    ),
    "insert_reductions": lambda schedule, chance: insert_reductions(schedule),
    "advance_receives": lambda schedule, chance: advance_receives(schedule, "async", 4),
    "again": lambda schedule, chance: schedir.insert_communication(strip_communication(schedule)),
}


def right(chance: random.Random) -> Schedule:
    """A list that is clean: a built-in one, or a drawn one."""
    if chance.random() < 0.5:
        name, ranks = chance.choice([*EVERY, *["1f1b-rr", "chimera"] * 5]), chance.choice([2, 3, 4])
        replicas = {2: None, 3: "2,1", 4: "2,2"}[ranks] if name == "1f1b-rr" else None
        shape: dict[str, Any] = {} if replicas is None else {"replicas": replicas}
        try:
            return schedir.build(name, ranks=ranks, microbatches=chance.choice([2, 4]), **shape)
        except schedir.SchedirError:  # a shape that it does not have
            return right(chance)
    complete = schedir.insert_communication(schedir.append_steps(drawn(chance)))
    return scattered(complete, chance) if chance.random() < 0.5 else complete


@sweep("seed", range(2000), quick=range(20))
def test_a_chain_of_passes_is_clean_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    schedule = right(chance)
    names = chance.choices([*PASSES], k=chance.choice([2, 3]))
    if not schedir.check(schedule, channel="async").ok:
        return  # scattered into a wrong one
    for number, name in enumerate(names):
        try:
            schedule = PASSES[name](schedule, chance)
        except (ValueError, LoadError):
            continue
        report = schedir.check(schedule, channel="async")  # which the receives are advanced for
        assert report.ok, (names[: number + 1], report.diagnostics[:3])
