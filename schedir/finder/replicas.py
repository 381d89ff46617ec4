"""How many ranks each stage gets: PipeDream's planner (SOSP 2019, section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

from schedir.simulator import CostModel


@attrs.frozen
class ReplicaPlan:
    """`replicas[s]` ranks for each stage s. At best a microbatch comes out every `period`, in the
    costs' unit of time.

    >>> import schedir
    >>> plan = schedir.ReplicaPlan(replicas=(3, 1), period=4.0)
    >>> plan.throughput
    0.25
    """

    replicas: tuple[int, ...]
    period: float

    @property
    def throughput(self) -> float:
        """How many microbatches come out in a unit of time at best; infinite if everything is
        free."""
        return 1 / self.period if self.period else math.inf


def plan_replicas(costs: CostModel, ranks: int, stages: int | None = None) -> ReplicaPlan:
    """Divide `ranks` among the stages, each on one or more, so that the slowest stage is as quick
    as possible.

    A stage on r ranks takes 1 / r of its forward, backward and update for a microbatch, because its
    replicas take turns; with more than one replica, a `reduce_grad` is added to each. A boundary
    takes boundary_bytes / bandwidth, at the lowest bandwidth if links differ. The `period` is the
    largest of these times. This is the paper's dynamic program: the best use of some ranks for the
    first stages is the best use of fewer ranks for all but the last of them, and the rest for that
    one. Of equally good plans, the one with more ranks for earlier stages is chosen.

    The paper also cuts the layers into stages. Here the stages are given, and `stages` is their
    number if each cost is one number. All ranks are used.

    Raises ValueError if the number of stages is unknown or larger than the number of ranks, and
    SchedirError for costs of other stages.

    >>> import schedir
    >>> costs = schedir.CostModel(forward=(3, 1), backward=(6, 2))
    >>> schedir.plan_replicas(costs, ranks=4)
    ReplicaPlan(replicas=(3, 1), period=3.0)
    """
    stages = costs.stages if stages is None else stages
    if stages is None:
        raise ValueError("each cost is one number for all stages: pass the number of `stages`")
    if not 1 <= stages <= ranks:
        raise ValueError(f"{stages} stages need at least {stages} ranks, one each")
    once = [
        sum(parts)
        for parts in zip(
            costs.by_stage("forward", stages),
            costs.by_stage("backward", stages),
            costs.by_stage("optim_step", stages),
            strict=True,
        )
    ]
    sums = costs.by_stage("reduce_grad", stages)

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
    """How many of the remaining ranks a stage may have, with this many stages after it."""
    return range(1, left - after + 1) if after else range(left, left + 1)


def _of_boundaries(costs: CostModel, stages: int) -> float:
    """The longest time that a microbatch occupies a channel."""
    slowest = costs.bandwidth
    if isinstance(slowest, Mapping):
        slowest = min(slowest.values(), default=math.inf)
    sizes = costs.by_stage("boundary_bytes", stages - 1)
    return max((size / slowest for size in sizes), default=0)
