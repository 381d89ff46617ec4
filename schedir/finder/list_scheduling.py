"""From a style to an order: time advances, and a free rank takes the step that the style ranks
first among those that can start.

    time     0   1   2   3   4   5   6
    rank 0   F0  F1  F2      I0  W0  I1      at 3 the I of microbatch 0 is known to arrive at 4:
    rank 1       F0  I0  F1  I1  W0          with patience the rank waits for it, without it takes
                                             what can start at once

Neighbours know what a rank has begun, and so when its result will arrive. A rank looks that far
ahead, and may wait for a result that is under way.

Each step is due at a time: that of an ideal pipeline which takes in a microbatch every *period*. A
rank takes the step that is due first, and no forward earlier than `lead` periods before it is due,
so that memory stays free for the microbatches that are further on.

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

from schedir.finder.orders import Run, timed
from schedir.finder.terms import BACKWARD, INPUT, LEAN, RECOMPUTE, WEIGHT, Task
from schedir.graph.board import BACK, DEFERRED, DOWN, KEPT, Board, options, play

NEVER, NEEDED, ALWAYS = range(3)
"""Whether forwards are run again: never, if memory is short, or always."""
_FIRST = 1000.0  # periods: before all others of its rank


@attrs.frozen(kw_only=True)
class Style:
    """How a list schedule ranks steps; times are in periods.

    Backwards are due `urgent` earlier, forwards of each further chunk `deep` earlier, gradients of
    weights `lazy` later. As the step advances these become due even later, by `lag` of a rank's
    share for its last microbatches. A forward begins at most `lead` before it is due. A rank leaves
    `spare` activations of its limit free.

    A rank waits for a better step for the part `patience` of the time until the first other step
    would end; before its first backward for the part `eager`, after its last forward for the part
    `late`. `split` says whether backwards are split, `again` whether forwards are run again.
    """

    patience: float = 0.3
    eager: float = 1.0
    late: float = 0.3
    urgent: float = _FIRST
    lazy: float = _FIRST
    lag: float = 0.0
    deep: float = 0.0
    lead: float = math.inf
    spare: int = 0
    split: bool = True
    again: int = NEVER


_WAYS = (
    Style(),
    Style(eager=0.6),
    Style(patience=0.0, eager=0.0, late=0.0),
    Style(lead=1.0),
    Style(lazy=0.0, urgent=0.0, lag=2.0),
    Style(patience=0.0, eager=0.3, late=1.0),
    Style(patience=0.6, late=1.0),
    Style(urgent=0.0, late=1.0),
    Style(urgent=0.0, lazy=0.0),
    Style(urgent=-_FIRST),
)
_DRAWN: dict[str, tuple[float, ...]] = {
    "patience": (0.0, 0.3, 0.6, 1.0),
    "eager": (0.0, 0.3, 0.6, 1.0),
    "late": (0.0, 0.3, 1.0),
    "urgent": (_FIRST, _FIRST, 2.0, 1.0, 0.0, -1.0, -_FIRST),
    "lazy": (_FIRST, _FIRST, 2.0, 1.0, 0.5, 0.0),
    "lag": (0.0, 0.0, 1.0, 2.0),
    "deep": (0.0, 0.5, 1.0, 2.0, _FIRST, -_FIRST),
    "lead": (math.inf, 0.0, 0.5, 1.0, 2.0, 4.0),
    "spare": (0, 0, 0, 1, 2),
}


def styles(task: Task, random: Random) -> Iterator[Style]:
    """The styles to try: the likeliest first, then drawn at random without end."""
    splits = [True, False] if task.split else [False]
    agains = [NEEDED, NEVER, ALWAYS] if task.recompute else [NEVER]
    deeps = [0.0, 1.0, _FIRST, -_FIRST] if len(task.stages_of[0]) > 1 else [0.0]
    turns = product(*map(range, map(len, (_WAYS, deeps, agains, splits))))
    # Those that are likely in all respects come before those that are so in one alone.
    for way, deep, again, split in sorted(turns, key=sum):
        yield attrs.evolve(_WAYS[way], deep=deeps[deep], again=agains[again], split=splits[split])
    while True:
        drawn: dict[str, Any] = {name: random.choice(values) for name, values in _DRAWN.items()}
        yield Style(
            **drawn,
            split=random.choice(splits),
            again=random.choice(agains),
        )


def scheduled(task: Task, style: Style) -> Run | None:
    """The run that a style makes; None if it can't continue within the limit."""
    styled = _Styled(task, style)
    order = play(styled.board, styled.choose)
    return None if order is None else timed(task, order)


class _Styled:
    """A Board, on which a style chooses."""

    def __init__(self, task: Task, style: Style) -> None:
        self.task, self.style = task, style
        self.split, self.again = style.split and task.split, style.again
        memory = task.memory
        self.gradients = [sum(memory.gradient[s] for s in held) for held in task.stages_of]
        # All gradients have their place from the beginning.
        self.board = Board.of(attrs.evolve(task.steps, gradient=[0] * task.stages))
        self.board.held = [*self.gradients]
        self.limit = [
            most - style.spare * max(memory.full[s] for s in held)
            for most, held in zip(memory.limit, task.stages_of, strict=True)
        ]
        # The least that a microbatch of each stage needs, what running one again adds to that, and
        # what one needs from each chunk of a rank on.
        least = [
            lean if self.again and lean < full else full
            for lean, full in zip(memory.lean, memory.full, strict=True)
        ]
        self.extra = [max(memory.full[s] - least[s] for s in held) for held in task.stages_of]
        self.needs = [
            [sum(least[s] for s in held[chunk:]) for chunk in range(len(held))]
            for held in task.stages_of
        ]
        # By stage, what the forwards up to each microbatch keep.
        self.sums: list[list[float]] = [[0.0] for _ in range(task.stages)]
        self._rank_steps()

    def _rank_steps(self) -> None:
        """Set when the first step of each queue is due, by how much each further one is due later,
        and how early the first forward of each stage may begin."""
        task, style = self.task, self.style
        costs, stages, period = task.costs, task.stages, task.period
        back = costs.backward_input if self.split else costs.backward

        self.due = [0.0] * len(task.steps.channel)
        self.later = [period] * len(task.steps.channel)
        downs, ups = costs.alone(back)
        self.begin = [start - style.lead * period for start in downs]
        for s, rank in enumerate(task.placement):
            chunk = task.stages_of[rank].index(s)
            self.due[DOWN * stages + s] = downs[s] - style.deep * period * chunk
            self.due[BACK * stages + s] = ups[s] - style.urgent * period
            self.due[DEFERRED * stages + s] = ups[s] + back[s] + style.lazy * period
            share = (rank + 1) / task.microbatches
            self.later[DEFERRED * stages + s] = period * (1 + style.lag * share)

    def choose(self, rank: int, now: float) -> tuple[float, int]:
        """The step that a rank takes next, and when it can start; -1 for none that it knows of."""
        task, board = self.task, self.board
        stages, turns, due, later = task.stages, board.turns, self.due, self.later
        back = INPUT if self.split else BACKWARD
        found: list[tuple[float, float, int]] = []
        late: list[tuple[float, int]] = []
        short = math.inf  # how urgent a step is that memory is missing for
        for start, value, stage in options(board, rank, now):
            queue = (BACK if value == KEPT else value) * stages + stage
            m = turns[queue]
            key = due[queue] + later[queue] * m
            if value == DOWN:
                start = max(start, self.begin[stage] + later[queue] * m)
                step = self._forward(rank, stage)
                if step >= 0:
                    found.append((key, start, step))
                elif start <= now and key < short:
                    short = key
            elif value == BACK:
                found.append((key, start, back * stages + stage))
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
        """What the style takes first of those that can start soon enough."""
        task, style, turns, lasts = self.task, self.style, self.board.turns, self.task.steps.lasts
        first = over = math.inf
        for _, start, step in found:
            if start < first:
                first = start
            if start + lasts[step] < over:
                over = start + lasts[step]
        last = task.stages_of[rank][-1]
        patience = style.patience
        if not turns[BACK * task.stages + last]:
            patience = style.eager
        elif turns[last] == task.microbatches:
            patience = style.late
        until = first + patience * (over - first)
        _, start, step = min([each for each in found if each[1] <= until])
        return start, step

    def _forward(self, rank: int, stage: int) -> int:
        """The step that runs the stage's next forward, -1 where there is no room for it."""
        memory, again = self.task.memory, self.again
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
        if limit == math.inf or (len(own) == 1 and not again):
            return True
        if again:
            rest = task.memory.rest
            put_off = [rest[s] * len(board.there[DEFERRED * stages + s]) for s in own]
            left = limit - held + sum(put_off)
            if len(own) == 1:
                # What is held in full before the first that is run again is finished before it.
                waiting = board.there[KEPT * stages + stage]
                first = waiting[0] if waiting else board.turns[stage]
                left += task.memory.full[stage] * (first - board.turns[BACK * stages + stage])
            if left < self.extra[rank]:
                return False
        # As if this forward had begun: what is kept of microbatches of which some chunk has not run
        # yet, the youngest first.
        sums = [self.sums[s] for s in own]
        chunk = own.index(stage)
        sums[chunk] = [*sums[chunk], sums[chunk][-1] + size]
        partial, segments = 0.0, []
        for chunk, need in enumerate(self.needs[rank][1:], 1):
            newest, oldest = len(sums[chunk - 1]) - 1, len(sums[chunk]) - 1
            if oldest < newest:
                kept = sum([before[newest] - before[oldest] for before in sums[:chunk]])
                partial += kept
                segments.append((need, kept))
        # The oldest are finished first, after all that no chunk is missing of.
        left = limit - self.gradients[rank] - partial
        for need, kept in reversed(segments):
            if left < need + self.extra[rank]:
                return False
            left += kept
        return True
