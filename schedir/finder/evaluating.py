"""When the steps of an order run, and what they keep: quickly, and exactly as `simulate` says."""

from __future__ import annotations

import math

import attrs

from schedir.finder.task import BACKWARD, FORWARD, LEAN, RECOMPUTE, Task
from schedir.graph.board import Order, most_held, run

_EVENLY = 0.05


@attrs.frozen(eq=False)
class Run:
    """When an order runs: `starts[rank]` are those of its steps, `ends[rank]` when the rank is done
    with its OPTIM_STEPs; `value` is what is to be least, and `ties` tells equal ones apart."""

    starts: list[list[float]]
    ends: list[float]
    value: float
    ties: float


def timed(task: Task, order: Order) -> Run | None:
    """Run an order; None where it blocks."""
    ran = run(task.steps, order)
    if ran is None:
        return None
    starts, clock = ran
    for rank, updates in enumerate(task.steps_after):
        for update in updates:
            clock[rank] += update
    if task.objective == "makespan":
        lasting = clock
    else:
        lasting = [end - begin[0] for begin, end in zip(starts, clock, strict=True)]
    value = max(lasting)
    return Run(starts, clock, value, sum(lasting) + sum(map(sum, starts)) / task.actions)


def score(task: Task, run: Run) -> float:
    """What a search compares by: mostly the value, and a little that all ranks are done early."""
    return run.value + _EVENLY * run.ties / task.ranks


def fits(task: Task, rank: int, steps: list[int]) -> bool:
    """Whether a rank can run its steps in this order, alone, and keeps no more than it may."""
    return most_held(task.steps, steps, task.memory.limit[rank]) < math.inf


def serial(task: Task) -> Order:
    """One microbatch after the other, which keeps the least: all forwards but that of a rank's last
    stage are run again, where they may be."""
    order: Order = [[] for _ in range(task.ranks)]
    stages, memory = task.stages, task.memory
    for rank, held in enumerate(task.stages_of):
        lean = [task.recompute and s != held[-1] and memory.lean[s] < memory.full[s] for s in held]
        one = [
            stages * (LEAN if short else FORWARD) + s for s, short in zip(held, lean, strict=True)
        ]
        for stage, short in zip(reversed(held), reversed(lean), strict=True):
            one += [stages * RECOMPUTE + stage] * short + [stages * BACKWARD + stage]
        order[rank] = one * task.microbatches
    return order
