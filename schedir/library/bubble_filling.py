"""Where the gradients of weights run: in the gaps that a program leaves under given costs."""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import attrs

from schedir.ir import Kind
from schedir.library.blocks import Block, Number, Run

if TYPE_CHECKING:
    from schedir.simulator import CostModel


def weights_put_off(
    block: Block, order: list[list[Run]], limit: int, costs: CostModel | None
) -> list[list[Run]]:
    """The lists with each rank's BACKWARD_WEIGHTs where there is the time for one until its next
    action can run, or where it holds `limit` activations and is to run a FORWARD.

    The rest stays in its order until a rank has run its last FORWARD. Then memory no longer
    decides, and its BACKWARD_INPUTs run as soon as they can; a BACKWARD, being longer, would be in
    the way of a more urgent one. Without costs each action takes its slots.
    """
    times = _Times.of(block, costs)
    ahead = [deque(run for run in own if run[0] < 2 * block.stages) for own in order]
    forwards = [sum(block.is_forward(n) for n, _ in own) for own in order]
    weights: list[deque[Run]] = [deque() for _ in order]
    lists: list[list[Run]] = [[] for _ in order]
    free, live = [0.0] * block.ranks, [0] * block.ranks
    arrivals = {run: 0.0 for own in order for run in own if run[0] == 0}

    def chosen(rank: int, now: float) -> Run | None:
        """What a rank that is free runs now; None where it waits for an arrival."""
        next_arrival = math.inf
        for n, m in ahead[rank]:
            if not (block.is_forward(n) and live[rank] == limit):
                arrival = arrivals.get((n, m), math.inf)
                if arrival <= now:
                    ahead[rank].remove((n, m))
                    return n, m
                next_arrival = min(next_arrival, arrival)
            if forwards[rank] or block.actions[n].kind is Kind.BACKWARD:
                break
        if weights[rank] and now + times.takes[weights[rank][0][0]] <= next_arrival:
            return weights[rank].popleft()
        return None

    agenda = [(0.0, rank) for rank in range(block.ranks)]
    while agenda:
        now, rank = heappop(agenda)
        run = chosen(rank, now) if free[rank] <= now else None
        if run is None:
            continue
        n, m = run
        lists[rank].append(run)
        free[rank] = now + times.takes[n]
        heappush(agenda, (free[rank], rank))
        if n + 1 < 2 * block.stages:
            arrivals[n + 1, m] = free[rank] + times.travels[n + 1]
            heappush(agenda, (arrivals[n + 1, m], block.rank[n + 1]))
        if block.is_forward(n):
            live[rank] += 1
            forwards[rank] -= 1
        elif block.actions[n].kind is Kind.BACKWARD_INPUT:
            weights[rank].append((n + block.stages, m))
        else:
            live[rank] -= 1
    return lists


@attrs.frozen
class _Times:
    """How long each action takes, and how long its input is on its way to the rank."""

    takes: dict[Number, float]
    travels: dict[Number, float]

    @classmethod
    def of(cls, block: Block, costs: CostModel | None) -> _Times:
        """Those of the costs, of transfers that do not wait for each other; or of the slots.

        Raises ValueError for costs of other stages or links.
        """
        way = range(1, 2 * block.stages)
        if costs is None:
            return cls(
                {n: float(slots) for n, slots in block.length.items()}, dict.fromkeys(way, 0)
            )
        takes = {
            n: _of(getattr(costs, action.kind.name.lower()), action.stage)
            for n, action in block.actions.items()
        }
        return cls(takes, {n: _travel(block, costs, n) for n in way})


def _travel(block: Block, costs: CostModel, n: Number) -> float:
    stages = block.actions[n - 1].stage, block.actions[n].stage
    link = block.rank[n - 1], block.rank[n]
    if link[0] == link[1]:
        return 0
    size = _of(costs.boundary_bytes, min(stages))
    return _of(costs.latency, link) + (size / _of(costs.bandwidth, link) if size else 0)


def _of(value: Any, key: Any) -> float:
    """The number for a stage or link, of one for all or one for each."""
    if isinstance(value, (int, float)):
        return float(value)
    try:
        return float(value[key])
    except (IndexError, KeyError):
        raise ValueError(f"the costs lack those of {key}: are they for other stages?") from None
