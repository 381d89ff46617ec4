"""Where a backward need not be split: its W follows at once, and nobody waits for its gradient."""

from __future__ import annotations

import math

from schedir.finder.evaluating import Run, timed
from schedir.finder.task import BACKWARD, INPUT, WEIGHT, Order, Task


def merged(task: Task, order: Order, run: Run) -> tuple[Order, Run]:
    """The order with I and W made one B wherever they stand together and the gradient is not
    awaited for so long, and how it runs; as it was where that would take longer."""
    stages, costs = task.stages, task.costs
    slack = _slack(task, order, run)
    found: Order = []
    turns = [0] * stages
    for steps in order:
        own: list[int] = []
        for step in steps:
            kind, stage = divmod(step, stages)
            # Which of several Ws it is makes no difference.
            if kind == WEIGHT and own and own[-1] == INPUT * stages + stage:
                longer = costs.backward[stage] - costs.backward_input[stage]
                turn = turns[stage] - 1
                if longer <= costs.backward_weight[stage] and slack[stage][turn] >= longer:
                    own[-1] = BACKWARD * stages + stage
                    continue
            elif kind in (INPUT, BACKWARD):
                turns[stage] += 1
            own.append(step)
        found.append(own)
    again = timed(task, found)
    if again is None or again.value > run.value:
        return order, run
    return found, again


def _slack(task: Task, order: Order, run: Run) -> list[list[float]]:
    """By stage, how long the gradient of each microbatch's input lies there until it is used."""
    stages, takes = task.stages, task.wiring.takes
    starts: list[list[float]] = [[] for _ in range(stages)]
    ends: list[list[float]] = [[] for _ in range(stages)]
    for steps, times in zip(order, run.starts, strict=True):
        for step, start in zip(steps, times, strict=True):
            kind, stage = divmod(step, stages)
            if kind in (BACKWARD, INPUT):
                starts[stage].append(start)
                ends[stage].append(start + task.durations[step])
    found = [[math.inf] * task.microbatches]
    for stage in range(1, stages):
        way = takes[stages + stage - 1]
        used = zip(starts[stage - 1], ends[stage], strict=True)
        found.append([start - end - way for start, end in used])
    return found
