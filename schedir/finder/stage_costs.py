"""What each stage of a pipeline takes, and each way between two: costs, looked up once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import attrs

from schedir.errors import SchedirError
from schedir.simulator import CostModel
from schedir.simulator.values import PerLink, PerStage


@attrs.frozen
class StageCosts:
    """The costs of a pipeline whose stage s is on the rank `placement[s]`, one number per stage.

    `down[s]` is how long the output of stage s - 1 takes to its stage, `up[s]` the gradient of
    stage s + 1 to stage s: 0 on one rank, and where there is no such stage. `down_holds` and
    `up_holds` are the parts of them that the channel is occupied for.
    """

    placement: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    recompute: tuple[float, ...]
    optim_step: tuple[float, ...]
    down: tuple[float, ...]
    up: tuple[float, ...]
    down_holds: tuple[float, ...]
    up_holds: tuple[float, ...]

    @classmethod
    def of(cls, placement: Sequence[int], costs: CostModel) -> StageCosts:
        """Look them up. Raises SchedirError for costs of other stages, or that lack a link."""
        stages = len(placement)
        links = list(pairwise(placement))
        sizes = by_stage("boundary_bytes", costs.boundary_bytes, stages - 1)
        down: list[tuple[float, float]] = [(0, 0)]
        up: list[tuple[float, float]] = []
        for (a, b), size in zip(links, sizes, strict=True):
            down.append(_way(costs, a, b, size))
            up.append(_way(costs, b, a, size))
        up.append((0, 0))
        again = costs.forward if costs.recompute is None else costs.recompute
        return cls(
            tuple(placement),
            by_stage("forward", costs.forward, stages),
            by_stage("backward", costs.backward, stages),
            by_stage("backward_input", costs.backward_input, stages),
            by_stage("backward_weight", costs.backward_weight, stages),
            by_stage("recompute", again, stages),
            by_stage("optim_step", costs.optim_step, stages),
            *(tuple(way[0] for way in ways) for ways in (down, up)),
            *(tuple(way[1] for way in ways) for ways in (down, up)),
        )

    @property
    def stages(self) -> range:
        """The numbers of the stages."""
        return range(len(self.placement))

    @property
    def ranks(self) -> range:
        """The numbers of the ranks."""
        return range(1 + max(self.placement))

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, ascending."""
        return [s for s in self.stages if self.placement[s] == rank]


def by_stage(name: str, value: PerStage, many: int) -> tuple[float, ...]:
    """One number for each of so many stages. Raises SchedirError where there are others."""
    if not isinstance(value, tuple):
        return (value,) * many
    if len(value) != many:
        raise SchedirError(
            f"{name} has {len(value)} numbers where {many} are needed: give one for each, or one "
            "number for all"
        )
    return value


def _way(costs: CostModel, source: int, target: int, size: float) -> tuple[float, float]:
    """How long a transfer takes, and how long its channel is occupied."""
    if source == target:
        return 0, 0
    holds = _quotient(size, _of_link("bandwidth", costs.bandwidth, (source, target)))
    return _of_link("latency", costs.latency, (source, target)) + holds, holds


def _of_link(name: str, value: PerLink, link: tuple[int, int]) -> float:
    if not isinstance(value, Mapping):
        return value
    if link not in value:
        raise SchedirError(f"{name} has no number for the link {link}: add it")
    return value[link]


def _quotient(size: float, bandwidth: float) -> float:
    if not size or bandwidth == math.inf:
        return 0
    return size // bandwidth if size % bandwidth == 0 else size / bandwidth
