"""Finds a schedule for given work, costs and limits: `find`, and `search` for the schedule alone.

Built-in schedules that fit the limits, then list scheduling by many rules, then the best of these
varied and rearranged. What is found is proved and simulated before anyone sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import attrs

from schedir.checker import prove
from schedir.errors import SchedirError
from schedir.finder.bounds import Objective
from schedir.finder.budget import RUN, SCHEDULED, Budget
from schedir.finder.evaluating import Run, fits, serial, timed
from schedir.finder.found import Found
from schedir.finder.list_scheduling import scheduled
from schedir.finder.merging import merged
from schedir.finder.rules import Style, rule_of, styles, varied
from schedir.finder.task import Order, Task
from schedir.finder.terms import Terms
from schedir.finder.writing import order_of, schedule_of
from schedir.ir import DEFAULT_CHANNEL, Schedule
from schedir.library import built_in, load
from schedir.simulator import CostModel, Timeline, simulate

DEFAULT_SECONDS = 5.0


def search(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    costs: CostModel | None = None,
    placement: str | None = None,
    memory_limit: float | None = None,
    max_activations: int | None = None,
    held_until: str = "W",
    objective: Objective = "makespan",
    split: bool = True,
    recompute: bool | None = None,
    seconds: float = DEFAULT_SECONDS,
    seed: int = 0,
    channel: str = DEFAULT_CHANNEL,
    progress: Callable[[int, int], None] | None = None,
) -> Schedule:
    """A quick schedule for this work under these limits, proved: the best of what a search finds.

    Of `ranks` × `chunks` stages, whose `costs` are as in `simulate` (by default the textbook's),
    each of the `microbatches` is one of a synchronous step. `placement` is "wrapped" (stage s on
    rank s mod ranks) or "wave" (there and back; "v" for two chunks); None tries both. `objective`
    is what is to be least, the "makespan" or the "span", the longest time from a rank's first
    forward to the end of its last compute: what a step costs where steps follow each other.

    A rank keeps at most `memory_limit` bytes, all that `simulate` counts, or `max_activations` of
    (stage, microbatch)s, each held until its backward is complete, or with `held_until` of "I"
    until its input's gradient is there. Backwards are split where that helps, unless `split` is
    False. Forwards are run again where that helps: by default under a `memory_limit`, where costs
    say that inputs are smaller than activations; under `max_activations` if `recompute` is True.

    The search is one of `seconds` on a slow core, counted in work and not by the clock, so that the
    same `seed` finds the same schedule; the clock only cuts it short where a machine is slower.
    `progress` takes (done, total).

    Raises SchedirError where no schedule keeps so little, with the least limit that works, and
    where the costs lack a stage or a link; ValueError or TypeError for a bad argument.
    """
    return find(
        ranks,
        microbatches,
        chunks,
        costs=costs,
        placement=placement,
        memory_limit=memory_limit,
        max_activations=max_activations,
        held_until=held_until,
        objective=objective,
        split=split,
        recompute=recompute,
        seconds=seconds,
        seed=seed,
        channel=channel,
        progress=progress,
    ).schedule


def find(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    costs: CostModel | None = None,
    placement: str | None = None,
    memory_limit: float | None = None,
    max_activations: int | None = None,
    held_until: str = "W",
    objective: Objective = "makespan",
    split: bool = True,
    recompute: bool | None = None,
    seconds: float = DEFAULT_SECONDS,
    seed: int = 0,
    channel: str = DEFAULT_CHANNEL,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Found:
    """`search`, and all that there is to say of what it has found.

    `stop` is asked now and then: once it says True, what is best so far is taken. Raises as
    `search` does.
    """
    terms = Terms(
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        costs=CostModel() if costs is None else costs,
        placement=placement,
        memory_limit=memory_limit,
        max_activations=max_activations,
        held_until=held_until,
        objective=objective,
        split=split,
        recompute=recompute,
        channel=channel,
    )
    return _Search(terms, seed, Budget(seconds, stop, progress)).run()


@attrs.frozen(eq=False)
class _Candidate:
    """An order that is within the limits, and how it runs; the built-in schedule whose it is, or
    the style that it was made by."""

    task: Task
    order: Order
    run: Run
    origin: str | None = None
    style: Style | None = None

    @property
    def rank(self) -> tuple[float, float]:
        """What candidates are compared by."""
        return self.run.value, self.run.ties


class _Search:
    """One search under way."""

    def __init__(self, terms: Terms, seed: int, budget: Budget) -> None:
        self._terms, self._seed, self._budget = terms, seed, budget
        self._random = Random(seed)
        self._best: list[_Candidate] = []  # the best first, of each placement together

    def run(self) -> Found:
        """Search until the budget is spent."""
        terms = self._terms
        tasks = [terms.task(named) for named in terms.placements]
        bound = min(map(terms.lower_bound, tasks))
        self._begin(tasks)
        for candidate in self._candidates(tasks):
            if self._best[0].run.value <= bound or self._budget.over:
                break
            if candidate is not None:
                self._keep(candidate)
        return self._found(bound)

    def _begin(self, tasks: list[Task]) -> None:
        """Start with what keeps the least. Raises SchedirError where that is too much."""
        for task in tasks:
            order = serial(task)
            run = timed(task, order)
            if run is not None and _within(task, order):
                self._keep(_Candidate(task, order, run))
        if not self._best:
            raise SchedirError(self._refusal(tasks))

    def _refusal(self, tasks: list[Task]) -> str:
        """What to say where nothing is within the limit."""
        terms = self._terms
        lines = [self._timeline(task, serial(task)) for task in tasks]
        if terms.memory_limit is None:
            least = min(max(r.peak_activations for r in line.ranks) for line in lines)
            most = terms.max_activations
            return f"no schedule holds at most {most} activations: the least that works is {least}"
        peaks = [max(r.peak_bytes or 0 for r in line.ranks) for line in lines]
        return (
            f"no schedule keeps at most {terms.memory_limit} bytes: the least that works is "
            f"{min(peaks)}"
        )

    def _candidates(self, tasks: list[Task]) -> Iterator[_Candidate | None]:
        """One after the other; None for what is not within the limits."""
        for task in tasks:
            yield from self._built_in(task)
        going = [styles(task) for task in tasks]
        while going:
            for which, task in enumerate(tasks):
                style = next(going[which], None)
                if style is None:
                    going = []
                    break
                yield self._by(task, style)
        while True:
            made = [each for each in self._best if each.style is not None]
            if not made:
                return
            parent = made[min(int(self._random.expovariate(0.5)), len(made) - 1)]
            assert parent.style is not None
            yield self._by(parent.task, varied(parent.style, self._random))

    def _by(self, task: Task, style: Style) -> _Candidate | None:
        """The candidate of a style."""
        self._budget.spend(task.actions, SCHEDULED)
        order = scheduled(task, rule_of(task, style))
        run = None if order is None else timed(task, order)
        if order is None or run is None:
            return None
        if style.split:
            order, run = merged(task, order, run)
        return _Candidate(task, order, run, style=style)

    def _built_in(self, task: Task) -> Iterator[_Candidate]:
        terms = self._terms
        chunks = len(task.stages_of[0])
        for generator in built_in():
            try:
                made = load(
                    generator,
                    ranks=terms.ranks,
                    microbatches=terms.microbatches,
                    chunks=chunks,
                    costs=terms.costs,
                )
            except SchedirError:
                continue  # not to be made in this shape
            self._budget.spend(task.actions, RUN)
            order = order_of(task, made)
            run = None if order is None else timed(task, order)
            if order is None or run is None:
                continue
            if _within(task, order):
                yield _Candidate(task, order, run, origin=generator.name)

    def _keep(self, candidate: _Candidate) -> None:
        if any(candidate.rank == each.rank for each in self._best):
            return
        self._best = sorted([*self._best, candidate], key=lambda each: each.rank)[:12]

    def _timeline(self, task: Task, order: Order) -> Timeline:
        """The run of the order's proved schedule."""
        terms = self._terms
        shape = [terms.ranks, terms.microbatches, *([terms.chunks] if terms.chunks > 1 else [])]
        schedule = schedule_of(task, order, f"search-{'x'.join(map(str, shape))}")
        return simulate(prove(schedule, terms.channel).proved(), terms.costs)

    def _found(self, bound: float) -> Found:
        terms, best = self._terms, self._best[0]
        line = self._timeline(best.task, best.order)
        return Found(
            schedule=line.schedule,
            timeline=line,
            objective=terms.objective,
            value=_value(line, terms.objective),
            lower_bound=bound,
            placement=best.task.named,
            origin=best.origin,
            candidates=self._budget.candidates,
            seed=self._seed,
        )


def _within(task: Task, order: Order) -> bool:
    """Whether every rank keeps no more than it may."""
    return all(fits(task, rank, steps) for rank, steps in enumerate(order))


def _value(line: Timeline, objective: Objective) -> float:
    return line.makespan if objective == "makespan" else max(r.span for r in line.ranks)
