"""The candidates of a search: built-in orders, then orders made by rules, then improvements of the
best of these, until the allowed work is done.

The budget is counted in work, so that the same seed finds the same schedule on any machine, however
busy. A clock ends the search only if the user gives a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from itertools import zip_longest
from random import Random

import attrs

from schedir.errors import SchedirError
from schedir.finder.beam_search import branched, is_small
from schedir.finder.list_scheduling import Style, rule_of, scheduled, styles, varied
from schedir.finder.local_search import rearranged, rescheduled
from schedir.finder.orders import Run, fits, merged, order_of, serial, timed
from schedir.finder.terms import INPUT, LEAN, Task, Terms
from schedir.graph.board import Order
from schedir.library import Generator as BuiltIn
from schedir.library import Parameter, built_in, load

DEFAULT_SECONDS = 5.0
"""How long a slow core works on a search without `seconds`."""
_RATE = 800_000  # units of work a second, on a slow core
SCHEDULED, RUN, BRANCHED = 8, 1, 25
"""Units of work for each action that a rule puts in order, for each that an order runs, and for
each state of small work that is made."""
_ANY = 15  # units of work of any candidate
_KEPT = 12  # of the best, to make better ones of
_TURNS = 12
_BRANCHED_SHARE = 0.85


class Budget:
    """What is left of the work that a slow core does in `seconds`; `progress` takes (done, total).

    If `seconds` are given, the budget is over at the latest when this process has computed for that
    long. `cut` is True if the clock, or `stop`, ended the search before its work was done.
    """

    def __init__(
        self,
        seconds: float | None,
        stop: Callable[[], bool],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._until = math.inf
        if seconds is None:
            seconds = DEFAULT_SECONDS
        elif isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(f"seconds must be a number, not {seconds!r}")
        elif not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be a number >= 0, not {seconds}")
        else:
            self._until = time.process_time() + seconds
        self.total = self.left = int(seconds * _RATE)
        self._last = 0
        self.candidates = 0
        self.cut = False
        self._stop, self._progress = stop, progress

    def allow(self, share: float) -> None:
        """Let so much of the whole be done from here on before it is `over`."""
        self._last = self.left - int(self.total * share)

    def spend(self, actions: int, units: int) -> None:
        """One candidate more, of so many actions."""
        self.candidates += 1
        self.left -= actions * units + _ANY
        if self._progress is not None:
            self._progress(min(self.total, self.total - self.left), self.total)

    @property
    def over(self) -> bool:
        """True if all work is done, or the search must end."""
        if self.left <= max(0, self._last):
            return True
        self.cut = self._stop() or (self._until < math.inf and time.process_time() >= self._until)
        return self.cut


@attrs.frozen(eq=False)
class Candidate:
    """An order and how it runs.

    `origin` names the built-in schedule that the order comes from; else `style` made the order, or
    the order that it was made of.
    """

    task: Task
    order: Order
    run: Run
    origin: str | None = None
    style: Style | None = None

    @classmethod
    def serial(cls, task: Task) -> Candidate:
        """The candidate that keeps the least."""
        order = serial(task)
        run = timed(task, order)
        if run is None:
            raise AssertionError("one microbatch after the other blocks")
        return cls(task, order, run)

    @property
    def rank(self) -> tuple[float, float]:
        """The sort key of candidates."""
        return self.run.value, self.run.ties


class Search:
    """One search, over tasks that differ in their placement."""

    def __init__(
        self, terms: Terms, tasks: list[Task], random: Random, budget: Budget, bound: float
    ) -> None:
        self._terms, self._tasks, self._random = terms, tasks, random
        self._budget, self._bound = budget, bound
        self._best: list[Candidate] = []  # the best first, of all placements

    def best(self) -> list[Candidate]:
        """The best that are found within the limits, the best one first."""
        for candidate in self._candidates():
            if candidate is not None:
                self._keep(candidate)
            if self._budget.over or (self._best and self._best[0].run.value <= self._bound):
                break
        found = []
        for each in self._best:
            order, run = merged(each.task, each.order, each.run)
            found.append(attrs.evolve(each, order=order, run=run))
        return found

    def _candidates(self) -> Iterator[Candidate | None]:
        """One after the other; None for what is not within the limits."""
        ruled = self._ruled()
        # What keeps the least, and one of a rule, also where there is time for nothing else.
        for task in self._tasks:
            least = Candidate.serial(task)
            yield least if within(task, least.order) else None
            yield next(ruled)
        for task in self._tasks:
            for generator in built_in():
                if generator.chunks <= self._terms.chunks:
                    for parameters in self._parameters(generator):
                        yield self._built_in(task, generator, parameters)
        yield from ruled
        # Of small work nothing else need be tried, where no order was left out.
        proved = 0
        for task in self._tasks:
            if is_small(task):
                proved += yield from self._branched(task)
        while self._best and proved < len(self._tasks):
            yield from self._improved()

    def _parameters(self, generator: BuiltIn) -> Iterator[dict[str, Parameter]]:
        """What a built-in schedule is tried with: one that takes a limit gets it."""
        most, takes = self._terms.max_activations, generator.parameters
        if most is None or "max_activations" not in takes:
            yield {}
            return
        limit = max(1, most // self._terms.chunks)
        yield {"max_activations": limit}
        if "held_until" in takes:
            yield {"max_activations": limit, "held_until": self._terms.held_until}

    def _built_in(
        self, task: Task, generator: BuiltIn, parameters: dict[str, Parameter]
    ) -> Candidate | None:
        terms = self._terms
        try:
            made = load(
                generator,
                ranks=terms.ranks,
                microbatches=terms.microbatches,
                chunks=terms.chunks,
                costs=terms.costs,
                **parameters,
            )
        except SchedirError:
            return None  # not to be made in this shape
        # Those that are made for given costs try several lists themselves.
        self._budget.spend(task.actions, 2 * SCHEDULED if generator.sees_costs else 2 * RUN)
        order = order_of(task, made)
        run = None if order is None else timed(task, order)
        if order is None or run is None or not within(task, order):
            return None
        return Candidate(task, order, run, origin=generator.name)

    def _ruled(self) -> Iterator[Candidate | None]:
        """Those of all styles, of each placement in turn."""
        for several in zip_longest(*map(styles, self._tasks)):
            for task, style in zip(self._tasks, several, strict=True):
                if style is not None:
                    yield self._by(task, style)

    def _by(self, task: Task, style: Style) -> Candidate | None:
        """The candidate of a style."""
        self._budget.spend(task.actions, SCHEDULED)
        order = scheduled(task, rule_of(task, style))
        run = None if order is None else timed(task, order)
        if order is None or run is None:
            return None
        if style.split:
            order, run = merged(task, order, run)
        return Candidate(task, order, run, style=style)

    def _branched(self, task: Task) -> Generator[Candidate | None, None, bool]:
        """Those of a task that are better than the best, for a share of the work; and whether there
        are no others."""
        until = self._budget.left - int(self._budget.total * _BRANCHED_SHARE / len(self._tasks))
        for states, order in branched(task, self._known):
            self._budget.spend(states, BRANCHED)
            run = None if order is None else timed(task, order)
            yield None if order is None or run is None else Candidate(task, order, run)
            if self._budget.left <= until:
                return False
        return True

    def _known(self) -> float:
        return self._best[0].run.value if self._best else math.inf

    def _improved(self) -> Iterator[Candidate | None]:
        """One of the best made better, in each way in turn, each for a share of the work."""
        for way in (rescheduled, rearranged, rearranged):
            chosen = self._chosen()
            units = SCHEDULED if way is rescheduled else RUN
            until = self._budget.left - self._budget.total // _TURNS
            for made in way(chosen.task, chosen.order, chosen.run, self._random):
                # Most of what is rearranged is seen not to fit at the first few steps.
                least = made is None and way is rearranged
                self._budget.spend(0 if least else chosen.task.actions, units)
                if made is None:
                    yield None
                else:
                    yield attrs.evolve(chosen, order=made[0], run=made[1], origin=None)
                if self._budget.left <= until:
                    break
        chosen = self._chosen()
        style = chosen.style or Style(split=chosen.task.split)
        until = self._budget.left - self._budget.total // _TURNS
        while self._budget.left > until:
            yield self._by(chosen.task, varied(style, self._random))

    def _chosen(self) -> Candidate:
        """One of the best, the best one most often."""
        return self._best[min(int(self._random.expovariate(1)), len(self._best) - 1)]

    def _keep(self, candidate: Candidate) -> None:
        if all(candidate.rank != each.rank for each in self._best):
            self._best = sorted([*self._best, candidate], key=lambda each: each.rank)[:_KEPT]


def within(task: Task, order: Order) -> bool:
    """True if every rank runs its list and keeps no more than it may."""
    denied = ((INPUT,) if not task.split else ()) + ((LEAN,) if not task.recompute else ())
    if any(step // task.stages in denied for steps in order for step in steps):
        return False
    return all(fits(task, rank, steps) for rank, steps in enumerate(order))
