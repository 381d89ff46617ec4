"""Searches the orders of small work side by side: a beam search, step after step.

A state is the work that has begun: how often each step of each stage ran, when each rank is free
again, and when each transfer arrives. Every step that can begin next makes a new state. Of the
states in which the same work has begun, a state that is earlier in nothing than another one is
needless:

    rank 0   F0 F1          and   rank 0   F0    F1        have begun the same work, the second one
    rank 1      F0                rank 1      F0           later

The search drops every state that can't become quicker than the best known order, and keeps the most
promising of the others. If it drops no others, nothing is quicker than the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import ge
from typing import Any, TypeAlias

import attrs

from schedir.finder.bounds import Work
from schedir.finder.terms import BACKWARD, INPUT, LEAN, RECOMPUTE, WEIGHT, Task
from schedir.graph.board import BACK, DEFERRED, KEPT, Board, Order, options, take

SMALL = 60
"""The most actions of small work; a backward counts as two if it may be split."""
_WIDTHS = (16, 64, 256, 1024, 4096, 16384)
_RIVALS = 8  # states in which the same has begun that one is compared with
_ALIKE = 1 - 1e-9

_Past: TypeAlias = "tuple[_Past, int] | None"
_Counts: TypeAlias = tuple[int, ...]


def is_small(task: Task) -> bool:
    """True if a task is small enough for this search."""
    return (2 + task.split) * task.stages * task.microbatches <= SMALL


def branched(task: Task, known: Callable[[], float]) -> Iterator[tuple[int, Order | None]]:
    """Orders that are quicker than the `known` value, with wider and wider beams.

    Each turn yields (how many states were made since the last turn, a complete order or None). It
    ends when no order is left that might be quicker.
    """
    space = _Space(task)
    for width in _WIDTHS:
        states, cut = [space.first()], False
        for _ in range(6 * task.stages * task.microbatches):
            made: list[_State] = []
            most = known() * _ALIKE
            for state in states:
                made += space.after(state, most)
            complete = [state for state in made if space.is_complete(state)]
            best = min(complete, key=lambda each: each.bound, default=None)
            yield len(made), None if best is None else space.order(best)
            most = known() * _ALIKE
            rest = (each for each in made if each.bound < most and not space.is_complete(each))
            states = _undominated(rest)
            if len(states) > width:
                states, cut = states[:width], True
            if not states:
                break
        if not cut:
            return


@attrs.frozen(eq=False)
class _State:
    """A Board; of the microbatches that are kept `short` has where there has been no room for them
    since. What begins later does so at `now` or after it. The value can't be below `bound`."""

    board: Board
    short: tuple[tuple[bool, ...], ...]
    now: float
    past: _Past
    bound: float
    idle: float

    @property
    def begun(self) -> Any:
        """The same for all in which the same has begun, whatever was run again for it."""
        there, turns, stages = self.board.there, self.board.turns, len(self.short)
        put_off = tuple(map(len, there[DEFERRED * stages :]))
        kept = tuple(there[KEPT * stages : BACK * stages])
        return tuple(turns[:stages]), tuple(turns[BACK * stages :]), kept, put_off

    def is_later(self, other: _State) -> bool:
        """True if the same work has begun in both states, and everything here is as late as in the
        other, or later."""
        mine, its = self.board, other.board
        return all(map(ge, chain(mine.free, *mine.there), chain(its.free, *its.there)))


def _undominated(states: Iterable[_State]) -> list[_State]:
    """The states that no other state makes needless, the most promising first."""
    kept: list[_State] = []
    rivals: dict[Any, list[_State]] = {}
    for state in sorted(states, key=lambda each: (each.bound, each.idle)):
        same = rivals.setdefault(state.begun, [])
        if not any(state.is_later(other) for other in same):
            kept.append(state)
            if len(same) < _RIVALS:
                same.append(state)
    return kept


class _Space:
    """The states of a task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        costs = task.costs
        work = Work(costs, task.microbatches, task.split, task.recompute)
        self.inputs, self.wholes, self.turns = work.inputs, work.wholes, work.turns
        self.steps = [sum(after) for after in task.steps_after]
        self.head = [0.0] * task.ranks
        if task.objective == "span":  # each rank begins with its first stage, as soon as it can
            self.head = [work.heads[own[0]] for own in task.stages_of]
        # What follows the gradient of a stage's input, at the least, until the end that counts.
        self.rests: list[float] = []
        for s, rank in enumerate(task.placement):
            rest = self.wholes[s] - self.inputs[s] + costs.optim_step[s] - self.head[rank]
            if s:
                rest = max(rest, costs.up[s - 1] + self.inputs[s - 1] + self.rests[-1])
            self.rests.append(rest)
        # What is the better the earlier it comes, whatever follows.
        self.fillers: set[int] = set()
        changes = task.steps.changes
        if not any(task.steps.holds):
            for kind in (BACKWARD, INPUT, WEIGHT):
                for s in costs.stages:
                    step = kind * task.stages + s
                    split = kind == INPUT and costs.backward_weight[s] > costs.backward[s]
                    if not split and changes[step] <= 0 and not task.memory.gradient[s]:
                        self.fillers.add(step)
        # By queue, the steps that may take the next one.
        self.takers: list[list[int]] = [[] for _ in task.steps.channel]
        for step, queue in enumerate(task.steps.queue):
            kind, s = divmod(step, task.stages)
            saves = task.recompute and task.memory.lean[s] < task.memory.full[s]
            if (kind != INPUT or task.split) and (kind != LEAN or saves):
                self.takers[queue].append(step)
        self._seen: dict[tuple[int, _Counts, _Counts], bool] = {}

    def first(self) -> _State:
        """Where nothing has begun."""
        task = self.task
        return _State(Board.of(task.steps), ((),) * task.stages, 0.0, None, 0.0, 0.0)

    def is_complete(self, state: _State) -> bool:
        """Whether all has begun."""
        stages, many = self.task.stages, self.task.microbatches
        board = state.board
        backwards = board.turns[BACK * stages : DEFERRED * stages]
        return backwards == [many] * stages and not any(board.there[DEFERRED * stages :])

    def order(self, state: _State) -> Order:
        """The order of its steps."""
        order: Order = [[] for _ in range(self.task.ranks)]
        past = state.past
        while past is not None:
            past, step = past
            order[self.task.placement[step % self.task.stages]].append(step)
        return [steps[::-1] for steps in order]

    def after(self, state: _State, most: float) -> Iterator[_State]:
        """What can come next, and may still end before `most`."""
        for rank in range(self.task.ranks):
            can = [*self._steps(state, rank)]
            if not can:
                continue
            # What leaves a gap that something else fits into, and keeps no more, is needless.
            over = min((end for _, end, step in can if step in self.fillers), default=math.inf)
            for start, end, step in can:
                if start < over or (start == over and end == over):
                    new = self._taken(state, rank, start, step, most)
                    if new is not None:
                        yield new

    def _steps(self, state: _State, rank: int) -> Iterator[tuple[float, float, int]]:
        """The steps that a rank can begin with what is under way: when each starts and ends."""
        steps = self.task.steps
        limit = self.task.memory.limit[rank] - state.board.held[rank]
        now = max(state.board.free[rank], state.now)
        for start, value, stage in options(state.board, rank, now):
            for step in self.takers[value * self.task.stages + stage]:
                if steps.changes[step] <= limit:
                    yield start, start + steps.lasts[step], step

    def _taken(
        self, state: _State, rank: int, start: float, step: int, most: float
    ) -> _State | None:
        """The state with one step more; None where that can't go on to an end before `most`."""
        task, memory = self.task, self.task.memory
        stages, many = task.stages, task.microbatches
        kind, s = divmod(step, stages)
        short = state.short
        if kind == LEAN:
            short = _with(short, s, (*short[s], False))
        elif kind == RECOMPUTE:
            if not short[s][0]:
                return None  # it would be quicker to have kept it
            short = _with(short, s, short[s][1:])
        board = state.board.copy()
        take(board, step, start)
        turns, free, held = board.turns, board.free, board.held[rank]
        if held > memory.limit[rank]:
            return None
        own = task.stages_of[rank]
        for each in own:
            if short[each] and held + (memory.full[each] - memory.lean[each]) > memory.limit[rank]:
                short = _with(short, each, (True,) * len(short[each]))
        if memory.limited and not task.recompute:
            forwards = tuple([turns[each] for each in own])
            backwards = tuple([turns[BACK * stages + each] for each in own])
            if not self._finishes(rank, forwards, backwards):
                return None
        # What is free before now is as good as free now, but at a rank that is done.
        for other, own in enumerate(task.stages_of):
            if free[other] < start and any(turns[BACK * stages + s] < many for s in own):
                free[other] = start
        bound, idle = self._bounds(board)
        if bound >= most:
            return None
        return _State(board, short, start, (state.past, step), bound, idle)

    def _finishes(self, rank: int, forwards: _Counts, backwards: _Counts) -> bool:
        """Whether a rank that has begun so many of each of its stages can go on to its end within
        its limit."""
        key = rank, forwards, backwards
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = self._goes_on(*key)
        return found

    def _goes_on(self, rank: int, forwards: _Counts, backwards: _Counts) -> bool:
        task, own, many = self.task, self.task.stages_of[rank], self.task.microbatches
        full, gradient = task.memory.full, task.memory.gradient
        held = sum(
            full[s] * (f - b) + gradient[s] * (b > 0)
            for s, f, b in zip(own, forwards, backwards, strict=True)
        )
        if held > task.memory.limit[rank]:
            return False
        if backwards == (many,) * len(own):
            return True
        for c in range(len(own)):
            f, b = forwards[c], backwards[c]
            above = backwards[c + 1] if c + 1 < len(own) else many
            if b < f and b < above and self._finishes(rank, forwards, _with(backwards, c, b + 1)):
                return True
            below = forwards[c - 1] if c else many
            if f < below and self._finishes(rank, _with(forwards, c, f + 1), backwards):
                return True
        return False

    def _bounds(self, board: Board) -> tuple[float, float]:
        """What the value can't be below, and how much time is used up at the least."""
        task, costs, many = self.task, self.task.costs, self.task.microbatches
        stages, placement, forward = task.stages, task.placement, costs.forward
        inputs, wholes, turns, rests = self.inputs, self.wholes, self.turns, self.rests
        there, free, forwards = board.there, board.free, board.turns
        backwards = forwards[BACK * stages :]
        back, deferred = there[BACK * stages :], there[DEFERRED * stages :]
        kept = there[KEPT * stages :]
        bound = idle = 0.0
        starts: list[float] = []  # of the next forward of each stage, at the earliest
        for s in range(stages):
            start, left = free[placement[s]], many - forwards[s]
            if there[s]:
                start = max(start, there[s][0])
            elif s and left:
                start = max(start, starts[-1] + forward[s - 1] + costs.down[s])
            starts.append(start)
            if left:
                end = start + (left - 1) * forward[s] + turns[s] + inputs[s] + rests[s]
                if end > bound:
                    bound = end
        start = 0.0
        for s in range(stages - 1, -1, -1):
            left = many - backwards[s]
            if not left:
                continue
            now = free[placement[s]]
            if back[s]:
                now = max(now, back[s][0])
            elif s < stages - 1:
                now = max(now, start + inputs[s + 1] + costs.up[s])
            if forwards[s] == backwards[s]:
                now = max(now, starts[s] + turns[s])
            start = now
            end = start + left * inputs[s] + rests[s]
            if end > bound:
                bound = end
        for rank, own in enumerate(task.stages_of):
            ends = done = free[rank]
            rest = math.inf
            for s in own:
                left = many - backwards[s]
                onward = (many - forwards[s]) * forward[s] + len(kept[s]) * costs.recompute[s]
                ends += onward + left * wholes[s]
                ends += len(deferred[s]) * costs.backward_weight[s]
                done += onward + left * inputs[s]
                if left and rests[s] < rest:
                    rest = rests[s]
            idle += ends
            bound = max(bound, ends + self.steps[rank] - self.head[rank])
            if rest < math.inf:
                bound = max(bound, done + rest)
        return bound, idle


def _with(values: Any, place: int, value: Any) -> Any:
    return (*values[:place], value, *values[place + 1 :])
