"""What is alive when, according to the lists: activations, and weight versions.

A stage's weights start at version 0 and each update makes the next. A forward reads `@version` if
given, else the newest version at its place in the list. Every other action that reads the weights
for the microbatch reads the version of its forward (weight stashing, PipeDream, SOSP 2019, section
3.3). A version lives until the last listed action that reads it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import Literal, TypeAlias

import attrs
import numpy as np

from schedir.graph.compile import Graph
from schedir.ir import HOMES, KIND_INDEX, READS_WEIGHTS, STEPS, VALUES, Columns

HeldUntil: TypeAlias = Literal["W", "I"]
HELD_UNTIL: tuple[HeldUntil, ...] = ("W", "I")
"""Until when an activation of a split backward may count: until its gradient of the weights, or
until its gradient of the input, after which only what the other part needs is left."""


def peak_activations(graph: Graph, until: HeldUntil = "W") -> list[tuple[int, int]]:
    """For each rank, the most (stage, microbatch) activations that live at once in its list, and
    how many actions are listed before the one that makes the last of them (0 if there is none).

    All changes at the start of an entry happen at once, and so do those at its end. An activation
    that is copied to the host no longer counts.
    """
    columns = graph.columns
    units = {name: value.units for name, value in VALUES.items() if value.units}
    if until == "I":  # what is made as an activation ends is the rest of it
        units.pop("deferred")
    points = 2 * len(columns.heads)
    change, maker = np.zeros(points, np.int64), np.full(points, -1)
    for touch in graph.touches(*units):
        point = 2 * columns.entry[touch.places] + (touch.use.at == "end")
        many = units[touch.use.value] * np.bincount(point, minlength=points)
        if touch.use.does == "make":
            maker[point] = touch.places
            change += many
        elif touch.use.does == "end":
            change -= many
    bounds = 2 * np.append(columns.entry, len(columns.heads))[columns.starts]
    peaks = []
    for start, begin, end in zip(columns.starts, bounds[:-1], bounds[1:], strict=False):
        own = np.cumsum(change[begin:end])
        most = int(own.max(initial=0))
        # It begins where something is made.
        peaks.append((most, int(maker[begin + own.argmax()] - start) if most else 0))
    return peaks


@attrs.frozen
class StageVersions:
    """The weight versions of one stage on one rank.

    `reads[microbatch]` is the version that its FORWARD reads. `steps[v]` is the place of the
    OPTIM_STEP after which version v is no longer the newest. `last_read[v]` is the place of the
    last action that reads version v. Places are counted from the start of the rank's list, in
    actions.
    """

    reads: dict[int, int] = attrs.field(factory=dict)
    steps: list[int] = attrs.field(factory=list)
    last_read: dict[int, int] = attrs.field(factory=dict)

    def outlives_its_step(self, version: int) -> bool:
        """True where `version` is still read after the OPTIM_STEP that replaces it."""
        return version < len(self.steps) and self.last_read.get(version, -1) > self.steps[version]

    def peak(self) -> tuple[int, int | None]:
        """The most versions alive at once, the newest included, and the place of the OPTIM_STEP
        that makes the last of them (None if there is never more than one).

        An OPTIM_STEP whose old version nobody reads any more updates in place and adds none.
        """
        # The number alive only grows at an OPTIM_STEP, so it is enough to look right after each.
        ends = sorted(max(step, self.last_read.get(v, -1)) for v, step in enumerate(self.steps))
        alive = [2 + v - bisect_right(ends, step) for v, step in enumerate(self.steps)]
        most = max(alive, default=1)
        return most, self.steps[alive.index(most)] if most > 1 else None


def weight_versions(columns: Columns, rank: int) -> dict[int, StageVersions]:
    """The weight versions of every stage in one rank's list, keyed by stage."""
    start, end = columns.starts[rank : rank + 2].tolist()
    own = start + np.flatnonzero(np.isin(columns.kind[start:end], _CONCERNED))
    stages = defaultdict[int, StageVersions](StageVersions)
    for place, code, number, microbatch, version in zip(
        own.tolist(),
        columns.kind[own].tolist(),
        columns.stage[own].tolist(),
        columns.microbatch[own].tolist(),
        columns.version[own].tolist(),
        strict=True,
    ):
        stage = stages[number]
        if code in _HOMES:
            read = len(stage.steps) if version < 0 else version
            stage.reads[microbatch] = read
            stage.last_read[read] = place - start
        elif code in _STEPS:
            stage.steps.append(place - start)
        elif microbatch in stage.reads:
            stage.last_read[stage.reads[microbatch]] = place - start
    return {**stages}


_HOMES, _STEPS = ({KIND_INDEX[kind] for kind in kinds} for kinds in (HOMES, STEPS))
_CONCERNED = [KIND_INDEX[kind] for kind in (*READS_WEIGHTS, *STEPS)]


def later_versions(graph: Graph) -> dict[int, dict[int, StageVersions]]:
    """The weight versions of every stage on each rank that may have several of one: where something
    of a rank's stages comes after their steps."""
    columns = graph.columns
    reading = columns.is_kind(*READS_WEIGHTS) & (graph.turn > 0)
    return {rank: weight_versions(columns, rank) for rank in set(columns.rank[reading].tolist())}
