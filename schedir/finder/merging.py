"""Where a backward need not be split: its W follows at once, and nobody waits for its gradient.

And where it has to be: a whole backward while an earlier W is put off would add up the gradients in
another order than the loss stage's, and training would round otherwise than in one process.
"""

from __future__ import annotations

import math

from schedir.finder.evaluating import Run, timed
from schedir.finder.task import BACKWARD, INPUT, WEIGHT, Task
from schedir.graph.board import BACK, Order


def merged(task: Task, order: Order, run: Run) -> tuple[Order, Run]:
    """The order with I and W made one B wherever they are of one microbatch, stand together and the
    gradient is not awaited for so long, and how it runs; as it was where that would take longer."""
    order, run = _no_longer(task, _in_turn(task, order), (order, run))
    stages, costs = task.stages, task.costs
    slack = _slack(task, order, run)
    found: Order = []
    turns = [0] * stages
    put_off = [0] * stages
    for steps in order:
        own: list[int] = []
        for step in steps:
            kind, stage = divmod(step, stages)
            put_off[stage] += (kind == INPUT) - (kind == WEIGHT)
            together = own and own[-1] == INPUT * stages + stage
            if kind == WEIGHT and together and not put_off[stage]:
                longer = costs.backward[stage] - costs.backward_input[stage]
                turn = turns[stage] - 1
                if longer <= costs.backward_weight[stage] and slack[stage][turn] >= longer:
                    own[-1] = BACKWARD * stages + stage
                    continue
            elif kind in (INPUT, BACKWARD):
                turns[stage] += 1
            own.append(step)
        found.append(own)
    return _no_longer(task, found, (order, run))


def _no_longer(task: Task, order: Order, other: tuple[Order, Run]) -> tuple[Order, Run]:
    """An order and how it runs; the other where that takes longer, or exceeds the limit."""
    run = timed(task, order)
    return other if run is None or run.value > other[1].value else (order, run)


def _in_turn(task: Task, order: Order) -> Order:
    """The order with each B that comes while a W of its stage is put off made an I and that W."""
    stages, found = task.stages, []
    put_off = [0] * stages
    for steps in order:
        own: list[int] = []
        for step in steps:
            kind, stage = divmod(step, stages)
            put_off[stage] += (kind == INPUT) - (kind == WEIGHT)
            if kind == BACKWARD and put_off[stage]:
                own += [INPUT * stages + stage, WEIGHT * stages + stage]
            else:
                own.append(step)
        found.append(own)
    return found


def _slack(task: Task, order: Order, run: Run) -> list[list[float]]:
    """By stage, how long the gradient of each microbatch's input lies there until it is used."""
    stages, travels = task.stages, task.steps.travels
    starts: list[list[float]] = [[] for _ in range(stages)]
    ends: list[list[float]] = [[] for _ in range(stages)]
    for steps, times in zip(order, run.starts, strict=True):
        for step, start in zip(steps, times, strict=True):
            kind, stage = divmod(step, stages)
            if kind in (BACKWARD, INPUT):
                starts[stage].append(start)
                ends[stage].append(start + task.steps.lasts[step])
    found = [[math.inf] * task.microbatches]
    for stage in range(1, stages):
        way = travels[BACK * stages + stage - 1]
        used = zip(starts[stage - 1], ends[stage], strict=True)
        found.append([start - end - way for start, end in used])
    return found
