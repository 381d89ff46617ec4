"""Goes through the orders of small work side by side: a beam search, step after step.

A state is what has begun: how often each step of each stage, when each rank is free again, when
what is under way arrives. All that can begin next makes states of one step more. Of those in which
the same has begun, one that is later in nothing makes others needless:

    rank 0   F0 F1          and   rank 0   F0    F1        have begun the same work, the second one
    rank 1      F0                rank 1      F0           later

None is kept that can't become quicker than what is known, and of the others the most promising.
Where that leaves none out, nothing is quicker than what is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import attrs

from schedir.finder.bounds import Work
from schedir.finder.task import BACKWARD, INPUT, LEAN, RECOMPUTE, WEIGHT, Order, Task

SMALL = 60
"""The most actions of small work, a backward counted as two where it may be split."""
_WIDTHS = (16, 64, 256, 1024, 4096, 16384)
_RIVALS = 8  # states in which the same has begun that one is compared with
_ALIKE = 1 - 1e-9

_Past: TypeAlias = "tuple[_Past, int] | None"
_Counts: TypeAlias = tuple[int, ...]


def is_small(task: Task) -> bool:
    """Whether to go through the orders of a task is worth its while."""
    return (2 + task.split) * task.stages * task.microbatches <= SMALL


def branched(task: Task, known: Callable[[], float]) -> Iterator[tuple[int, Order | None]]:
    """Orders that are quicker than what is `known`, with wider and wider beams.

    Each turn is (how many states were made since the last one, the order of one that is complete or
    None). It ends where no order is left that might be quicker.
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
    """What has begun: by stage `forwards`, `backwards` (B or I), `inputs` (I alone), `weights`, and
    `lean`, the microbatches whose forward is still to be run again; of those `short` has where
    there has been no room for them since.

    `free` is when each rank, then each channel is free; `arrivals[queue]` has what was not taken
    yet. Each rank keeps `held`. What begins later does so at `now` or after it. The value can't be
    below `bound`.
    """

    forwards: _Counts
    backwards: _Counts
    inputs: _Counts
    weights: _Counts
    lean: tuple[_Counts, ...]
    free: tuple[float, ...]
    arrivals: tuple[tuple[float, ...], ...]
    held: tuple[float, ...]
    short: tuple[tuple[bool, ...], ...]
    now: float
    past: _Past
    bound: float
    idle: float

    @property
    def begun(self) -> Any:
        """The same for all in which the same has begun."""
        return self.forwards, self.backwards, self.inputs, self.weights, self.lean

    def is_later(self, other: _State) -> bool:
        """Whether the same has begun here, and everything is there as late as in the other, or
        later."""
        return all(a >= b for a, b in zip(self.free, other.free, strict=True)) and all(
            a >= b
            for mine, its in zip(self.arrivals, other.arrivals, strict=True)
            for a, b in zip(mine, its, strict=True)
        )


def _undominated(states: Iterable[_State]) -> list[_State]:
    """The states that none other makes needless, the most promising first."""
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
        if not any(task.wiring.holds):
            for kind in (BACKWARD, INPUT, WEIGHT):
                for s in costs.stages:
                    step = kind * task.stages + s
                    split = kind == INPUT and costs.backward_weight[s] > costs.backward[s]
                    if not split and task.kept[step] <= 0 and not task.memory.gradient[s]:
                        self.fillers.add(step)
        self._seen: dict[tuple[int, _Counts, _Counts], bool] = {}

    def first(self) -> _State:
        """Where nothing has begun."""
        task = self.task
        none = (0,) * task.stages
        return _State(
            none,
            none,
            none,
            none,
            ((),) * task.stages,
            (0.0,) * (task.ranks + task.wiring.channels),
            ((),) * (2 * task.stages),
            (0.0,) * task.ranks,
            ((),) * task.stages,
            0.0,
            None,
            0.0,
            0.0,
        )

    def is_complete(self, state: _State) -> bool:
        """Whether all has begun."""
        many = self.task.microbatches
        return state.inputs == state.weights and all(b == many for b in state.backwards)

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
                    new = self._taken(state, rank, start, end, step, most)
                    if new is not None:
                        yield new

    def _steps(self, state: _State, rank: int) -> Iterator[tuple[float, float, int]]:
        """The steps that a rank can begin with what is under way: when each starts and ends."""
        task, many, stages = self.task, self.task.microbatches, self.task.stages
        kept, limit = task.kept, task.memory.limit[rank] - state.held[rank]
        free = max(state.free[rank], state.now)
        found: list[tuple[float, int]] = []
        for s in task.stages_of[rank]:
            forwards, backwards = state.forwards[s], state.backwards[s]
            if forwards < many and (s == 0 or state.arrivals[s]):
                start = max(free, state.arrivals[s][0]) if s else free
                found.append((start, s))
                if task.recompute and task.memory.lean[s] < task.memory.full[s]:
                    found.append((start, LEAN * stages + s))
            lean = state.lean[s]
            if lean:
                found.append((free, RECOMPUTE * stages + s))
            if backwards < forwards and (not lean or lean[0] != backwards):
                last, queue = s == stages - 1, state.arrivals[stages + s]
                if last or queue:
                    start = free if last else max(free, queue[0])
                    found.append((start, BACKWARD * stages + s))
                    if task.split:
                        found.append((start, INPUT * stages + s))
            if state.weights[s] < state.inputs[s]:
                found.append((free, WEIGHT * stages + s))
        for start, step in found:
            if kept[step] <= limit:
                yield start, start + task.durations[step], step

    def _taken(
        self, state: _State, rank: int, start: float, end: float, step: int, most: float
    ) -> _State | None:
        """The state with one step more; None where that can't go on to an end before `most`."""
        task = self.task
        wiring = task.wiring
        kind, s = divmod(step, task.stages)
        forwards, backwards, inputs, weights, lean = state.begun
        held, short = state.held[rank] + task.kept[step], state.short
        if kind <= LEAN:
            if kind == LEAN:
                lean = _with(lean, s, (*lean[s], forwards[s]))
                short = _with(short, s, (*short[s], False))
            forwards = _with(forwards, s, forwards[s] + 1)
        elif kind == RECOMPUTE:
            if not short[s][0]:
                return None  # it would be quicker to have kept it
            lean, short = _with(lean, s, lean[s][1:]), _with(short, s, short[s][1:])
        else:
            if kind in (BACKWARD, WEIGHT) and backwards[s] - inputs[s] + weights[s] == 0:
                held += task.memory.gradient[s]
                if held > task.memory.limit[rank]:
                    return None
            if kind == WEIGHT:
                weights = _with(weights, s, weights[s] + 1)
            else:
                backwards = _with(backwards, s, backwards[s] + 1)
                if kind == INPUT:
                    inputs = _with(inputs, s, inputs[s] + 1)
        for each in task.stages_of[rank]:
            if lean[each]:
                more = task.memory.full[each] - task.memory.lean[each]
                if held + more > task.memory.limit[rank]:
                    short = _with(short, each, (True,) * len(lean[each]))
        if task.memory.limited and not task.recompute:
            own = task.stages_of[rank]
            begun = (tuple(counts[s] for s in own) for counts in (forwards, backwards))
            if not self._finishes(rank, *begun):
                return None
        free, arrivals = [*state.free], [*state.arrivals]
        free[rank] = end
        queue = wiring.needs[step]
        if queue >= 0:
            arrivals[queue] = arrivals[queue][1:]
        queue = wiring.feeds[step]
        if queue >= 0:
            channel, begin = wiring.channel[queue], end
            if channel >= 0:
                begin = max(end, free[task.ranks + channel])
                free[task.ranks + channel] = begin + wiring.holds[queue]
            arrivals[queue] = (*arrivals[queue], begin + wiring.takes[queue])
        # What is free before now is as good as free now, but at a rank that is done.
        for other, own in enumerate(task.stages_of):
            if free[other] < start and any(backwards[s] < task.microbatches for s in own):
                free[other] = start
        bound, idle = self._bounds(forwards, backwards, inputs, weights, lean, free, arrivals)
        if bound >= most:
            return None
        return _State(
            forwards,
            backwards,
            inputs,
            weights,
            lean,
            tuple(free),
            tuple(arrivals),
            _with(state.held, rank, held),
            short,
            start,
            (state.past, step),
            bound,
            idle,
        )

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

    def _bounds(
        self,
        forwards: _Counts,
        backwards: _Counts,
        inputs: _Counts,
        weights: _Counts,
        lean: tuple[_Counts, ...],
        free: Sequence[float],
        arrivals: Sequence[Sequence[float]],
    ) -> tuple[float, float]:
        """What the value can't be below, and how much time is used up at the least."""
        task, costs, many = self.task, self.task.costs, self.task.microbatches
        bound = idle = 0.0
        starts: list[float] = []  # of the next forward of each stage, at the earliest
        for s, rank in enumerate(task.placement):
            start = free[rank]
            if arrivals[s]:
                start = max(start, arrivals[s][0])
            elif s and forwards[s] < many:
                start = max(start, starts[-1] + costs.forward[s - 1] + costs.down[s])
            starts.append(start)
            left = many - forwards[s]
            if left:
                end = start + (left - 1) * costs.forward[s] + self.turns[s] + self.inputs[s]
                bound = max(bound, end + self.rests[s])
        start = 0.0
        for s in reversed(range(task.stages)):
            rank = task.placement[s]
            left = many - backwards[s]
            if not left:
                continue
            now = free[rank]
            if arrivals[task.stages + s]:
                now = max(now, arrivals[task.stages + s][0])
            elif s < task.stages - 1:
                now = max(now, start + self.inputs[s + 1] + costs.up[s])
            if forwards[s] == backwards[s]:
                now = max(now, starts[s] + self.turns[s])
            start = now
            bound = max(bound, start + left * self.inputs[s] + self.rests[s])
        for rank, own in enumerate(task.stages_of):
            ends = free[rank]
            done = free[rank]
            rest = None
            for s in own:
                left = many - backwards[s]
                onward = (many - forwards[s]) * costs.forward[s]
                onward += len(lean[s]) * costs.recompute[s]
                ends += onward + left * self.wholes[s]
                ends += (inputs[s] - weights[s]) * costs.backward_weight[s]
                done += onward + left * self.inputs[s]
                if left:
                    rest = self.rests[s] if rest is None else min(rest, self.rests[s])
            idle += ends
            bound = max(bound, ends + self.steps[rank] - self.head[rank])
            if rest is not None:
                bound = max(bound, done + rest)
        return bound, idle


def _with(values: Any, place: int, value: Any) -> Any:
    return (*values[:place], value, *values[place + 1 :])
