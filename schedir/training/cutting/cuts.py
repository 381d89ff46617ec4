"""Where a list of layers is cut: the optimal cut by cost, and cuts that are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from schedir.errors import ExecutionError

Span = tuple[int, int]
"""The layers of one stage: its first, and the one after its last."""


def balanced(costs: Sequence[float], stages: int) -> tuple[Span, ...]:
    """The best cut of a list into `stages` contiguous parts, none of them empty.

    `costs` are one number per layer, of any unit. The most costly part costs the least that is
    possible; of the cuts for which that holds it has the least sum of squares, and of those the one
    whose earlier parts are longer, so that layers of no cost stay with the one before. Where all
    cost nothing, they count alike. Dynamic programming, O(stages × layers²) (Bokhari, IEEE Trans.
    Computers 37(1), 1988, solves the same by shortest paths). Returns, stage by stage, the first
    layer and the one after the last.

    Raises ExecutionError for more stages than layers, and for costs that are negative or no
    numbers.
    """
    check_number(len(costs), stages)
    check_costs(costs)
    if not any(costs):
        costs = [1] * len(costs)
    layers = len(costs)
    before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    cost = before[None, :] - before[:, None]  # of a part from the row to the column
    cost[np.tril_indices(layers + 1)] = np.inf
    # least[i]: the most costly part of the best cut of the layers from i on, into k parts.
    least = cost[:, layers]
    for _ in range(stages - 1):
        least = np.maximum(cost, least[None, :]).min(axis=1)
    squares = np.where(cost <= least[0], cost, np.inf) ** 2
    sums = squares[:, layers]
    ends = []
    for _ in range(stages - 1):
        totals = squares + sums[None, :]
        # Of equal ones the last: argmin gives the first.
        ends.append(layers - totals[:, ::-1].argmin(axis=1))
        sums = totals.min(axis=1)
    cuts = [0]
    for end in reversed(ends):
        cuts.append(int(end[cuts[-1]]))
    return tuple(pairwise([*cuts, layers]))


def spans_of(starts: Sequence[int], layers: int) -> tuple[Span, ...]:
    """The spans of stages that begin with the first layer and these."""
    return tuple(pairwise([0, *starts, layers]))


def check_number(layers: int, stages: int) -> None:
    """Raise ExecutionError where a stage would be empty."""
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise ExecutionError(f"a model is cut into 1 stage or more, not {stages!r}")
    if stages > layers:
        raise ExecutionError(
            f"{stages} stages can't be made of {layers} layer{'s' * (layers != 1)}, as none may be "
            "empty; take fewer stages, or list more and smaller layers"
        )


def check_costs(costs: Sequence[float]) -> None:
    """Raise ExecutionError for a cost that is none."""
    for number, cost in enumerate(costs):
        if isinstance(cost, bool) or not isinstance(cost, (int, float, np.number)):
            raise ExecutionError(f"costs: that of layer {number} must be a number, not {cost!r}")
        if not (math.isfinite(cost) and cost >= 0):
            raise ExecutionError(
                f"costs: that of layer {number} must be finite and at least 0, not {cost!r}"
            )
