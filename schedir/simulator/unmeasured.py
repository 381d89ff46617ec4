"""What a schedule costs that no run has shown: costs that were derived from others."""

from __future__ import annotations

import math
from collections.abc import Iterable

from schedir.ir import COPIES, HOMES, KINDS, Schedule
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
    "host_bandwidth": "copies are free",
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
        fields = {_FIELDS[cost] for cost, _ in used}
        return tuple(name for name in dict.fromkeys(_FIELDS.values()) if name in fields)
    derived = {"host_bandwidth": math.inf, **fitted_times(costs.samples, stages)}
    found = {
        _FIELDS[cost]
        for cost, stage in used
        for one in range(stage * each, (stage + 1) * each)
        if (cost, one) not in costs.samples.groups
    }
    return tuple(
        name
        for name in dict.fromkeys(_FIELDS.values())
        if name in found and getattr(costs, name) == derived[name]
    )


def how_derived(names: Iterable[str]) -> str:
    """What was taken for these costs, as in: backward_input (half of the backward)."""
    return ", ".join(f"{name} ({_DERIVED[name]})" if name in _DERIVED else name for name in names)


_FIELDS = {
    **{cost: cost for cost in COSTS if hasattr(CostModel, cost)},
    **{kind.name.lower(): "host_bandwidth" for kind in COPIES},
}
"""By what is observed, the field of the CostModel that says what it takes."""


def _used(schedule: Schedule) -> set[tuple[str, int]]:
    """What of a schedule costs anything, as is observed, each with its stage."""
    columns = schedule.columns
    pairs = columns.shared & columns.is_kind(*HOMES)
    found = {("overlapped", stage) for stage in columns.stage[pairs].tolist()}
    kinds, stages = (column[~columns.shared].tolist() for column in (columns.kind, columns.stage))
    found |= {(KINDS[k].name.lower(), s) for k, s in {*zip(kinds, stages, strict=True)}}
    return {(cost, stage) for cost, stage in found if cost in _FIELDS}
