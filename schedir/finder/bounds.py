"""What no schedule can be quicker than: lower bounds of the makespan, and of the longest span.

For each rank, and each stage on it, three times are known: how early its first forward can start
(`head`), how soon after a forward the gradient can be back (`turn`), and how long other ranks need
after its last input gradient (`rest`):

    rank 0   F0                               B0        rank 1: head 1, turn 7, rest 2
    rank 1      F0                      B0---
    rank 2         F0             B0---
    rank 3            F0    B0---

In between, a rank has all its work to do. Memory bounds the time too. An activation is held for at
least its turn, so M of them take M × turn / limit (Little's law). A stage whose limit is k is one
turn further after k microbatches. And no more than the limit can be done before the first gradient
is back, or after the last forward. The largest of these bounds counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import attrs

from schedir.finder.terms import Objective, StageCosts, memory_in_activations, memory_in_bytes
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
    order, without overlapped pairs. The time to compute it is linear in stages and does not depend
    on microbatches.

    Raises SchedirError if the costs belong to other stages, or lack a link.
    """
    costs = CostModel() if costs is None else costs
    of = Work(StageCosts.of(placement, costs), microbatches, split, recompute)
    memories = []
    if max_activations is not None:
        memories.append(memory_in_activations(placement, max_activations, held_until))
    if memory_limit is not None:
        reserved = [0.0] * len(of.costs.ranks)
        memories.append(memory_in_bytes(placement, costs, memory_limit, reserved))
    found = [*of.bounds(objective)]
    for rank in of.costs.ranks:
        own = of.rank(rank)
        found += own.busy(objective)
        for memory in memories:
            limit = _Limit(memory.full, memory.lean, memory.rest, memory.limit[rank])
            found += own.held(limit, objective)
    return max(found)


@attrs.frozen
class _Limit:
    """Of an activation of stage s a rank holds `sizes[s]`, or `inputs[s]` until it is made again,
    and `parts[s]` from its I to its W; and `most` of all."""

    sizes: Sequence[float]
    inputs: Sequence[float]
    parts: Sequence[float]
    most: float


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

    def rank(self, rank: int) -> _Rank:
        """The work of one rank."""
        return _Rank(self, self.costs.stages_of(rank))

    def bounds(self, objective: Objective) -> Iterator[float]:
        """Of one microbatch's way through all stages, and of the busiest channels."""
        whole = self.turns[0] + self.inputs[0] + self.rests[0]
        yield whole
        if objective == "span":
            return
        costs = self.costs
        ways: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
        for s in costs.stages[1:]:
            # Each transfer: how early the first can start, its time, what follows the last.
            low, high = costs.placement[s - 1], costs.placement[s]
            first = self.heads[s - 1] + costs.forward[s - 1]
            after = costs.down[s] - costs.down_holds[s] + self.turns[s] + self.inputs[s]
            ways.setdefault((low, high), []).append(
                (first, costs.down_holds[s], after + self.rests[s])
            )
            first = self.heads[s] + self.turns[s] + self.inputs[s]
            after = costs.up[s - 1] - costs.up_holds[s - 1] + self.inputs[s - 1]
            ways.setdefault((high, low), []).append(
                (first, costs.up_holds[s - 1], after + self.rests[s - 1])
            )
        for transfers in ways.values():
            firsts, times, afters = zip(*transfers, strict=True)
            yield min(firsts) + self.microbatches * sum(times) + min(afters)


@attrs.frozen
class _Rank:
    """One rank's part of the work."""

    work: Work
    stages: list[int]

    def _sum(self, *parts: Sequence[float]) -> float:
        return self.work.microbatches * sum(part[s] for part in parts for s in self.stages)

    @property
    def _all(self) -> float:
        """All of its compute but for the updates."""
        work = self.work
        return self._sum(work.costs.forward, work.wholes)

    @property
    def _steps(self) -> float:
        return sum(self.work.costs.optim_step[s] for s in self.stages)

    def _head(self, objective: Objective) -> float:
        """What happens before its first forward, and counts."""
        return self.work.heads[self.stages[0]] if objective == "makespan" else 0

    def _local(self, stage: int) -> float:
        """The least time from the gradient of this stage's input to the end of its last compute."""
        work, first = self.work, self.stages[0]
        way = sum(work.costs.up[u] + work.inputs[u] for u in range(first, stage))
        return way + work.wholes[first] - work.inputs[first] + work.costs.optim_step[first]

    def _rest(self, objective: Objective) -> dict[int, float]:
        """What follows the gradient of the input of each stage, and counts."""
        if objective == "makespan":
            return {s: self.work.rests[s] for s in self.stages}
        return {s: self._local(s) for s in self.stages}

    def _tail(self, objective: Objective) -> float:
        """What follows its last backward, or part of one."""
        if self.work.split:
            return self._steps
        return max(self._steps, min(self._rest(objective).values()))

    def busy(self, objective: Objective) -> Iterator[float]:
        """Bounds of its work alone."""
        work, head = self.work, self._head(objective)
        yield head + self._all + self._tail(objective)
        # When the last gradient of an input is there, all but some weights' gradients is done.
        first = self._sum(work.costs.forward, work.inputs)
        yield head + first + min(self._rest(objective).values())

    def held(self, limit: _Limit, objective: Objective) -> Iterator[float]:
        """Bounds of what it may hold at once."""
        yield self._flow(limit, objective)
        yield from self._rounds(limit, objective)
        if not self.work.recompute:
            yield self._ends(limit, objective)

    def _after(self, stage: int) -> float:
        """What a backward takes at least beyond the gradient of the input."""
        return self.work.wholes[stage] - self.work.inputs[stage]

    def _flow(self, limit: _Limit, objective: Objective) -> float:
        """Little's law: from the first forward to the last backward a rank can hold `most` for that
        long, and each activation is held for its time. Making one again takes time, and saves some
        of that: what saves most in its time is made again first."""
        work, many = self.work, self.work.microbatches
        time: float = self._all
        held: float = 0
        savings = []
        for s in self.stages:
            again, part = work.costs.recompute[s], limit.parts[s] * self._after(s)
            full = limit.sizes[s] * (work.turns[s] + work.inputs[s]) + part
            short = limit.sizes[s] * (again + work.inputs[s]) + part
            short = min(full, short + limit.inputs[s] * max(0, work.turns[s] - again))
            held += many * full
            if work.recompute:
                savings.append((full - short, again))
        most = limit.most
        if most <= 0:
            return self._head(objective) + time + self._tail(objective)
        for saving, again in sorted(savings, key=lambda each: -each[0] / (each[1] or 1e-300)):
            # What is short is made up for by time alone, or by recomputing as many as it takes.
            short = held - most * time
            if short <= 0:
                break
            times = min(many, short / (saving + most * again)) if saving else 0
            time, held = time + times * again, held - times * saving
        return self._head(objective) + max(time, held / most) + self._tail(objective)

    def _rounds(self, limit: _Limit, objective: Objective) -> Iterator[float]:
        """Where k activations of a stage can be held, its forward n + k waits for backward n."""
        work = self.work
        rests = self._rest(objective)
        for s in self.stages:
            if not limit.sizes[s] or limit.most < limit.sizes[s]:
                continue
            turn, between = work.turns[s], work.costs.forward[s]
            if work.recompute:  # held from where it is made again
                turn, between = (min(time, work.costs.recompute[s]) for time in (turn, between))
            rounds, left = divmod(work.microbatches - 1, int(limit.most // limit.sizes[s]))
            hold = turn + work.inputs[s]
            until = self._after(s) if limit.parts[s] >= limit.sizes[s] else 0
            head = work.heads[s] if objective == "makespan" else 0
            yield head + left * between + rounds * (hold + until) + hold + rests[s]

    def _ends(self, limit: _Limit, objective: Objective) -> float:
        """Until the first gradient is back nothing runs but as many forwards as can be held, and
        after the last forward nothing but the backwards of what is held then."""
        work = self.work
        forwards = self._most_of(work.costs.forward, limit)
        since = self.work.heads[self.stages[0]] - self._head(objective)
        first = min(work.heads[s] + work.turns[s] for s in self.stages) - since
        time = first + self._all - forwards
        alone = time + self._tail(objective)
        if self._sum(limit.sizes) <= limit.most:
            return alone
        rests = self._rest(objective)
        last = min(
            work.turns[s] - work.costs.forward[s] + work.inputs[s] + rests[s] for s in self.stages
        )
        parts = [limit.parts[s] >= limit.sizes[s] for s in self.stages]
        if work.split and not all(parts):
            # Weights' gradients may wait beyond what is held.
            time = first + self._sum(work.costs.forward, work.inputs) - forwards
            return max(alone, time - self._most_of(work.inputs, limit) + last)
        return max(alone, time - self._most_of(work.wholes, limit) + last)

    def _most_of(self, times: Sequence[float], limit: _Limit) -> float:
        """The most time that work on as many activations as can be held takes."""
        left, most = max(0, limit.most), 0.0
        for s in sorted(self.stages, key=lambda s: -times[s] / (limit.sizes[s] or 1e-300)):
            size = limit.sizes[s]
            many = min(self.work.microbatches, left / size if size else self.work.microbatches)
            most, left = most + many * times[s], left - many * size
        return most
