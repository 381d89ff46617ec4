"""From measured runs to costs: the median duration of each kind of action at each stage.

Costs that no run has shown are derived as in the textbook: a backward that was never split is half
gradient of the input and half gradient of the weights; one that was always split is the sum of
both. A recomputation that was never seen takes as long as the forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.ir import COPIES, Bools, Kind
from schedir.ir.kinds import STAGE_WIDE, TIMED, moved
from schedir.simulator.samples import (
    COSTS,
    DELAYED,
    TRANSFER,
    WITHIN,
    Samples,
    observe,
)
from schedir.simulator.values import MOST, Numbers, Sizes, field_of

_PARTS = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_UNLIKE, _MATTERS = 2, 0.05
"""Links get separate latencies if one is this many times another, and if the difference is at least
this part of the shortest forward. Jitter of tiny latencies is no reason."""


def fitted(timelines: Sequence[Any]) -> dict[str, Any]:
    """The fields of the CostModel that fits the timelines, with its samples.

    Raises SchedirError if there is no timeline, if the timelines differ in stages or unit, or if
    some stage has no forward or no backward.
    """
    if not timelines:
        raise SchedirError(
            "there is no timeline to fit costs to: run steps with Executor(…, trace=True) and "
            "take executor.timelines() on rank 0"
        )
    first, stages = timelines[0], timelines[0].schedule.stages
    for line in timelines:
        if line.schedule.stages != stages:
            raise SchedirError(
                f"{line.schedule.name} has {line.schedule.stages} stages, {first.schedule.name} "
                f"{stages}: costs belong to one cut of a model; fit them separately"
            )
        if line.unit != first.unit:
            raise SchedirError(
                f"the times of {line.schedule.name} are in {line.unit or 'any unit'}, those of "
                f"{first.schedule.name} in {first.unit or 'any unit'}: fit them separately"
            )
    samples = observe(timelines)
    fields = fitted_times(samples, stages) | {"unit": first.unit, "samples": samples}
    sizes = next((line.sizes for line in reversed(timelines) if line.sizes is not None), Sizes())
    held = attrs.asdict(sizes, recurse=False)
    fields |= {field_of(name): size for name, size in held.items()}
    ranks = 1 + int(samples.rank.max())
    # The links of a chain and a ring of ranks, which schedules use: a measured run may have had no
    # transfer on some of them, and another schedule may need one.
    links = [(r, (r + far) % ranks) for r in range(ranks) for far in (1, -1) if ranks > 1]
    fields |= usual_links(samples, sizes.boundary, links)
    return fields | {"host_bandwidth": _host_bandwidth(samples, sizes, stages)}


def fitted_times(samples: Samples, stages: int) -> dict[str, Any]:
    """The costs of compute and collectives at each stage, by the CostModel's field: seen, or
    derived for some stage. What has the default of its field is left out.

    Raises SchedirError if some stage has no forward or no backward.
    """
    found = {name: _medians(samples, name) for name in COSTS}
    parts = [found[kind.cost_name] for kind in _PARTS]
    split = set.intersection(*map(set, parts))
    found["backward"] = {s: sum(costs[s] for costs in parts) for s in split} | found["backward"]
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for stage in range(stages):
            if stage not in found[kind.cost_name]:
                raise SchedirError(
                    f"no timeline shows how long a {kind.name} of stage {stage} takes: give those "
                    "of steps that ran it and whose times are known"
                )
    forward, backward = (
        np.array([found[name][s] for s in range(stages)]) for name in ("forward", "backward")
    )
    # What takes the place of a cost that was not seen: the usual one, or as in the textbook.
    usual = {"overlapped": forward + backward}
    for kind in TIMED:
        of, costs = kind.meaning.cost, found[kind.cost_name]
        if kind in STAGE_WIDE:
            usual[kind.cost_name] = np.full(stages, np.median([*costs.values()]) if costs else 0)
        elif kind in (Kind.BACKWARD, *_PARTS):
            usual[kind.cost_name] = of / Kind.BACKWARD.meaning.cost * backward
        else:
            usual[kind.cost_name] = of * forward
    return {
        name: tuple((dict(enumerate(instead.tolist())) | found[name]).values())
        for name, instead in usual.items()
        if found[name] or name in {kind.cost_name for kind in _PARTS}
    }


def _medians(samples: Samples, name: str) -> dict[int, float]:
    """The median of what was observed of a cost, by stage."""
    return {stage: usual for (cost, stage), usual in samples.medians.items() if cost == name}


def usual_links(
    samples: Samples, boundary_bytes: Any, links: Iterable[tuple[int, int]]
) -> dict[str, Any]:
    """The usual `latency` and `bandwidth` of the transfers in the samples, given the bytes that
    cross each boundary. If links differ, the latency is by link: of those observed, and of all
    these `links`.

    Latency and bandwidth can be told apart if boundaries differ in size; otherwise all is latency.
    """
    rows = np.flatnonzero(np.isin(samples.cost, (TRANSFER, WITHIN)))
    sizes = np.zeros(len(samples))
    if isinstance(boundary_bytes, tuple):
        sizes[rows] = np.array(boundary_bytes)[samples.stage[rows]]
    late = samples.cost == WITHIN
    per_byte = _slope(sizes[rows], samples.duration[rows], late[rows])
    rest = np.maximum(samples.duration - per_byte * sizes, 0)
    by_link = {}
    for link, each in samples.links.items():
        own = each[samples.cost[each] != DELAYED]
        # What tells of a link is at least one transfer a step that was waited for.
        if (~late[own]).sum() >= len(samples.steps):
            by_link[link] = usual(rest[own], late[own])
    low, high = min(by_link.values(), default=0), max(by_link.values(), default=0)
    shortest = min(_medians(samples, "forward").values(), default=0)
    unlike = high > _UNLIKE * low and high - low > _MATTERS * shortest
    latency = usual(rest[rows], late[rows])
    return {
        "latency": dict.fromkeys(links, latency) | by_link if unlike else latency,
        "bandwidth": 1 / per_byte if per_byte else math.inf,
    }


def _host_bandwidth(samples: Samples, sizes: Sizes, stages: int) -> float:
    """The bytes per unit of time of a copy to the host or back; infinite if no copy was seen to
    take any time."""
    speeds = [
        size / took
        for kind in COPIES
        for (cost, stage), rows in samples.groups.items()
        if cost == kind.cost_name and (size := sizes.of(moved(kind.meaning), stages)[stage])
        for took in samples.duration[rows].tolist()
        if took > 0
    ]
    return float(np.median(speeds)) if speeds else math.inf


def usual(durations: Numbers, within: Bools) -> float:
    """The median of durations, some of which are only known to be `within` a limit; 0 if all are.

    The median of the other durations alone would be that of the late ones, because nobody waits for
    a transfer that is in time. So each limited duration counts among the durations that its limit
    allows (the Kaplan-Meier estimate, time reversed).
    """
    known = durations[~within]
    if not len(known):
        return 0
    if not within.any():
        return float(np.median(known))
    values, here = np.unique(known, return_counts=True)
    up_to = np.searchsorted(np.sort(durations), values, side="right")
    below = np.cumprod((1 - here / up_to)[::-1])[::-1]  # the share that took less than each value
    least = int(np.argmax(np.append(below[1:], 1) > 0.5 - 1e-9))
    if least == 0 and below[0] >= 0.5:  # most took less than any that was waited for
        return float(np.median(np.minimum(durations[within & (durations <= values[0])], values[0])))
    upper = least + (least + 1 < len(values) and bool(np.isclose(below[least + 1], 0.5)))
    return float(values[least] + values[upper]) / 2


def _slope(sizes: Numbers, durations: Numbers, within: Bools) -> float:
    """Time per byte, by the medians of boundaries of one size each; 0 if it can't be told."""
    distinct, counts = np.unique(sizes[~within], return_counts=True)
    if len(distinct) < 2:
        return 0.0
    own = [sizes == size for size in distinct]
    medians = np.array([usual(durations[each], within[each]) for each in own])
    slope, latency = np.polyfit(distinct, medians, 1, w=np.sqrt(counts))
    if latency < 0:  # it is none at least
        some = distinct > 0
        slope = np.average(medians[some] / distinct[some], weights=counts[some])
    # No more than rounding, where a bandwidth is more than any cost can be.
    return float(slope) if slope * MOST > 1 else 0.0
