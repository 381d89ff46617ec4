"""The built-in schedules: all of them, found as `schedir list` finds them, and the core ones.

What depends on the schedule alone is tested with each of them in `tests/schedules/`, where a new
file is found by its being there. What multiplies schedules by features, devices and shapes takes
the core ones: with a flush, interleaved, asynchronous.
"""

from __future__ import annotations

from typing import Any

import schedir
from schedir import Kind
from schedir.library import built_in

EVERY = {generator.name: generator for generator in built_in()}
NAMES = ("1f1b", "fill-drain", "interleaved-1f1b", "pipedream")
GENERATORS = {name: EVERY[name] for name in NAMES}


def variants(name: str) -> list[dict[str, Any]]:
    """The parameters to build it with: two and three chunks, and each switch on and off."""
    generator = EVERY[name]
    found: list[dict[str, Any]] = [{}]
    if generator.chunks > 1:
        found = [{"chunks": 2}, {"chunks": 3}]
    for parameter in generator.parameters.values():
        if isinstance(parameter.default, bool):
            found = [{**one, parameter.name: on} for one in found for on in (False, True)]
    return found


def steps_once(schedule: schedir.Schedule) -> bool:
    """Whether each stage has one update, as in synchronous training."""
    steps = [a for actions in schedule.flat for a in actions if a.kind is Kind.OPTIM_STEP]
    return len(steps) == sum(len(held) for held in schedule.placement)


SYNCHRONOUS = tuple(
    name for name in NAMES if steps_once(schedir.build(name, ranks=2, microbatches=3))
)
