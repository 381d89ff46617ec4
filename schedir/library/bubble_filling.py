"""Put the gradients of the weights into the gaps that a schedule leaves under given costs."""

from __future__ import annotations

import math
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

from schedir.graph.board import WAYS, Board, Steps, options, play, steps_of
from schedir.ir import Action
from schedir.library.blocks import Block, Run

if TYPE_CHECKING:
    from schedir.simulator import CostModel


def weights_put_off(
    block: Block, order: list[list[Run]], limit: int, costs: CostModel | None
) -> tuple[tuple[Action, ...], ...]:
    """The lists with each rank's BACKWARD_WEIGHTs where there is the time for one until its next
    action can run, or where it holds `limit` activations and is to run a FORWARD.

    The rest stays in its order until a rank has run its last FORWARD. Then memory no longer
    decides, and its BACKWARD_INPUTs run as soon as they can; a BACKWARD, being longer, would be in
    the way of a more urgent one. Without costs each action takes its slots.

    Raises ValueError for costs of other stages or links.
    """
    stages = block.stages
    number = {
        n: WAYS.index((action.kind, False)) * stages + action.stage
        for n, action in block.actions.items()
    }
    weight_of = {number[n - stages]: step for n, step in number.items() if n >= 2 * stages}
    ahead = [deque(number[n] for n, _ in own if n < 2 * stages) for own in order]
    weights: list[deque[int]] = [deque() for _ in order]
    steps = _steps(block, sum(map(len, order)) // len(block.actions), costs)
    board, changes = Board.of(steps), steps.changes
    forwards = [sum(changes[step] > 0 for step in own) for own in ahead]

    def choose(rank: int, now: float) -> tuple[float, int]:
        """What a rank that is free runs now, or by when something arrives for it."""
        arrivals = {value * stages + stage: at for at, value, stage in options(board, rank, now)}
        next_arrival, coming = math.inf, -1
        for step in ahead[rank]:
            if board.held[rank] + changes[step] <= limit:
                arrival = arrivals.get(steps.queue[step], math.inf)
                if arrival <= now:
                    ahead[rank].remove(step)
                    forwards[rank] -= changes[step] > 0
                    if step in weight_of:
                        weights[rank].append(weight_of[step])
                    return now, step
                if arrival < next_arrival:
                    next_arrival, coming = arrival, step
            if forwards[rank] or changes[step] < 0:
                break
        if weights[rank] and now + steps.lasts[weights[rank][0]] <= next_arrival:
            return now, weights[rank].popleft()
        return next_arrival, coming

    filled = play(board, choose)
    if filled is None:
        raise AssertionError("a block that fits the limit is blocked by it")
    turns = [count() for _ in steps.queue]
    return tuple(
        tuple(Action(WAYS[step // stages][0], step % stages, next(turns[step])) for step in own)
        for own in filled
    )


def _steps(block: Block, microbatches: int, costs: CostModel | None) -> Steps:
    """The block's steps. Transfers do not wait for each other, and an activation is held until its
    BACKWARD or BACKWARD_WEIGHT."""
    stages = block.stages
    lasts = {kind: [0.0] * stages for kind, _ in WAYS}
    ways: list[tuple[float, float]] = [(0, 0)] * (2 * stages)
    for n, action in block.actions.items():
        stage, lasting = action.stage, lasts[action.kind]
        if costs is None:
            lasting[stage] = block.length[n]
            continue
        lasting[stage] = _of(getattr(costs, action.kind.name.lower()), stage)
        link = block.rank.get(n - 1), block.rank[n]
        if 0 < n < 2 * stages and link[0] != link[1]:
            size = _of(costs.boundary_bytes, min(stage, block.actions[n - 1].stage))
            time = _of(costs.latency, link) + (size and size / _of(costs.bandwidth, link))
            ways[n] = time, 0
    one = [1] * stages
    return steps_of(
        [block.rank[n] for n in range(stages)],
        (microbatches,),
        lasts,
        {"input": ways[:stages], "output gradient": ways[: stages - 1 : -1]},
        {"saved": one, "deferred": one},
    )


def _of(value: Any, key: Any) -> float:
    """The number for a stage or link, of one for all or one for each."""
    if isinstance(value, (int, float)):
        return float(value)
    try:
        return float(value[key])
    except (IndexError, KeyError):
        raise ValueError(f"the costs lack those of {key}: are they for other stages?") from None
