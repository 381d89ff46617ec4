"""Orders, which name no microbatches: how they run, which backwards need no split, and the
schedules that they stand for."""

from __future__ import annotations

import math
from itertools import pairwise

import attrs
import numpy as np

from schedir.finder.terms import (
    BACKWARD,
    FORWARD,
    INPUT,
    LEAN,
    RECOMPUTE,
    WEIGHT,
    Task,
)
from schedir.graph.board import BACK, WAYS, Order, follow, most_held
from schedir.graph.compile import graph_of
from schedir.ir import KIND_INDEX, Columns, Kind, Schedule

UPDATE = len(WAYS)
"""The way of an OPTIM_STEP, beside those of a Board."""
_KIND_OF = np.array([*(KIND_INDEX[kind] for kind, _ in WAYS), KIND_INDEX[Kind.OPTIM_STEP]])
_WAY_OF = {KIND_INDEX[kind]: way for way, (kind, beside) in enumerate(WAYS) if not beside}


@attrs.frozen(eq=False)
class Run:
    """An order, and how it runs: `starts[rank]` are the starts of its steps, `ends[rank]` is when
    the rank is done with its OPTIM_STEPs. `value` is the objective, and `ties` orders equal values.
    `origin` names the built-in schedule whose order it is."""

    order: Order
    starts: list[list[float]]
    ends: list[float]
    value: float
    ties: float
    origin: str | None

    @property
    def rank(self) -> tuple[float, float]:
        """The sort key."""
        return self.value, self.ties


def timed(task: Task, order: Order, origin: str | None = None) -> Run | None:
    """Run an order; None where it blocks."""
    ran = follow(task.steps, order)
    if ran is None:
        return None
    starts, clock = ran
    for stage, rank in enumerate(task.placement):
        clock[rank] += task.costs.optim_step[stage]
    lasting = lengths(task, starts, clock)
    ties = sum(lasting) + sum(map(sum, starts)) / task.actions
    return Run(order, starts, clock, max(lasting), ties, origin)


def lengths(task: Task, starts: list[list[float]], ends: list[float]) -> list[float]:
    """How long each rank takes, of which the longest is the objective."""
    if task.objective == "makespan":
        return ends
    return [end - begin[0] for begin, end in zip(starts, ends, strict=True)]


def fits(task: Task, rank: int, steps: list[int]) -> bool:
    """True if a rank can run its steps in this order, alone, and keeps no more than it may."""
    return most_held(task.steps, steps, task.memory.limit[rank]) < math.inf


def within(task: Task, order: Order) -> bool:
    """True if the order has only steps that the task allows, and `fits` on every rank."""
    denied = ((INPUT,) if not task.split else ()) + ((LEAN,) if not task.recompute else ())
    if any(step // task.stages in denied for steps in order for step in steps):
        return False
    return all(fits(task, rank, steps) for rank, steps in enumerate(order))


def serial(task: Task) -> Run:
    """One microbatch after the other, which keeps the least. All forwards except those of a rank's
    last stage are run again, if they may be."""
    order: Order = []
    stages, memory = task.stages, task.memory
    for held in task.stages_of:
        down: list[int] = []
        up: list[int] = []
        for s in held:
            again = task.recompute and s != held[-1] and memory.lean[s] < memory.full[s]
            down.append(stages * (LEAN if again else FORWARD) + s)
            up = [stages * RECOMPUTE + s] * again + [stages * BACKWARD + s, *up]
        order.append((down + up) * task.microbatches)
    run = timed(task, order)
    if run is None:
        raise AssertionError("one microbatch after the other blocks")
    return run


def merged(task: Task, run: Run) -> Run:
    """The run with each I and W joined to one B if they belong to one microbatch, are listed
    together, and nobody waits for the gradient in the meantime; and with each B that comes while a
    W of its stage is put off made an I and that W. The old run if the new one would take longer."""
    stages, costs = task.stages, task.costs
    unused = [*map(iter, _slack(task, run))]
    found: Order = []
    put_off = [0] * stages
    for steps in run.order:
        own: list[int] = []
        slack = 0.0  # of the gradient that was made last
        for step in steps:
            kind, stage = divmod(step, stages)
            put_off[stage] += (kind == INPUT) - (kind == WEIGHT)
            if kind in (INPUT, BACKWARD):
                slack = next(unused[stage])
            longer = costs.backward[stage] - costs.backward_input[stage]
            if kind == BACKWARD and put_off[stage]:
                own += [INPUT * stages + stage, WEIGHT * stages + stage]
            elif (
                kind == WEIGHT
                and own[-1] == INPUT * stages + stage
                and not put_off[stage]
                and longer <= min(slack, costs.backward_weight[stage])
            ):
                own[-1] = BACKWARD * stages + stage
            else:
                own.append(step)
        found.append(own)
    new = timed(task, found, run.origin)
    return run if new is None or new.value > run.value else new


def _slack(task: Task, run: Run) -> list[list[float]]:
    """By stage, how long the gradient of each microbatch's input lies unused."""
    stages, travels = task.stages, task.steps.travels
    backwards: list[list[tuple[float, float]]] = [[] for _ in range(stages)]
    for steps, times in zip(run.order, run.starts, strict=True):
        for step, start in zip(steps, times, strict=True):
            kind, stage = divmod(step, stages)
            if kind in (BACKWARD, INPUT):
                backwards[stage].append((start, start + task.steps.lasts[step]))
    found = [[math.inf] * task.microbatches]
    for stage, pairs in enumerate(pairwise(backwards)):
        way = travels[BACK * stages + stage]
        found.append([start - end - way for (start, _), (_, end) in zip(*pairs, strict=True)])
    return found


def with_updates(task: Task, run: Run, wait: float = math.inf) -> Order:
    """The order with an UPDATE of each stage: as soon as the stage's gradients are complete and its
    rank waits for the part `wait` of the update's time, else at the end of the rank's list.

        inf    …  2B1  0B0  ······  0B1  0OPTIM_STEP  2OPTIM_STEP
        1      …  2B1  0B0  2OPTIM_STEP  0B1  0OPTIM_STEP
    """
    found: Order = []
    for held, own, starts in zip(task.stages_of, run.order, run.starts, strict=True):
        last = {step % task.stages: place for place, step in enumerate(own)}
        waits = [  # by place, how long the rank waits after the step there
            after - start - task.steps.lasts[step]
            for step, start, after in zip(own, starts, starts[1:], strict=False)
        ]
        listed = list(enumerate(own))
        for stage in held:
            takes = task.costs.optim_step[stage]
            places = range(last[stage], len(waits))
            least = max(takes * wait, 1e-300)
            place = next((p for p in places if waits[p] >= least), len(own))
            listed.append((place, UPDATE * task.stages + stage))
            if place < len(own):
                waits[place] -= takes
        found.append([step for _, step in sorted(listed, key=lambda each: each[0])])
    return found


def schedule_of(
    task: Task, order: Order, name: str, boundaries: tuple[int, ...] | None = None
) -> Schedule:
    """The schedule of an order with updates, without communication."""
    steps = np.array([step for own in order for step in own], np.int64)
    kind, stage = np.divmod(steps, task.stages)
    microbatch = np.full(len(steps), -1)
    for each in range(task.stages):
        own = stage == each
        for first in (kind <= LEAN, (kind == BACKWARD) | (kind == INPUT)):
            microbatch[own & first] = np.arange(task.microbatches)
        for late, of in ((WEIGHT, INPUT), (RECOMPUTE, LEAN)):
            microbatch[own & (kind == late)] = microbatch[own & (kind == of)]
    columns = Columns(
        np.cumsum([0, *map(len, order)]),
        _KIND_OF[kind],
        stage,
        microbatch,
        np.full(len(steps), -1),
        np.zeros(len(steps), np.bool_),
    )
    return Schedule(name, task.microbatches, task.placement, columns, boundaries=boundaries)


def order_of(task: Task, schedule: Schedule) -> Order | None:
    """The order of a synchronous schedule, without its overlapped pairs; None for any other
    schedule, one with replicas, or one with another placement or number of microbatches."""
    columns = schedule.columns
    steps = columns.where(Kind.OPTIM_STEP)
    if (
        schedule.placement != tuple((rank,) for rank in task.placement)
        or schedule.microbatches != task.microbatches
        or sorted(columns.stage[steps].tolist()) != list(range(task.stages))
    ):
        return None
    ways = np.array([_WAY_OF.get(kind, -1) for kind in columns.kind.tolist()])
    for touch in graph_of(schedule).touches("kept"):
        if touch.use.does == "make":
            ways[touch.places] = LEAN
    listed = ways * task.stages + columns.stage
    ranks = pairwise(columns.starts.tolist())
    return [[step for step in listed[begin:end].tolist() if step >= 0] for begin, end in ranks]
