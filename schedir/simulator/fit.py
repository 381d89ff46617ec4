"""From measured runs to costs: the median of what each kind of action takes at each stage.

What no run has shown is derived as the textbook derives it: a backward that was not split is half
gradient of the input, half gradient of the weights; one that was only seen split is their sum. A
forward that was not seen to run again takes what it took.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from schedir.errors import SchedirError
from schedir.ir import Kind
from schedir.simulator.observing import agreed, observe
from schedir.simulator.samples import COSTS, Samples, median
from schedir.simulator.times import Numbers
from schedir.simulator.values import MOST

_PARTS = {
    kind: kind.traits.cost / Kind.BACKWARD.traits.cost
    for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
}
_UNLIKE, _MATTERS = 2, 0.05
"""Links have a latency each where one has so many times that of another, and the difference is such
a part of the shortest forward; jitter of what hardly counts is no reason."""
_Costs = dict[int, float]  # by stage


def fitted(timelines: Sequence[Any]) -> dict[str, Any]:
    """The fields of the CostModel that fits the timelines, its samples among them.

    Raises SchedirError where there is none, they differ in their stages or unit, or a stage was not
    seen to run forwards and backwards.
    """
    stages, unit = agreed(timelines)
    samples = observe(timelines)
    found = {name: _medians(samples, name) for name in COSTS}
    fields: dict[str, Any] = {
        "forward": _every(found["forward"], stages, "FORWARD"),
        **_backwards(found, stages),
        "reduce_grad": _some(found["reduce_grad"], stages),
        "optim_step": _some(found["optim_step"], stages),
        "unit": unit,
        "samples": samples,
    }
    if found["recompute"]:
        again = dict(enumerate(fields["forward"])) | found["recompute"]
        fields["recompute"] = tuple(again.values())
    if found["overlapped"]:
        both = zip(fields["forward"], fields["backward"], strict=True)
        sums = dict(enumerate(forward + backward for forward, backward in both))
        fields["overlapped"] = tuple((sums | found["overlapped"]).values())
    if found["recompute"]:
        forward = dict(enumerate(fields["forward"]))
        fields["recompute"] = tuple((forward | found["recompute"]).values())
    sizes = next((line.sizes for line in reversed(timelines) if line.sizes is not None), None)
    boundaries: Any = 0
    if sizes is not None:
        boundaries = sizes.boundary
        fields |= {
            "boundary_bytes": sizes.boundary,
            "input_bytes": sizes.input,
            "activation_bytes": sizes.activation,
            "deferred_bytes": sizes.deferred,
            "weight_bytes": sizes.weight,
            "gradient_bytes": sizes.gradient,
            "optimizer_bytes": sizes.optimizer,
        }
    return fields | _transfers(samples, boundaries, fields["forward"])


def _medians(samples: Samples, name: str) -> _Costs:
    return {
        stage: median(samples.duration[rows])
        for (cost, stage), rows in samples.groups.items()
        if cost == name
    }


def _every(found: Mapping[int, float], stages: int, what: str) -> tuple[float, ...]:
    for stage in range(stages):
        if stage not in found:
            raise SchedirError(
                f"no timeline shows how long a {what} of stage {stage} takes: give those of steps "
                "that ran it and whose times are known"
            )
    return tuple(found[stage] for stage in range(stages))


def _some(found: Mapping[int, float], stages: int) -> float | tuple[float, ...]:
    """One for each stage: where a stage has none, what is usual; 0 where none has any."""
    if not found:
        return 0
    usual = median(np.array(list(found.values())))
    return tuple(found.get(stage, usual) for stage in range(stages))


def _backwards(found: Mapping[str, _Costs], stages: int) -> dict[str, tuple[float, ...]]:
    whole = dict(found["backward"])
    parts = {kind: dict(found[kind.name.lower()]) for kind in _PARTS}
    split = set.intersection(*map(set, parts.values()))
    for stage in split - set(whole):
        whole[stage] = sum(costs[stage] for costs in parts.values())
    fields = {"backward": _every(whole, stages, "BACKWARD")}
    for kind, costs in parts.items():
        halves = {stage: _PARTS[kind] * cost for stage, cost in whole.items()}
        fields[kind.name.lower()] = _every(halves | costs, stages, kind.name)
    return fields


def _transfers(samples: Samples, boundary_bytes: Any, forward: Sequence[float]) -> dict[str, Any]:
    """Latency and bandwidth.

    They are told apart by boundaries of different sizes; where there is one size, all is latency.
    """
    rows = np.flatnonzero(samples.cost == COSTS.index("transfer"))
    if not len(rows):
        return {}
    by_boundary = isinstance(boundary_bytes, tuple)
    sizes = np.array(boundary_bytes)[samples.stage[rows]] if by_boundary else np.zeros(len(rows))
    per_byte = _slope(sizes, samples.duration[rows])
    rest = samples.duration
    if per_byte:
        rest = rest.astype(np.float64)
        rest[rows] = np.maximum(rest[rows] - per_byte * sizes, 0)
    latency = median(rest[rows])
    # The few that are waited for on a link where most come in time are its late ones.
    often = {link: own for link, own in samples.links.items() if len(own) >= len(samples.steps)}
    by_link = {link: median(rest[own]) for link, own in often.items()}
    low, high = min(by_link.values(), default=0), max(by_link.values(), default=0)
    found: dict[str, Any] = {
        "latency": latency,
        "bandwidth": 1 / per_byte if per_byte else math.inf,
    }
    if high > _UNLIKE * low and high - low > _MATTERS * min(forward):
        found["latency"] = _neighbours(1 + int(samples.rank.max()), latency) | by_link
    return found


def _slope(sizes: Numbers, durations: Numbers) -> float:
    """Time per byte, by the medians of boundaries of one size each; 0 where it can't be told."""
    distinct, counts = np.unique(sizes, return_counts=True)
    if len(distinct) < 2:
        return 0.0
    medians = np.array([np.median(durations[sizes == size]) for size in distinct])
    slope, latency = np.polyfit(distinct, medians, 1, w=np.sqrt(counts))
    if latency < 0:  # it is none at least
        some = distinct > 0
        slope = np.average(medians[some] / distinct[some], weights=counts[some])
    # No more than rounding, where a bandwidth is more than any cost can be.
    return float(slope) if slope * MOST > 1 else 0.0


def _neighbours(ranks: int, value: float) -> dict[tuple[int, int], float]:
    """The links of a chain and a ring of ranks, which schedules use: that a run had no transfer on
    one is no reason to refuse another schedule that has."""
    links = ((r, (r + further) % ranks) for r in range(ranks) for further in (1, -1))
    return {link: value for link in links if link[0] != link[1]}
