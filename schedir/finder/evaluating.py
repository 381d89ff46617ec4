"""When the steps of an order run, and what they keep: quickly, and exactly as `simulate` says."""

from __future__ import annotations

import attrs

from schedir.finder.task import BACKWARD, FORWARD, INPUT, LEAN, RECOMPUTE, WEIGHT, Order, Task

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
    wiring, durations = task.wiring, task.durations
    needs, feeds, channel = wiring.needs, wiring.feeds, wiring.channel
    takes, holds = wiring.takes, wiring.holds
    queues = 2 * task.stages
    arrivals: list[list[float]] = [[] for _ in range(queues)]
    waiting = [-1] * queues
    used = [0] * queues
    free: list[float] = [0] * wiring.channels
    clock: list[float] = [0] * len(order)
    reached = [0] * len(order)
    starts: list[list[float]] = [[] for _ in order]
    ready = list(range(len(order)))
    left = len(order)
    while ready:
        rank = ready.pop()
        steps, time, put = order[rank], clock[rank], starts[rank].append
        for place in range(reached[rank], len(steps)):
            step = steps[place]
            queue = needs[step]
            if queue >= 0:
                turn, arrived = used[queue], arrivals[queue]
                if turn == len(arrived):
                    waiting[queue] = rank
                    reached[rank] = place
                    break
                used[queue] = turn + 1
                if arrived[turn] > time:
                    time = arrived[turn]
            put(time)
            time += durations[step]
            queue = feeds[step]
            if queue >= 0:
                held = channel[queue]
                if held < 0:
                    arrivals[queue].append(time + takes[queue])
                else:
                    begin = time if time > free[held] else free[held]
                    free[held] = begin + holds[queue]
                    arrivals[queue].append(begin + takes[queue])
                if waiting[queue] >= 0:
                    ready.append(waiting[queue])
                    waiting[queue] = -1
        else:
            left -= 1
        clock[rank] = time
    if left:
        return None
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
    stages, kept, memory = task.stages, task.kept, task.memory
    limit, held = memory.limit[rank], 0.0
    gradient = dict.fromkeys(task.stages_of[rank], True)
    forwards = dict.fromkeys(gradient, 0)
    backwards, inputs, weights = forwards.copy(), forwards.copy(), forwards.copy()
    lean: dict[int, list[int]] = {stage: [] for stage in gradient}
    again = forwards.copy()
    for step in steps:
        kind, stage = divmod(step, stages)
        if kind <= LEAN:
            if kind == LEAN:
                lean[stage].append(forwards[stage])
            forwards[stage] += 1
        elif kind in (BACKWARD, INPUT):
            turn = backwards[stage]
            if turn >= forwards[stage]:
                return False
            runs = again[stage]
            if runs < len(lean[stage]) and lean[stage][runs] <= turn:
                return False
            backwards[stage] = turn + 1
            if kind == INPUT:
                inputs[stage] += 1
        elif kind == WEIGHT:
            if weights[stage] >= inputs[stage]:
                return False
            weights[stage] += 1
        else:
            if again[stage] >= len(lean[stage]):
                return False
            again[stage] += 1
        held += kept[step]
        if held > limit:
            return False
        if gradient[stage] and (kind in (BACKWARD, WEIGHT)):
            gradient[stage] = False
            held += memory.gradient[stage]
            if held > limit:
                return False
    return True


def peak(task: Task, rank: int, steps: list[int]) -> float:
    """The most that a rank keeps in this order, of what its limit is for."""
    stages, gradient = task.stages, dict(enumerate(task.memory.gradient))
    most = held = 0.0
    for step in steps:
        held += task.kept[step]
        most = max(most, held)
        if step // stages in (BACKWARD, WEIGHT):
            held += gradient.pop(step % stages, 0)
            most = max(most, held)
    return most


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
