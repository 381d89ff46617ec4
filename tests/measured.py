"""Measured runs made up for tests: a schedule run on durations that are drawn from a known law."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import numpy as np

import schedir
from schedir import CostModel, Kind, Schedule, Timeline
from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE
from schedir.simulator import Measured
from schedir.simulator.samples import COSTS, DELAYED, ENTRY, TRANSFER, WITHIN, observed

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


def durations_of(timeline: Timeline) -> dict[tuple[int, int], float]:
    """How long each entry of a timeline took, if known: the `durations` for `simulate`, by (rank,
    index), that replay it.

    A transfer has the duration of its send. If nobody waited for it, it arrived at once; a transfer
    that had to queue has none.
    """
    columns, transfers = timeline.schedule.columns, graph_of(timeline.schedule).transfers
    sends, receives = transfers.send, transfers.receive
    behind, ahead = transfers.in_turn
    queued = sends[behind[timeline.ends[receives[ahead]] > timeline.starts[sends[behind]]]]
    places, costs, *_, durations = observed(timeline, step=0)
    used = costs != WITHIN
    if timeline.measured is not None:
        used &= ~np.isin(places, queued)
    found: dict[tuple[int, int], float] = {}
    for kinds in (ENTRY,), range(TRANSFER), (TRANSFER,), (DELAYED,), range(ENTRY + 1, len(COSTS)):
        for at in np.flatnonzero(used & np.isin(costs, kinds)).tolist():
            position = columns.position(int(places[at]))
            before = found.get(position, 0.0) if costs[at] < TRANSFER else 0.0
            found[position] = float(durations[at]) + before
    unseen = ~np.isnan(timeline.starts[sends]) & np.isnan(timeline.ends[sends])
    for place in sends[unseen].tolist():
        found.setdefault(columns.position(place), 0.0)
    return found
