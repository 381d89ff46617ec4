"""Measured runs made up for tests: a schedule run on durations that are drawn from a known law."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import numpy as np

import schedir
from schedir import CostModel, Kind, Schedule, Timeline
from schedir.ir import COMPUTE
from schedir.simulator import Measured

Factor = Callable[[int, int, int], float]
"""(step, rank, stage) → by how much longer an entry takes; asked once for each entry."""
LATENCY = 0.05
TIMES = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.OPTIM_STEP: 0.3}


def measured_run(
    schedule: Schedule,
    steps: int,
    factor: Factor,
    *,
    times: Mapping[Kind, float] = TIMES,
    uneven: float = 0.1,
    first: int = 1,
) -> list[Timeline]:
    """A run of so many steps, numbered from `first`; stage s takes 1 + s × `uneven` of `times`."""
    columns = schedule.columns
    entries = [
        (columns.position(place), times[a.kind] * (1 + uneven * a.stage), a.stage)
        for place in columns.where(*COMPUTE).tolist()
        if (a := columns.action(place))
    ]
    lines = []
    for step in range(steps):
        durations = {at: own * factor(step, at[0], stage) for at, own, stage in entries}
        line = schedir.simulate(schedule, CostModel(latency=LATENCY), durations=durations)
        lines.append(attrs.evolve(line, unit="s", measured=Measured(first + step)))
    return lines


def jitter(seed: int, entry: float = 0.0, step: float = 0.0, rank: float = 0.0) -> Factor:
    """Lognormal factors of each entry, of each step, and of each rank in each step, by sigma."""
    chance = np.random.default_rng(seed)
    known: dict[tuple[int, ...], float] = {}

    def factor(number: int, on: int, stage: int) -> float:
        for key, sigma in (((number,), step), ((number, on), rank)):
            if key not in known:
                known[key] = sigma * chance.standard_normal()
        return float(np.exp(known[number,] + known[number, on] + entry * chance.standard_normal()))

    return factor


def even(step: int, rank: int, stage: int) -> float:
    """Nothing jitters."""
    return 1.0
