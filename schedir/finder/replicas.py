"""How many ranks each stage gets: PipeDream's planner (SOSP 2019, section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from schedir.finder.terms import by_stage
from schedir.simulator import CostModel


@attrs.frozen
class ReplicaPlan:
    """`replicas[s]` ranks for each stage s; at best a microbatch comes out every `period`, in the
    costs' unit of time."""

    replicas: tuple[int, ...]
    period: float

    @property
    def throughput(self) -> float:
        """The microbatches that come out in a unit of time at best; infinite where all is free."""
        return 1 / self.period if self.period else math.inf


def plan_replicas(costs: CostModel, ranks: int, stages: int | None = None) -> ReplicaPlan:
    """Share `ranks` out among the stages, each on one or more, so that the slowest is quickest.

    A stage on r ranks takes 1 / r of its forward, backward and update for a microbatch, as its
    replicas take turns; with more than one a `reduce_grad` comes to each of these. A boundary takes
    boundary_bytes / bandwidth, of links of several bandwidths the lowest. The `period` is the
    largest of all these, as in the paper, whose dynamic program this is: the best use of so many
    ranks for the first stages is that of fewer ranks for all but the last one of them, and the rest
    for that. Of equally good plans the one with more ranks for earlier stages.

    The paper cuts the layers into stages as well; here the stages are given, `stages` of them where
    each cost is one number. All of the ranks are used.

    Raises ValueError where the number of stages is not known or above that of the ranks,
    SchedirError for costs of other stages.
    """
    stages = costs.stages if stages is None else stages
    if stages is None:
        raise ValueError("each cost is one number for all stages: say how many `stages` there are")
    if not 1 <= stages <= ranks:
        raise ValueError(f"{stages} stages, each on ranks of its own, take {stages} ranks or more")
    once = [
        sum(parts)
        for parts in zip(
            by_stage("forward", costs.forward, stages),
            by_stage("backward", costs.backward, stages),
            by_stage("optim_step", costs.optim_step, stages),
            strict=True,
        )
    ]
    sums = by_stage("reduce_grad", costs.reduce_grad, stages)

    def period(stage: int, replicas: int) -> float:
        return (once[stage] + (sums[stage] if replicas > 1 else 0)) / replicas

    def least(stage: int, replicas: int, left: int) -> float:
        """Of the stages from this one on, which has so many of the ranks that are left."""
        return max(period(stage, replicas), best[stage + 1][left - replicas])

    # By stage and the ranks that are left for it and those after it, the least period.
    best: list[dict[int, float]] = [{} for _ in range(stages)]
    best.append({0: _of_boundaries(costs, stages)})
    for stage in reversed(range(stages)):
        after = stages - stage - 1
        for left in range(1 + after, ranks - stage + 1):
            best[stage][left] = min(least(stage, r, left) for r in _shares(left, after))
    found: list[int] = []
    for stage in range(stages):
        left, after = ranks - sum(found), stages - stage - 1
        good = (r for r in _shares(left, after) if least(stage, r, left) <= best[0][ranks])
        found.append(max(good))
    return ReplicaPlan(tuple(found), best[0][ranks])


def _shares(left: int, after: int) -> range:
    """How many of the ranks that are left a stage may have, with so many stages after it."""
    return range(1, left - after + 1) if after else range(left, left + 1)


def _of_boundaries(costs: CostModel, stages: int) -> float:
    """The most that a microbatch occupies a channel."""
    slowest = costs.bandwidth
    if isinstance(slowest, Mapping):
        slowest = min(slowest.values(), default=math.inf)
    sizes = by_stage("boundary_bytes", costs.boundary_bytes, stages - 1)
    return max((size / slowest for size in sizes), default=0)
