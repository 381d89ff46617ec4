"""How long the ranks of this process need each weight version of a stage."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from schedir.graph.alive import StageVersions, weight_versions
from schedir.graph.compile import graph_of
from schedir.ir import Schedule


@attrs.frozen
class Lives:
    """Of each version that an OPTIM_STEP replaces whether it `outlives` that, as it is still read,
    and on how many ranks here it is read at all."""

    outlives: tuple[bool, ...]
    readers: tuple[int, ...]


def lives_of(schedule: Schedule, ranks: Iterable[int]) -> dict[int, Lives]:
    """Those of the stages of some ranks, which share the weights of a stage that several hold.

    Then the first of them that comes to an OPTIM_STEP carries it out; all have come to the sum of
    the gradients before it, but may read the old version after that.
    """
    sums = graph_of(schedule).sums
    starts = schedule.columns.starts.tolist()
    held: dict[int, list[tuple[int, StageVersions]]] = {}
    for rank in ranks:
        for stage, versions in weight_versions(schedule.columns, rank).items():
            held.setdefault(stage, []).append((starts[rank], versions))
    found = {}
    for stage, lists in held.items():
        numbers = range(max(len(versions.steps) for _, versions in lists))
        alone = len(lists) == 1

        def outlives(number: int, start: int, versions: StageVersions, alone: bool = alone) -> bool:
            if alone or number >= len(versions.steps):
                return versions.outlives_its_step(number)
            step = start + versions.steps[number]
            return start + versions.last_read.get(number, -1 - start) > sums.get(step, step)

        found[stage] = Lives(
            tuple(any(outlives(number, *one) for one in lists) for number in numbers),
            tuple(sum(number in versions.last_read for _, versions in lists) for number in numbers),
        )
    return found
