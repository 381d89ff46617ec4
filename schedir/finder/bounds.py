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
from collections.abc import Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from schedir.finder.terms import (
    Memory,
    Objective,
    StageCosts,
    memory_in_activations,
    memory_in_bytes,
)
from schedir.simulator import CostModel


def lower_bound(
    placement: Sequence[int],
    microbatches: int,
    costs: CostModel | None = None,
    *,
    objective: Objective = "makespan",
    split: bool = True,
    recompute: bool = False,
    max_activations: int | None = None,
    held_until: str = "W",
    memory_limit: float | None = None,
) -> float:
    """What no schedule of this work under these limits can be quicker than, in the costs' unit.

    `placement[s]` is the rank of stage s. Backwards may be `split` into I and W, and with
    `recompute` forwards may be run again. Each rank holds at most `max_activations` (stage,
    microbatch) activations, each until its backward is complete or, with `held_until="I"`, until
    its I. Each rank holds at most `memory_limit` bytes of weights, optimiser state and activations;
    other memory only makes schedules slower.

    The bound holds for every list of these stages that updates each stage at least once, in any
    order, without overlapped pairs. The time to compute it is linear in stages and microbatches.

    Raises SchedirError if the costs belong to other stages, or lack a link.
    """
    costs = CostModel() if costs is None else costs
    work = Work(StageCosts.of(placement, costs), microbatches, split, recompute)
    memory = None
    if max_activations is not None:
        memory = memory_in_activations(placement, max_activations, held_until)
    elif memory_limit is not None:
        reserved = [0.0] * len(work.costs.ranks)
        memory = memory_in_bytes(placement, costs, memory_limit, reserved)
    found = [*_busy(work, memory, objective)]
    if objective == "makespan":
        found += _channels(work)
    if memory is not None:
        for rank in work.costs.ranks:
            found.append(_flow(work, memory, rank, objective))
            if not recompute:
                found.append(_full(work, memory, rank, objective))
    return max(found)


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(slots=False)
class Work:
    """The work of a step, and what follows from its data flow alone; each list is by stage."""

    costs: StageCosts
    microbatches: int
    split: bool
    recompute: bool

    @cached_property
    def inputs(self) -> list[float]:
        """The least time to the gradient of a stage's input, once that of its output is there."""
        return self._backwards(self.costs.backward_input)

    @cached_property
    def wholes(self) -> list[float]:
        """The least time to both of its gradients."""
        parts = zip(self.costs.backward_input, self.costs.backward_weight, strict=True)
        return self._backwards([i + w for i, w in parts])

    @cached_property
    def after(self) -> list[float]:
        """The least time that a backward takes beyond the gradient of its input."""
        return [whole - part for whole, part in zip(self.wholes, self.inputs, strict=True)]

    def rests_of(self, stages: Sequence[int], objective: Objective) -> dict[int, float]:
        """What follows the gradient of the input of each of a rank's stages, and counts."""
        if objective == "makespan":
            return {s: self.rests[s] for s in stages}
        first = stages[0]
        end = self.after[first] + self.costs.optim_step[first]
        ways = {s: sum(self.costs.up[u] + self.inputs[u] for u in range(first, s)) for s in stages}
        return {s: way + end for s, way in ways.items()}

    def last(self, stages: Sequence[int], objective: Objective) -> float:
        """What follows the last backward of a rank, or part of one, and counts."""
        if self.split:
            return min(self.costs.optim_step[s] for s in stages)
        return min(self.rests_of(stages, objective).values())

    def _backwards(self, split: Sequence[float]) -> list[float]:
        if not self.split:
            return list(self.costs.backward)
        return [min(b, i) for b, i in zip(self.costs.backward, split, strict=True)]

    @cached_property
    def heads(self) -> list[float]:
        """How early the first forward of each stage can start."""
        heads: list[float] = []
        now: float = 0
        for s in self.costs.stages:
            now += self.costs.down[s]
            heads.append(now)
            now += self.costs.forward[s]
        return heads

    @cached_property
    def turns(self) -> list[float]:
        """The least time from the start of a forward to the start of its backward."""
        turns: list[float] = []
        after: float = 0  # from the end of the stage's forward to the gradient of its output
        last = len(self.costs.stages) - 1
        for s in reversed(self.costs.stages):
            if s < last:
                after += self.costs.down[s + 1] + self.costs.forward[s + 1]
                after += self.inputs[s + 1] + self.costs.up[s]
            turns.append(self.costs.forward[s] + after)
        return turns[::-1]

    @cached_property
    def rests(self) -> list[float]:
        """The least time from the gradient of a stage's input to the end of everything."""
        rests: list[float] = []
        for s in self.costs.stages:
            own = self.wholes[s] - self.inputs[s] + self.costs.optim_step[s]
            below = self.costs.up[s - 1] + self.inputs[s - 1] + rests[-1] if s else 0
            rests.append(max(own, below))
        return rests


_Times: TypeAlias = npt.NDArray[np.float64]
_NEVER = -math.inf


def _busy(work: Work, memory: Memory | None, objective: Objective) -> Iterator[float]:
    """Bounds of each rank's own work, all of which has heads and tails.

    For the makespan there is one view, from the first forward to the end of everything. For the
    span there is one for each rank, from its first forward to the end of its last compute.
    """
    costs, many, stages = work.costs, work.microbatches, work.costs.stages
    counts = np.full((len(stages), 1), True)  # by stage and view
    begins = np.array([[0.0]] + [[_NEVER]] * (len(stages) - 1))
    if objective == "span":
        counts = np.array(costs.placement)[:, None] == np.arange(len(costs.ranks))
        begins = np.where(counts & (np.cumsum(counts, axis=0) == 1), 0.0, _NEVER)
    updates = np.where(counts, np.array(costs.optim_step)[:, None], _NEVER)
    window = [_window(work, memory, s) for s in stages]
    # After its input gradient, how long a backward holds its activation.
    holds = [_until_complete(memory, s) * work.after[s] for s in stages]
    forwards, backs = _earliest(
        (costs.forward, work.inputs), (costs.down, costs.up), holds, window, begins, many
    )
    # From the end on, gradients go down the stages, and forwards come up again.
    links = (0, *costs.up[:-1]), (*costs.down[1:], 0)
    after = updates + np.array(work.after)[:, None]
    after_backs, after_forwards = (
        times[:, ::-1]
        for times in _earliest((work.inputs, costs.forward), links, holds, window, after, many)
    )
    for rank in costs.ranks:
        view = rank if objective == "span" else 0
        jobs: list[tuple[float, float, float]] = []
        for s in costs.stages_of(rank):
            times = forwards, backs, after_forwards, after_backs
            for f, b, *tails in zip(*(each[s, :, view].tolist() for each in times), strict=True):
                jobs += (f, costs.forward[s], tails[0]), (b, work.inputs[s], tails[1])
                jobs.append((b + work.inputs[s], work.after[s], updates[s, view]))
            jobs.append((b + work.wholes[s], costs.optim_step[s], 0))
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
    stages = range(len(begins))
    first, second = np.full((2, len(begins), many, begins.shape[1]), _NEVER)
    (down, up), (into, back) = lasts, links
    for m in range(many):
        for s in stages:
            at = begins[s]
            if s:
                at = np.maximum(at, first[s - 1, m] + down[s - 1] + into[s])
            if m:
                at = np.maximum(at, first[s, m - 1] + down[s])
            if m >= window[s]:
                at = np.maximum(at, second[s, m - window[s]] + up[s] + holds[s])
            first[s, m] = at
        for s in reversed(stages):
            at = first[s, m] + down[s]
            if s + 1 < len(stages):
                at = np.maximum(at, second[s + 1, m] + up[s + 1] + back[s])
            if m:
                at = np.maximum(at, second[s, m - 1] + up[s])
            second[s, m] = at
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


def _window(work: Work, memory: Memory | None, stage: int) -> int:
    """How many activations of a stage its rank can hold; all if they can be made again."""
    if memory is None or work.recompute or not memory.full[stage]:
        return work.microbatches
    most = memory.limit[work.costs.placement[stage]] / memory.full[stage]
    return max(1, int(min(most, work.microbatches)))


def _until_complete(memory: Memory | None, stage: int) -> bool:
    """True if an activation is held in full until its backward is complete."""
    return memory is not None and memory.rest[stage] >= memory.full[stage]


def _channels(work: Work) -> Iterator[float]:
    """Bounds of the busiest channels."""
    costs = work.costs
    ways: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for s in costs.stages[1:]:
        # Each transfer: how early the first can start, its time, what follows the last.
        low, high = costs.placement[s - 1], costs.placement[s]
        first = work.heads[s - 1] + costs.forward[s - 1]
        after = costs.down[s] - costs.down_holds[s] + work.turns[s] + work.inputs[s]
        ways.setdefault((low, high), []).append((first, costs.down_holds[s], after + work.rests[s]))
        first = work.heads[s] + work.turns[s] + work.inputs[s]
        after = costs.up[s - 1] - costs.up_holds[s - 1] + work.inputs[s - 1]
        ways.setdefault((high, low), []).append(
            (first, costs.up_holds[s - 1], after + work.rests[s - 1])
        )
    for transfers in ways.values():
        firsts, times, afters = zip(*transfers, strict=True)
        yield min(firsts) + work.microbatches * sum(times) + min(afters)


def _flow(work: Work, memory: Memory, rank: int, objective: Objective) -> float:
    """Little's law: from the first forward to the last backward a rank can hold its limit for that
    long, and each activation is held for its time. Making one again takes time, and saves some of
    that: what saves most in its time is made again first."""
    many, most, held = work.microbatches, memory.limit[rank], 0.0
    stages = work.costs.stages_of(rank)
    time: float = many * sum(work.costs.forward[s] + work.inputs[s] + work.after[s] for s in stages)
    savings = []
    for s in stages:
        again, part = work.costs.recompute[s], memory.rest[s] * work.after[s]
        full = memory.full[s] * (work.turns[s] + work.inputs[s]) + part
        short = memory.full[s] * (again + work.inputs[s]) + part
        short = min(full, short + memory.lean[s] * max(0, work.turns[s] - again))
        held += many * full
        if work.recompute:
            savings.append((full - short, again))
    head = work.heads[stages[0]] if objective == "makespan" else 0
    tail = work.last(stages, objective)
    if most <= 0:
        return head + time + tail
    for saving, again in sorted(savings, key=lambda each: -each[0] / (each[1] or 1e-300)):
        # What is short is made up for by time alone, or by recomputing as many as it takes.
        short = held - most * time
        if short <= 0:
            break
        times = min(many, short / (saving + most * again)) if saving else 0
        time, held = time + times * again, held - times * saving
    return head + max(time, held / most) + tail


def _full(work: Work, memory: Memory, rank: int, objective: Objective) -> float:
    """Until the first gradient is back nothing runs but as many forwards as can be held, and after
    the last forward nothing but the backwards of what is held then."""
    costs, stages = work.costs, work.costs.stages_of(rank)
    first = work.heads[stages[0]]
    head = first if objective == "makespan" else 0
    begin = min(work.heads[s] + work.turns[s] for s in stages) - first + head
    forward = work.microbatches * sum(costs.forward[s] for s in stages)
    forward -= _most_held(work, memory, rank, costs.forward)
    whole = work.microbatches * sum(work.wholes[s] for s in stages)
    alone = begin + forward + whole + work.last(stages, objective)
    if work.microbatches * sum(memory.full[s] for s in stages) <= memory.limit[rank]:
        return alone
    rests = work.rests_of(stages, objective)
    last = min(work.turns[s] - costs.forward[s] + work.inputs[s] + rests[s] for s in stages)
    # Weights' gradients may wait beyond what is held.
    waits = work.split and not all(_until_complete(memory, s) for s in stages)
    backs = work.inputs if waits else work.wholes
    back = work.microbatches * sum(backs[s] for s in stages)
    return max(alone, begin + forward + back - _most_held(work, memory, rank, backs) + last)


def _most_held(work: Work, memory: Memory, rank: int, times: Sequence[float]) -> float:
    """The most time that work on as many activations as a rank can hold takes."""
    left, most, sizes = max(0, memory.limit[rank]), 0.0, memory.full
    for s in sorted(work.costs.stages_of(rank), key=lambda s: -times[s] / (sizes[s] or 1e-300)):
        many = min(work.microbatches, left / sizes[s] if sizes[s] else work.microbatches)
        most, left = most + many * times[s], left - many * sizes[s]
    return most
