"""What a schedule costs that no run has shown: costs that were derived from others."""

from __future__ import annotations

from collections.abc import Iterable

from schedir.ir import COMPUTE, KINDS, Kind, Schedule
from schedir.simulator.costs import CostModel
from schedir.simulator.fit import fitted_times
from schedir.simulator.samples import COSTS

_DERIVED = {
    "backward": "the sum of its two parts",
    "backward_input": "half of the backward",
    "backward_weight": "half of the backward",
    "recompute": "as the forward",
    "overlapped": "the sum of the two",
    "reduce_grad": "free, or as at other stages",
    "optim_step": "free, or as at other stages",
}


def unmeasured(schedule: Schedule, costs: CostModel) -> tuple[str, ...]:
    """The costs that the schedule has and no run has shown, where they were fitted: the names of
    CostModel's fields, in its order. One that was set by hand is none.

    A schedule of fewer stages, made of those that were measured, has the sums of their costs; one
    of more stages has parts of them, of which none was measured.
    """
    if costs.samples is None or not isinstance(costs.forward, tuple):
        return ()
    stages = len(costs.forward)
    each, parts = divmod(stages, schedule.stages)
    used = _used(schedule)
    if parts or not each:
        return tuple(name for name in COSTS if name in {cost for cost, _ in used})
    derived = fitted_times(costs.samples, stages)
    found = {
        name
        for name, stage in used
        for one in range(stage * each, (stage + 1) * each)
        if (name, one) not in costs.samples.groups
    }
    return tuple(name for name in COSTS if name in found and getattr(costs, name) == derived[name])


def how_derived(names: Iterable[str]) -> str:
    """What was taken for these costs, as in: backward_input (half of the backward)."""
    return ", ".join(f"{name} ({_DERIVED[name]})" if name in _DERIVED else name for name in names)


def _used(schedule: Schedule) -> set[tuple[str, int]]:
    """The costs that a schedule's compute and collectives have, each with its stage."""
    columns = schedule.columns
    listed = (*COMPUTE, Kind.REDUCE_GRAD)
    apart = columns.is_kind(*listed) & ~columns.shared
    kinds, stages = columns.kind[apart].tolist(), columns.stage[apart].tolist()
    found = {(KINDS[k].name.lower(), s) for k, s in zip(kinds, stages, strict=True)}
    pairs = columns.shared & columns.is_kind(Kind.FORWARD)
    return found | {("overlapped", stage) for stage in columns.stage[pairs].tolist()}
