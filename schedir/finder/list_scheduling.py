"""From a rule to an order: time advances, and a free rank takes the step that the rule ranks first
among those that can start.

    time     0   1   2   3   4   5   6
    rank 0   F0  F1  F2      I0  W0  I1      at 3 the I of microbatch 0 is known to arrive at 4:
    rank 1       F0  I0  F1  I1  W0          with patience the rank waits for it, without it takes
                                             what can start at once

Neighbours know what a rank has begun, and so when its result will arrive. A rank looks that far
ahead, and may wait for a result that is under way.

A FORWARD may start only if it leaves enough memory to finish the microbatches in flight one after
the other, the oldest first (Dijkstra's banker): room is kept for the later chunks of a microbatch
on the same rank. So no choice can lead to a dead end.

    limit 4, 2 chunks: F0 F1 F2, and no F3 before the second chunk of 0: it would have no room
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import attrs

from schedir.finder.terms import BACKWARD, INPUT, LEAN, RECOMPUTE, WEIGHT, Task
from schedir.graph.board import BACK, DEFERRED, DOWN, KEPT, Board, Order, options, play

NEVER, NEEDED, ALWAYS = range(3)
"""Whether forwards of a stage are run again: never, if memory is short, or always."""


@attrs.frozen(eq=False)
class Rule:
    """What a rank takes first: the queue with the least `keys[queue][turn]`.

    It waits for a better step for the part `patience` of the time until the first other step would
    end; before its first backward for the part `eager`, after its last forward for the part `late`.
    A rank keeps at most `cap[rank]`, in the unit of the memory limit. `split[stage]` says whether
    backwards are split, `again[stage]` whether forwards are run again.
    """

    keys: list[list[float]]
    patience: float
    eager: float
    late: float
    cap: list[float]
    split: list[list[bool]]
    again: list[list[int]]


def scheduled(task: Task, rule: Rule) -> Order | None:
    """The order that a rule makes; None if it can't continue within the cap."""
    ruled = _Ruled(task, rule)
    return play(ruled.board, ruled.choose)


class _Ruled:
    """A Board, on which a rule chooses."""

    def __init__(self, task: Task, rule: Rule) -> None:
        self.task, self.rule = task, rule
        memory = task.memory
        self.gradients = [sum(memory.gradient[s] for s in held) for held in task.stages_of]
        # All gradients have their place from the beginning.
        self.board = Board.of(attrs.evolve(task.steps, gradient=[0] * task.stages))
        self.board.held = [*self.gradients]
        self.limit = [min(most, cap) for most, cap in zip(memory.limit, rule.cap, strict=True)]
        # The least that a microbatch of each stage needs, what running one again adds to that, and
        # what one needs from each chunk of a rank on.
        least = [
            lean if max(again) and lean < full else full
            for lean, full, again in zip(memory.lean, memory.full, rule.again, strict=True)
        ]
        self.extra = [max(memory.full[s] - least[s] for s in held) for held in task.stages_of]
        self.needs = [
            [sum(least[s] for s in held[chunk:]) for chunk in range(len(held))]
            for held in task.stages_of
        ]
        self.again = any(map(max, rule.again))
        # By stage, what the forwards up to each microbatch keep.
        self.sums: list[list[float]] = [[0.0] for _ in range(task.stages)]

    def choose(self, rank: int, now: float) -> tuple[float, int]:
        """The step that a rank takes next, and when it can start; -1 for none that it knows of."""
        task, rule, board = self.task, self.rule, self.board
        stages, turns, keys = task.stages, board.turns, rule.keys
        found: list[tuple[float, float, int]] = []
        late: list[tuple[float, int]] = []
        short = math.inf  # how urgent a step is that memory is missing for
        for start, value, stage in options(board, rank, now):
            queue = (BACK if value == KEPT else value) * stages + stage
            m = turns[queue]
            key = keys[queue][m]
            if value == DOWN:
                step = self._forward(rank, stage, m)
                if step >= 0:
                    found.append((key, start, step))
                elif start <= now and key < short:
                    short = key
            elif value == BACK:
                way = INPUT if rule.split[stage][m] else BACKWARD
                found.append((key, start, way * stages + stage))
            elif value == DEFERRED:
                late.append((key, WEIGHT * stages + stage))
            # One is run again only ahead of its backward.
            elif board.there[queue] and board.there[KEPT * stages + stage][0] == m:
                step = RECOMPUTE * stages + stage
                if board.held[rank] + task.steps.changes[step] <= self.limit[rank]:
                    found.append((key, now, step))
                elif key < short:
                    short = key
        for key, step in late:
            found.append((key if key < short else short, now, step))
        if not found:
            return -1, -1
        if len(found) == 1:
            _, start, step = found[0]
        else:
            start, step = self._best(rank, found)
        if step < 2 * stages and start <= now:
            sums = self.sums[step % stages]
            sums.append(sums[-1] + task.steps.changes[step])
        return start, step

    def _best(self, rank: int, found: list[tuple[float, float, int]]) -> tuple[float, int]:
        """What the rule takes first of those that can start soon enough."""
        task, rule, turns, lasts = self.task, self.rule, self.board.turns, self.task.steps.lasts
        first = over = math.inf
        for _, start, step in found:
            if start < first:
                first = start
            if start + lasts[step] < over:
                over = start + lasts[step]
        last = task.stages_of[rank][-1]
        patience = rule.patience
        if not turns[BACK * task.stages + last]:
            patience = rule.eager
        elif turns[last] == task.microbatches:
            patience = rule.late
        until = first + patience * (over - first)
        _, start, step = min([each for each in found if each[1] <= until])
        return start, step

    def _forward(self, rank: int, stage: int, m: int) -> int:
        """The step that runs the stage's next forward, -1 where there is no room for it."""
        memory, again = self.task.memory, self.rule.again[stage][m]
        if again != ALWAYS and self._has_room(rank, stage, memory.full[stage], 0):
            return stage
        if again and self._has_room(rank, stage, memory.lean[stage], self.extra[rank]):
            return LEAN * self.task.stages + stage
        return -1

    def _has_room(self, rank: int, stage: int, size: float, extra: float) -> bool:
        """Whether a forward may start, that keeps so much, and `extra` as it is run again."""
        task, board = self.task, self.board
        limit, held = self.limit[rank], board.held[rank] + size
        if held > limit:
            return False
        own = task.stages_of[rank]
        stages = task.stages
        again = self.again and (extra or any(board.there[KEPT * stages + s] for s in own))
        if len(own) == 1 and not again:
            return True
        turns, sums = board.turns, self.sums
        if again:
            rest = task.memory.rest
            put_off = [rest[s] * len(board.there[DEFERRED * stages + s]) for s in own]
            left = limit - held + sum(put_off)
            if left < self.extra[rank]:
                return False
        # What is kept of microbatches of which some chunk has not run yet, the youngest first.
        partial, segments, needs = 0.0, [], self.needs[rank]
        for chunk in range(1, len(own)):
            newest, oldest = turns[own[chunk - 1]], turns[own[chunk]]
            if own[chunk - 1] == stage:
                newest += 1
            elif own[chunk] == stage:
                oldest += 1
            if oldest < newest:
                kept = 0.0
                for before in own[:chunk]:
                    kept += sums[before][min(newest, turns[before])] - sums[before][oldest]
                if own[chunk - 1] == stage:
                    kept += size
                partial += kept
                segments.append((needs[chunk], kept))
        # The oldest are finished first, after all that no chunk is missing of.
        left = limit - self.gradients[rank] - partial
        for need, kept in reversed(segments):
            if left < need + self.extra[rank]:
                return False
            left += kept
        return True


_FIRST = 1000.0  # periods: before all others of its rank
_PATIENCE = ("patience", "eager", "late")


@attrs.frozen(kw_only=True)
class Style:
    """How a rule ranks steps; times are in periods of the busiest rank.

    Ideal times are multiplied by `stretch`. Backwards are due `urgent` earlier, forwards of each
    further chunk `deep` earlier, gradients of weights `lazy` later. As the step advances they
    become due even later, by `lag` of a rank's share for its last microbatches. A rank keeps at
    most the part `cap` of its limit, or this many times what its stages keep of a microbatch.
    Jitter is at most `noise`, drawn with `seed`.
    """

    patience: float = 0.3
    eager: float = 1.0
    late: float = 0.3
    urgent: float = _FIRST
    lazy: float = _FIRST
    lag: float = 0.0
    deep: float = 0.0
    stretch: float = 1.0
    cap: float = 0.0
    split: bool = True
    again: int = NEVER
    noise: float = 0.0
    seed: int = 0


def styles(task: Task) -> Iterator[Style]:
    """The styles to begin with, the likeliest first."""
    splits = [True, False] if task.split else [False]
    agains = [NEVER, NEEDED, ALWAYS] if task.recompute else [NEVER]
    caps = [0.0] if task.memory.limited else [0.0, 2.0 * task.ranks, 1.0 * task.ranks]
    ways = [
        Style(),
        Style(eager=0.6),
        Style(patience=0.0, eager=0.0, late=0.0),
        Style(lazy=0.0, urgent=0.0, lag=2.0),
        Style(patience=0.0, eager=0.3, late=1.0),
        Style(patience=0.6, late=1.0),
        Style(urgent=0.0, late=1.0),
        Style(urgent=0.0, lazy=0.0),
        Style(patience=1.0, late=1.0),
        Style(urgent=-_FIRST),
    ]
    deeps = [0.0, 1.0, _FIRST, -_FIRST] if len(task.stages_of[0]) > 1 else [0.0]
    aspects: dict[str, list[Any]] = {"deep": deeps, "cap": caps, "again": agains, "split": splits}
    turns = product(*map(range, map(len, (ways, *aspects.values()))))
    # Those that are likely in all respects come before those that are so in one alone.
    for way, *others in sorted(turns, key=sum):
        chosen = {name: aspects[name][turn] for name, turn in zip(aspects, others, strict=True)}
        if chosen["split"] or ways[way].lazy:
            yield attrs.evolve(ways[way], **chosen)


def varied(style: Style, random: Random) -> Style:
    """A similar style."""
    changes: dict[str, Any] = {"seed": random.randrange(1 << 30)}
    for name in ("noise", *_PATIENCE, "stretch", "lag", "deep", "urgent", "lazy", "cap"):
        if random.random() < 0.35:
            changes[name] = _varied(name, getattr(style, name), random)
    return attrs.evolve(style, **changes)


def _varied(name: str, value: float, random: Random) -> float:
    if name in _PATIENCE:
        return min(1.0, max(0.0, value + random.gauss(0, 0.2)))
    if name == "noise":
        return random.choice((0.0, 0.1, 0.3, 1.0))
    if name == "stretch":
        return max(0.1, value * random.lognormvariate(0, 0.4))
    if name == "cap":
        return value and max(1.0, value * random.lognormvariate(0, 0.3))
    if abs(value) >= _FIRST:
        return value if random.random() < 0.7 else random.gauss(0, 2)
    return value + random.gauss(0, 1)


def rule_of(task: Task, style: Style) -> Rule:
    """The rule of a style."""
    stages, costs, many, period = task.stages, task.costs, task.microbatches, task.period
    split = style.split and task.split
    back = costs.backward_input if split else costs.backward
    random = Random(style.seed)

    def jitter() -> float:
        return random.gauss(0, style.noise) * period if style.noise else 0.0

    now, forwards, backwards = 0.0, [], [0.0] * stages
    for s in range(stages):
        now += costs.down[s] * style.stretch
        forwards.append(now + jitter())
        now += costs.forward[s] * style.stretch
    for s in reversed(range(stages)):
        now += costs.up[s] * style.stretch
        backwards[s] = now + jitter()
        now += back[s] * style.stretch
    times = [period * m for m in range(many)]
    keys: list[list[float]] = [[] for _ in task.steps.channel]
    for s in range(stages):
        rank = task.placement[s]
        chunk = task.stages_of[rank].index(s)
        due = forwards[s] - style.deep * period * chunk
        keys[DOWN * stages + s] = [due + time for time in times]
        due = backwards[s] - style.urgent * period
        keys[BACK * stages + s] = [due + time for time in times]
        due = backwards[s] + back[s] + style.lazy * period + jitter()
        lag = style.lag * (rank + 1) / many
        keys[DEFERRED * stages + s] = [due + time * (1 + lag) for time in times]
    return Rule(
        keys,
        style.patience,
        style.eager,
        style.late,
        [
            style.cap * max(task.memory.full[s] for s in held) if style.cap else math.inf
            for held in task.stages_of
        ],
        [[split] * many] * stages,
        [[style.again] * many] * stages,
    )
