"""Put the gradients of the weights into the gaps that a schedule leaves under given costs."""

from __future__ import annotations

import math
from collections import deque
from itertools import count
from typing import TYPE_CHECKING

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

    Raises SchedirError for costs of other stages or links.
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
    if costs is None:
        for n, action in block.actions.items():
            lasts[action.kind][action.stage] = block.length[n]
    else:
        lasts = {kind: [*costs.by_stage(kind.cost_name, stages)] for kind in lasts}
        sizes = costs.by_stage("boundary_bytes", stages - 1)
        for n in range(1, 2 * stages):
            source, target = block.rank[n - 1], block.rank[n]
            if source != target:
                size = sizes[min(block.actions[each].stage for each in (n - 1, n))]
                ways[n] = costs.way(source, target, size)[0], 0
    one = [1] * stages
    return steps_of(
        [block.rank[n] for n in range(stages)],
        (microbatches,),
        lasts,
        {"input": ways[:stages], "output gradient": ways[: stages - 1 : -1]},
        {"saved": one, "deferred": one},
    )
