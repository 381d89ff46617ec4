"""From a rule to an order: time goes on, and whenever a rank is free it takes the step that the
rule puts first of those that can start.

    time     0   1   2   3   4   5   6
    rank 0   F0  F1  F2      I0  W0  I1      at 3 the I of microbatch 0 is known to arrive at 4:
    rank 1       F0  I0  F1  I1  W0          with patience the rank waits for it, without it takes
                                             what can start at once

What a rank has begun, its neighbours know: when it will arrive. So a rank looks as far ahead as
what is under way, and may wait for it.

A FORWARD may start where it leaves enough to finish the microbatches in flight one after the other,
the oldest first (Dijkstra's banker): of a microbatch whose later chunks are still to run on the
rank, these are kept room for. So no choice can lead to where nothing can go on.

    limit 4, 2 chunks: F0 F1 F2, and no F3 before the second chunk of 0: it would have no room
"""

from __future__ import annotations

from heapq import heappop, heappush

import attrs

from schedir.finder.task import (
    BACKWARD,
    INPUT,
    LEAN,
    RECOMPUTE,
    WEIGHT,
    Order,
    Task,
)

NEVER, NEEDED, ALWAYS = range(3)
"""Whether forwards of a stage are run again: where memory is short, or all of them."""


@attrs.frozen(eq=False)
class Rule:
    """What a rank takes first: the step with the least `keys[step][microbatch]`.

    It waits for a better one for `patience` of the time until the first of the others would end,
    before its first backward for `eager` of it, after its last forward for `late`.
    A rank keeps at most `cap[rank]`, in the units of the memory's limit. `split[stage]` says
    whether backwards are split, `again[stage]` whether forwards are run again.
    """

    keys: list[list[float]]
    patience: float
    eager: float
    late: float
    cap: list[float]
    split: list[list[bool]]
    again: list[list[int]]


def scheduled(task: Task, rule: Rule) -> Order | None:
    """The order that a rule makes; None where it can't go on within the cap."""
    return _Board(task, rule).run()


class _Board:
    """What has run so far, and what is under way."""

    def __init__(self, task: Task, rule: Rule) -> None:
        self.task, self.rule = task, rule
        stages, ranks = task.stages, task.ranks
        memory = task.memory
        self.order: Order = [[] for _ in range(ranks)]
        self.arrivals: list[list[float]] = [[] for _ in range(2 * stages)]
        self.free: list[float] = [0] * task.wiring.channels
        # By stage, how many have begun; which forwards are to be run again, and how many have been.
        self.forwards, self.backwards = [0] * stages, [0] * stages
        self.inputs, self.weights = [0] * stages, [0] * stages
        self.lean: list[list[int]] = [[] for _ in range(stages)]
        self.again = [0] * stages
        # By stage, what the forwards up to each microbatch keep; by rank, what is kept now.
        self.sums: list[list[float]] = [[0.0] for _ in range(stages)]
        self.held = [sum(memory.gradient[s] for s in task.stages_of[rank]) for rank in range(ranks)]
        self.limit = [min(most, cap) for most, cap in zip(memory.limit, rule.cap, strict=True)]
        # The least that a microbatch of each stage needs, and what running one again adds to that.
        self.least = [
            lean if max(again) and lean < full else full
            for lean, full, again in zip(memory.lean, memory.full, rule.again, strict=True)
        ]
        self.extra = [max(memory.full[s] - self.least[s] for s in held) for held in task.stages_of]

    def run(self) -> Order | None:
        """Go on until all has run, or nothing can."""
        task = self.task
        due: list[tuple[float, int]] = [(0, rank) for rank in range(task.ranks)]
        wakes: list[float] = [0] * task.ranks  # -1 for a rank that waits to be told
        busy: list[float] = [0] * task.ranks
        placement, stages = task.placement, task.stages
        feeds, durations = task.wiring.feeds, task.durations
        left = task.stages * task.microbatches
        while due:
            now, rank = heappop(due)
            if wakes[rank] != now:
                continue
            start, step = self._choose(rank, now)
            if step < 0 or start > now:
                wakes[rank] = start
                if step >= 0:
                    heappush(due, (start, rank))
                continue
            end = now + durations[step]
            self._take(rank, step, end)
            if step // stages in (BACKWARD, WEIGHT):
                left -= 1
            busy[rank] = wakes[rank] = end
            heappush(due, (end, rank))
            queue = feeds[step]
            if queue >= 0:
                other = placement[queue % stages]
                if other != rank and busy[other] <= now and wakes[other] != now:
                    wakes[other] = now
                    heappush(due, (now, other))
        return None if left else self.order

    def _choose(self, rank: int, now: float) -> tuple[float, int]:
        """The step that a rank takes next, and when it can start; -1 for none that it knows of."""
        task, rule, arrivals = self.task, self.rule, self.arrivals
        stages, microbatches = task.stages, task.microbatches
        keys, durations = rule.keys, task.durations
        found: list[tuple[float, float, int]] = []
        short = None  # how urgent a forward is that memory is missing for
        for stage in task.stages_of[rank]:
            m = self.forwards[stage]
            if m < microbatches:
                queue = arrivals[stage]
                if stage == 0 or len(queue) > m:
                    start = now if stage == 0 or queue[m] < now else queue[m]
                    step = self._forward(rank, stage)
                    key = keys[stage][m]
                    if step >= 0:
                        found.append((key, start, step))
                    elif start <= now and (short is None or key < short):
                        short = key
            m = self.backwards[stage]
            if m < self.forwards[stage]:
                queue = arrivals[stages + stage]
                last = stage == stages - 1
                if last or len(queue) > m:
                    start = now if last or queue[m] < now else queue[m]
                    kind = INPUT if rule.split[stage][m] else BACKWARD
                    key = keys[kind * stages + stage][m]
                    runs, lean = self.again[stage], self.lean[stage]
                    if runs < len(lean) and lean[runs] == m:
                        step = RECOMPUTE * stages + stage
                        if self.held[rank] + task.kept[step] <= self.limit[rank]:
                            found.append((key, now, step))
                        elif short is None or key < short:
                            short = key
                    else:
                        found.append((key, start, kind * stages + stage))
        for stage in task.stages_of[rank]:
            m = self.weights[stage]
            if m < self.inputs[stage]:
                step = WEIGHT * stages + stage
                key = keys[step][m]
                found.append((key if short is None or key < short else short, now, step))
        if not found:
            return -1, -1
        if len(found) == 1:
            return found[0][1:]
        first = min([start for _, start, _ in found])
        over = min([start + durations[step] for _, start, step in found])
        own = task.stages_of[rank]
        patience = rule.patience
        if not self.backwards[own[-1]]:
            patience = rule.eager
        elif self.forwards[own[-1]] == microbatches:
            patience = rule.late
        until = first + patience * (over - first)
        _, start, step = min([each for each in found if each[1] <= until])
        return start, step

    def _forward(self, rank: int, stage: int) -> int:
        """The step that runs the stage's next forward, -1 where there is no room for it."""
        memory, again = self.task.memory, self.rule.again[stage][self.forwards[stage]]
        if again != ALWAYS and self._has_room(rank, stage, memory.full[stage], 0):
            return stage
        if again and self._has_room(rank, stage, memory.lean[stage], self.extra[rank]):
            return LEAN * self.task.stages + stage
        return -1

    def _has_room(self, rank: int, stage: int, size: float, extra: float) -> bool:
        """Whether a forward may start, that keeps so much, and `extra` as it is run again."""
        limit, held = self.limit[rank], self.held[rank] + size
        if held > limit:
            return False
        own = self.task.stages_of[rank]
        again = extra or any(self.again[s] < len(self.lean[s]) for s in own)
        if len(own) == 1 and not again:
            return True
        rest = self.task.memory.rest
        left = limit - held + sum(rest[s] * (self.inputs[s] - self.weights[s]) for s in own)
        if again and left < self.extra[rank]:
            return False
        forwards, sums = self.forwards, self.sums
        # What is kept of microbatches of which some chunk has not run yet, the youngest first.
        partial, segments = 0.0, []
        for chunk in range(1, len(own)):
            newest, oldest = forwards[own[chunk - 1]], forwards[own[chunk]]
            if own[chunk - 1] == stage:
                newest += 1
            elif own[chunk] == stage:
                oldest += 1
            if oldest < newest:
                kept = 0.0
                for before in own[:chunk]:
                    kept += sums[before][min(newest, forwards[before])] - sums[before][oldest]
                if own[chunk - 1] == stage:
                    kept += size
                partial += kept
                segments.append((sum(self.least[s] for s in own[chunk:]), kept))
        # The oldest are finished first, after all that no chunk is missing of.
        left = limit - sum(self.task.memory.gradient[s] for s in own) - partial
        for need, kept in reversed(segments):
            if left < need + self.extra[rank]:
                return False
            left += kept
        return True

    def _take(self, rank: int, step: int, end: float) -> None:
        """Begin a step that is over at `end`."""
        task, wiring = self.task, self.task.wiring
        kind, stage = divmod(step, task.stages)
        self.order[rank].append(step)
        self.held[rank] += task.kept[step]
        if kind <= LEAN:
            if kind == LEAN:
                self.lean[stage].append(self.forwards[stage])
            self.forwards[stage] += 1
            self.sums[stage].append(self.sums[stage][-1] + task.kept[step])
        elif kind == RECOMPUTE:
            self.again[stage] += 1
        elif kind == WEIGHT:
            self.weights[stage] += 1
        else:
            self.backwards[stage] += 1
            if kind == INPUT:
                self.inputs[stage] += 1
        queue = wiring.feeds[step]
        if queue >= 0:
            channel = wiring.channel[queue]
            if channel >= 0:
                end = max(end, self.free[channel])
                self.free[channel] = end + wiring.holds[queue]
            self.arrivals[queue].append(end + wiring.takes[queue])
