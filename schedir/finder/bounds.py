"""What no schedule can be quicker than: lower bounds of the makespan, and of the longest span.

For each stage and microbatch it is known how early its forward and its backward can start (`head`)
and what must follow their end (`tail`), if every rank had all the time in the world:

    rank 0   F0                               B0        rank 1: F0 has head 1 and tail 9,
    rank 1      F0                      B0---                   B0 has head 8 and tail 2
    rank 2         F0             B0---
    rank 3            F0    B0---

But a rank runs one action at a time. So the best order of its own work with these heads and tails
is a bound; if actions could be interrupted, the one with the longest tail would always run first
(Carlier 1982: one machine with heads and tails).

Memory bounds the time too. A stage of which a rank can hold k activations begins forward n + k
after it has completed backward n, which makes heads and tails longer. And an activation is held for
at least its turn, so M of them take M × turn / limit (Little's law). The largest of these bounds
counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from schedir.finder.terms import Task


def lower_bound(task: Task) -> float:
    """What no schedule of a task can be quicker than, in the costs' unit.

    The bound holds for every list of the task's stages that is within its memory and updates each
    stage at least once, in any order, without overlapped pairs. Memory that the task does not count
    only makes schedules slower. The time to compute it is linear in stages and microbatches.
    """
    flow = _DataFlow(task)
    found = [*_busy(flow)]
    if task.objective == "makespan":
        found += _channels(flow)
    if task.memory.limited:
        for rank in range(task.ranks):
            found.append(_held(flow, rank))
            if not task.recompute:
                found.append(_full(flow, rank))
    return max(found)


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(slots=False)
class _DataFlow:
    """What follows from a task's data flow alone; each list is by stage."""

    task: Task

    @cached_property
    def after(self) -> list[float]:
        """The least time that a backward takes beyond the gradient of its input."""
        return [a - b for a, b in zip(self.task.wholes, self.task.inputs, strict=True)]

    @cached_property
    def alone(self) -> tuple[list[float], list[float]]:
        """How early the first forward of each stage can start, and its first backward."""
        return self.task.costs.alone(self.task.inputs)

    @cached_property
    def turns(self) -> list[float]:
        """The least time from the start of a forward to the start of its backward."""
        return [back - head for head, back in zip(*self.alone, strict=True)]

    @cached_property
    def ends(self) -> list[float]:
        """The least time from the gradient of a stage's input to the end of its update."""
        return [a + b for a, b in zip(self.after, self.task.costs.optim_step, strict=True)]

    @cached_property
    def rests(self) -> list[float]:
        """The least time from the gradient of a stage's input to the end of everything."""
        rests: list[float] = []
        for s, end in enumerate(self.ends):
            below = self.task.costs.up[s - 1] + self.task.inputs[s - 1] + rests[-1] if s else 0
            rests.append(max(end, below))
        return rests

    def rests_of(self, stages: Sequence[int]) -> list[float]:
        """What follows the gradient of the input of each of a rank's stages, and counts."""
        if self.task.objective == "makespan":
            return [self.rests[s] for s in stages]
        made = np.add(self.alone[1], self.task.inputs)
        end = made[stages[0]] + self.ends[stages[0]]
        return [end - made[s] for s in stages]

    def last(self, stages: Sequence[int]) -> float:
        """What follows the last backward of a rank, or part of one, and counts."""
        if self.task.split:
            return min(self.task.costs.optim_step[s] for s in stages)
        return min(self.rests_of(stages))


_Times: TypeAlias = npt.NDArray[np.float64]
_NEVER = -math.inf
_TINY = 1e-300  # in place of 0, to divide by


def _busy(flow: _DataFlow) -> Iterator[float]:
    """Bounds of each rank's own work, all of which has heads and tails.

    For the makespan there is one view, from the first forward to the end of everything. For the
    span there is one for each rank, from its first forward to the end of its last compute.
    """
    task, costs, inputs = flow.task, flow.task.costs, flow.task.inputs
    many, memory, stages = task.microbatches, task.memory, range(task.stages)
    views = np.array(task.placement) * (task.objective == "span")
    counts = views[:, None] == np.arange(1 + views.max())
    begins = np.where(counts & (np.cumsum(counts, axis=0) == 1), 0.0, _NEVER)
    updates = np.where(counts, np.array(costs.optim_step)[:, None], _NEVER)
    # How many activations of a stage its rank can hold: all if they can be made again.
    window = [
        many if task.recompute or not full else max(1, int(min(many, memory.limit[rank] / full)))
        for rank, full in zip(task.placement, memory.full, strict=True)
    ]
    # After its input gradient, how long a backward holds its activation.
    holds = [flow.after[s] * (memory.rest[s] >= memory.full[s]) for s in stages]
    forwards, backs = _earliest(
        (costs.forward, inputs), (costs.down, costs.up), holds, window, begins, many
    )
    # From the end on, gradients go down the stages, and forwards come up again.
    links = (0, *costs.up[:-1]), (*costs.down[1:], 0)
    after = updates + np.array(flow.after)[:, None]
    after_backs, after_forwards = (
        times[:, ::-1]
        for times in _earliest((inputs, costs.forward), links, holds, window, after, many)
    )
    for held in task.stages_of:
        jobs: list[tuple[float, float, float]] = []
        for s in held:
            view = views[s]
            times = forwards, backs, after_forwards, after_backs
            for f, b, *tails in zip(*(each[s, :, view].tolist() for each in times), strict=True):
                jobs += (f, costs.forward[s], tails[0]), (b, inputs[s], tails[1])
                jobs.append((b + inputs[s], flow.after[s], updates[s, view]))
            jobs.append((b + task.wholes[s], costs.optim_step[s], 0))
        yield _one_machine(jobs)


def _earliest(
    lasts: tuple[Sequence[float], Sequence[float]],
    links: tuple[Sequence[float], Sequence[float]],
    holds: Sequence[float],
    window: Sequence[int],
    begins: _Times,
    many: int,
) -> tuple[_Times, _Times]:
    """How early two actions of each stage and microbatch can start, by view: the first goes down
    the stages, the second comes up again. Each `lasts` so long, and its `links` to a stage take so
    long. The first of microbatch m begins when the second of m - `window` has been over for as long
    as it `holds`."""
    stages = len(begins)
    first, second = np.full((2, stages, many, begins.shape[1]), _NEVER)
    (down, up), (into, back) = lasts, links
    for m in range(many):
        # Where an index wraps around, nothing is there yet.
        for s in range(stages):
            after = second[s, m - window[s]] + (up[s] + holds[s])
            before, below = first[s, m - 1] + down[s], first[s - 1, m] + (down[s - 1] + into[s])
            first[s, m] = np.maximum(np.maximum(begins[s], after), np.maximum(before, below))
        for s in reversed(range(stages)):
            n = (s + 1) % stages
            before, above = second[s, m - 1] + up[s], second[n, m] + (up[n] + back[s])
            second[s, m] = np.maximum(first[s, m] + down[s], np.maximum(before, above))
    return first, second


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """The least time in which jobs (head, time, tail) can all be done, one at a time, if they can
    be interrupted."""
    jobs.sort()
    most = now = 0.0
    waiting: list[tuple[float, float]] = []
    for (head, time, tail), until in zip(
        jobs, [*(job[0] for job in jobs[1:]), math.inf], strict=True
    ):
        now = max(now, head)
        heappush(waiting, (-tail, time))
        while waiting and now < until:
            tail, left = waiting[0]
            if left > until - now:
                heapreplace(waiting, (tail, left - (until - now)))
                now = until
            else:
                heappop(waiting)
                now += left
                most = max(most, now - tail)
    return most


def _channels(flow: _DataFlow) -> Iterator[float]:
    """Bounds of the busiest channels."""
    task, costs, inputs = flow.task, flow.task.costs, flow.task.inputs
    heads, backs = flow.alone
    # Of each transfer: how early the first can start, its time, what follows the last.
    ways: dict[tuple[int, int], list[tuple[float, float, float]]] = defaultdict(list)
    for s in range(1, task.stages):
        low, high = task.placement[s - 1 : s + 1]
        first, holds = heads[s - 1] + costs.forward[s - 1], costs.down_holds[s]
        after = costs.down[s] - holds + flow.turns[s] + inputs[s] + flow.rests[s]
        ways[low, high].append((first, holds, after))
        first, holds = backs[s] + inputs[s], costs.up_holds[s - 1]
        after = costs.up[s - 1] - holds + inputs[s - 1] + flow.rests[s - 1]
        ways[high, low].append((first, holds, after))
    for transfers in ways.values():
        firsts, times, afters = zip(*transfers, strict=True)
        yield min(firsts) + task.microbatches * sum(times) + min(afters)


def _held(flow: _DataFlow, rank: int) -> float:
    """Little's law: from the first forward to the last backward a rank can hold its limit for that
    long, and each activation is held for its time. Making one again takes time, and saves some of
    that: what saves most in its time is made again first."""
    task, memory, stages = flow.task, flow.task.memory, flow.task.stages_of[rank]
    many, most, held = task.microbatches, memory.limit[rank], 0.0
    time: float = many * sum(task.costs.forward[s] + task.wholes[s] for s in stages)
    savings = []
    for s in stages:
        again, part = task.costs.recompute[s], memory.rest[s] * flow.after[s]
        full = memory.full[s] * (flow.turns[s] + task.inputs[s]) + part
        short = memory.full[s] * (again + task.inputs[s]) + part
        short = min(full, short + memory.lean[s] * max(0, flow.turns[s] - again))
        held += many * full
        if task.recompute:
            savings.append((full - short, again))
    head = flow.alone[0][stages[0]] if task.objective == "makespan" else 0
    tail = flow.last(stages)
    if most <= 0:
        return head + time + tail
    for saving, again in sorted(savings, key=lambda each: -each[0] / (each[1] or _TINY)):
        # What is short is made up for by time alone, or by recomputing as many as it takes.
        short = held - most * time
        if short <= 0:
            break
        times = min(many, short / (saving + most * again)) if saving else 0
        time, held = time + times * again, held - times * saving
    return head + max(time, held / most) + tail


def _full(flow: _DataFlow, rank: int) -> float:
    """Until the first gradient is back nothing runs but as many forwards as can be held, and after
    the last forward nothing but the backwards of what is held then."""
    task, memory, stages = flow.task, flow.task.memory, flow.task.stages_of[rank]
    heads, backs = flow.alone
    begin = min(backs[s] for s in stages) - heads[stages[0]] * (task.objective == "span")
    begin += _not_held(task, rank, task.costs.forward)
    alone = begin + task.microbatches * sum(task.wholes[s] for s in stages) + flow.last(stages)
    if task.microbatches * sum(memory.full[s] for s in stages) <= memory.limit[rank]:
        return alone
    last = min(
        flow.turns[s] - task.costs.forward[s] + task.inputs[s] + rest
        for s, rest in zip(stages, flow.rests_of(stages), strict=True)
    )
    # Weights' gradients may wait beyond what is held.
    waits = task.split and any(memory.rest[s] < memory.full[s] for s in stages)
    return max(alone, begin + _not_held(task, rank, task.inputs if waits else task.wholes) + last)


def _not_held(task: Task, rank: int, times: Sequence[float]) -> float:
    """The least time of a rank's work beyond that on as many activations as it can hold."""
    stages, sizes, many = task.stages_of[rank], task.memory.full, task.microbatches
    left, beyond = max(0, task.memory.limit[rank]), many * sum(times[s] for s in stages)
    for s in sorted(stages, key=lambda s: -times[s] / (sizes[s] or _TINY)):
        held = min(many, left / sizes[s]) if sizes[s] else many
        beyond, left = beyond - held * times[s], left - held * sizes[s]
    return beyond
