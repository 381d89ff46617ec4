"""Finds a schedule for given work, costs and limits: `find`, and `search` for the schedule alone.

On each placement three things are tried, and the best is proved and simulated before it is
returned:

    candidates      every built-in schedule that fits      finder.orders
                    list scheduling in many styles         finder.list_scheduling
    improvement     moves on the critical chain of one     finder.local_search
                    of the best, until the work is done
    bound           the search ends where it is reached    finder.bounds
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from inspect import signature
from itertools import islice, product
from random import Random
from typing import Any

import attrs

from schedir.checker import prove
from schedir.display import DisplayedSearch
from schedir.errors import SchedirError
from schedir.finder.bounds import lower_bound
from schedir.finder.list_scheduling import Style, scheduled, styles
from schedir.finder.local_search import improved
from schedir.finder.orders import (
    Run,
    merged,
    order_of,
    schedule_of,
    serial,
    timed,
    with_updates,
    within,
)
from schedir.finder.planning import Cut, Cuts, least_cut
from schedir.finder.terms import SCHEDULED, Budget, Objective, StepsAt, Task, Terms
from schedir.graph.alive import HeldUntil, peak_activations
from schedir.graph.compile import graph_of
from schedir.ir import Kind, Schedule
from schedir.library import Generator, Parameter, built_in, load
from schedir.simulator import CostModel, Timeline, simulate

# Units of work for each action that an order runs, and that is proved.
_RUN, _COMPLETED = 1, 12
_KEPT = 12  # of the best, to make better ones of
_STYLES, _TRIALS = 60, 500  # of each round
# Rounds without a better one, after which a fresh order is improved in so many trials.
_STALE, _LONG = 4, 3000
# The part of an update's time that its rank must wait anyway, for the update to be put there.
_WAITS = (1.0, 0.5, 0.25)
_NEAR = 1 + 1e-12  # the bound adds the same floats in another order
_LOWER = 2  # built-in schedules are also made for limits that are up to this much lower
_TRIED, _SEARCHED = 0.5, 8  # the share of the work to try cuts; the likeliest have the rest
_ROUNDED = 1e-9  # differences of sums


def search(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    costs: CostModel | None = None,
    layers: CostModel | None = None,
    cut: bool = False,
    placement: str | None = None,
    memory_limit: float | None = None,
    max_activations: int | None = None,
    held_until: HeldUntil = "W",
    objective: Objective = "makespan",
    steps: StepsAt = "last",
    split: bool = True,
    recompute: bool | None = None,
    seconds: float | None = None,
    seed: int = 0,
    channel: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Schedule:
    """Find a quick schedule for this work under these limits, and prove it.

    The schedule is one synchronous step of `microbatches` on `ranks` × `chunks` stages; `costs` are
    as in `simulate` (by default the textbook's). It places forwards, backwards in one or two parts,
    and recomputations, and adds communication and updates; it lists no other kind of action, such
    as OFFLOAD or UNSHARD, whatever its cost. `placement` is "wrapped" (stage s on rank s mod ranks)
    or "wave" (there and back; "v" for two chunks); None tries both. `objective` is what to
    minimise: the "makespan", or the "span", the longest time from a rank's first forward to the end
    of its last compute. The span is the cost of a step if steps follow each other. With `steps`
    "last" each rank updates its stages at the end of its list. With "anywhere" a stage is updated
    while its rank would wait, once its gradients are complete; the executor refuses such a list
    where gradients are clipped or steps are skipped, as these need all gradients first.

    A rank keeps at most `memory_limit` bytes, counted as in `simulate`, or `max_activations`
    (stage, microbatch) activations. An activation counts until its backward is complete, or with
    `held_until="I"` until the gradient of its input is there. Backwards are split if that helps,
    unless `split` is False. Forwards are run again if that helps: by default under a
    `memory_limit`, if the costs say that inputs are smaller than activations; under
    `max_activations` only if `recompute` is True.

    In place of the costs of stages, `layers` may have those of each layer, in order, as
    `schedir.finder.stage_costs` takes them. They are cut into stages: with `cut`, as it suits the
    schedule; without, so that the stage that takes longest for a forward and a backward takes the
    least time. The result's `boundaries` are what `schedir.training.partition` takes.

    The result is proved under the `channel` model, by default `rank`. Orders are made and ranked as
    if no transfers waited for each other, and so is the lower bound. If you name a model, or a
    transport that stands for one, the best of them and all built-in schedules that fit are timed
    under it (`simulate`), and the quickest is taken.

    The search is counted in work, so the same `seed` finds the same schedule on any machine. By
    default it does the work that a slow core does in 5 seconds, on each placement; `seconds`
    changes that. If you give `seconds`, the search also ends after that much computing time on each
    placement, and may then find another schedule for the same seed; by default no clock ends it.
    Built-in schedules that fit are always tried first. With `cut`, the balanced cut is searched as
    if it were given, and all others have the same work together. `progress` takes (done, total).

    Raises SchedirError if no schedule keeps so little, with the least limit that works, if the
    costs lack a stage or a link, and for fewer layers than stages. Raises ValueError or TypeError
    for a bad argument.

    >>> import schedir
    >>> best = schedir.search(ranks=2, microbatches=4)
    >>> schedir.simulate(best).makespan, schedir.check(best).ok
    (13, True)
    """
    return find(**locals()).schedule  # all that it was called with


def find(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    layers: CostModel | None = None,
    cut: bool = False,
    seconds: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **limits: Any,
) -> Found:
    """`search`, with everything known about the schedule that it found.

    `limits` are the other arguments of `search`. `stop` is called now and then; once it returns
    True, the search returns the best schedule so far. Raises what `search` raises.

    >>> import schedir
    >>> found = schedir.finder.find(ranks=2, microbatches=4)
    >>> found.value, found.lower_bound, found.split
    (13, 13, 8)
    """
    if layers is not None and limits.get("costs") is not None:
        raise ValueError("layers= has the costs of each layer: leave out costs=")
    if unknown := {*limits} - {*signature(search).parameters}:
        raise TypeError(f"find() got an unexpected keyword argument {min(unknown)!r}")
    for name, value, kind in (
        ("cut", cut, bool),
        ("seed", seed, int),
        ("layers", CostModel() if layers is None else layers, CostModel),
    ):
        if type(value) is not kind:
            raise TypeError(f"{name} must be {kind.__name__}, not {value!r}")
    if cut and layers is None:
        raise ValueError("cut=True needs layers=, the costs of each layer")
    if layers is not None:
        limits["costs"] = layers
    terms = Terms(ranks=ranks, microbatches=microbatches, chunks=chunks, **limits)
    budget = Budget(seconds, stop, progress, len(terms.placements) * (1 + cut))
    if layers is None:
        return _find(seed, budget, terms)
    cuts = Cuts(terms)
    if cut and cuts.layers > ranks * chunks:
        return _find_cut(seed, budget, cuts)
    return _find(seed, budget, cuts.terms_of(cuts.balanced))


def _find(seed: int, budget: Budget, terms: Terms, share: float = 1.0) -> Found:
    """The best schedule of these terms, by this share of the budget on each placement."""
    # Each placement is searched as if it were the only one.
    searches = [_Search(terms, named, Random(seed), budget) for named in terms.placements]
    found = [best for search in searches if (best := search.best(share)) is not None]
    if not found:
        raise SchedirError(_refusal(terms, [search.least for search in searches]))
    best = min(found, key=lambda each: each.value)
    bound = min(search.bound for search in searches)
    return best.found(bound, seed, budget.candidates, budget.cut)


def _find_cut(seed: int, budget: Budget, cuts: Cuts) -> Found:
    """The best schedule of the best cut, with a lower bound that holds for all cuts.

    The balanced cut is searched as if it were given. The others have the same work together: they
    are tried, and the likeliest are searched, if they can be better.

    Raises the SchedirError of the balanced cut if every cut that is searched is refused.
    """
    bound, least = least_cut(cuts.parts, cuts.join)
    found: list[Found] = []
    refused = []

    def search_cut(cut: Cut, share: float) -> float:
        """What a lower bound must be below for a cut to be better than those so far."""
        try:
            found.append(_find(seed, budget, cuts.terms_of(cut), share))
        except SchedirError as error:
            refused.append(error)
        return min((each.value for each in found), default=math.inf) * (1 - _ROUNDED)

    known = search_cut(cuts.balanced, 1.0)
    if known > bound:
        budget.begin(_TRIED * len(cuts.terms.placements))
        likely = cuts.likely([cuts.balanced, least], budget, known)
        most = len(found) + _SEARCHED
        for bound_of_cut, cut in likely:
            if cut != cuts.balanced and bound_of_cut < known and len(found) < most:
                known = search_cut(cut, (1 - _TRIED) / _SEARCHED)
    if not found:
        raise refused[0]
    best = min(found, key=lambda each: each.value)
    return attrs.evolve(
        best,
        lower_bound=min(bound, best.lower_bound),
        candidates=budget.candidates,
        cut=budget.cut,
    )


class _Search:
    """The search on one placement."""

    def __init__(self, terms: Terms, named: str, random: Random, budget: Budget) -> None:
        self._terms, self._random, self._budget = terms, random, budget
        self._task = self._unreserved = terms.task(named)
        self._reserved: list[float] = [0] * terms.ranks
        self._pool: list[Run] = []  # the best first
        # Candidates are ranked without a transport's order and the bytes of sends and receives,
        # and with all updates last. Where that differs, each new best one is completed.
        self._moves = terms.steps != "last" and any(self._task.costs.optim_step)
        self._completes = terms.counts_boundaries or terms.channel is not None or self._moves
        # What only some schedules keep all the time counts in none of them.
        least = terms.memory(self._task.placement)
        self.bound = lower_bound(attrs.evolve(self._task, memory=least))
        self.least = self._completed(serial(self._task))
        self._best = self.least  # of what is completed

    def best(self, share: float) -> Completed | None:
        """The best schedule that is found within the limits; None if nothing is within them."""
        if self.least.over:
            return None
        self._budget.begin(share)
        tried = styles(self._task, self._random)
        self._keep(serial(self._task))
        self._styled(next(tried))
        for run in () if self._reached else self._built_in():
            self._keep(run)
            if self._completes:
                self._improve_on(self._completed(run))
            if self._reached:
                break
        stale, before = 0, math.inf
        while not self._ended:
            drawn = [made for style in islice(tried, _STYLES) if (made := self._styled(style))]
            stale = stale + 1 if self._pool[0].value >= before else 0
            before = self._pool[0].value
            if stale >= _STALE and drawn:
                self._rearrange(self._random.choice(drawn), _LONG)
            else:
                # One of the best, the best one most often.
                place = min(int(self._random.expovariate(1)), len(self._pool) - 1)
                self._rearrange(self._pool[place], _TRIALS)
        return self._best if self._completes else self._completed(self._pool[0])

    @property
    def _reached(self) -> bool:
        """True if nothing better can be found."""
        best = self._best if self._completes else self._pool[0]
        return best.value <= self.bound * _NEAR

    @property
    def _ended(self) -> bool:
        return self._reached or self._budget.over

    def _keep(self, run: Run) -> None:
        if all(run.rank != each.rank for each in self._pool):
            self._pool = sorted([*self._pool, run], key=lambda each: each.rank)[:_KEPT]

    def _try(self, run: Run) -> None:
        """Keep a candidate, and complete it if it is the best. If it then exceeds the limit, more
        is reserved for sends and receives, what no longer fits is dropped, and the next is tried.
        """
        self._keep(run)
        if not self._completes or self._pool[0] is not run:
            return
        while self._moves or self._pool[0].value < self._best.value:
            completed = self._completed(self._pool[0])
            self._budget.spend(self._task.actions * _COMPLETED)
            if not completed.over:
                self._improve_on(completed)
                return
            del self._pool[0]
            self._reserve(completed.line)

    def _improve_on(self, completed: Completed) -> None:
        if not completed.over and completed.value < self._best.value:
            self._best = completed

    def _built_in(self) -> Iterator[Run]:
        """The built-in schedules that fit, which cost no work of the budget."""
        terms, task = self._terms, self._unreserved
        for generator in built_in():
            for parameters in self._parameters(generator):
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
                    continue  # it takes other shapes
                self._budget.candidates += 1
                order = order_of(task, made)
                if order is not None and within(task, order):
                    run = timed(task, order, generator.name)
                    if run is not None:
                        yield run

    def _parameters(self, generator: Generator) -> Iterator[dict[str, Parameter]]:
        """What a built-in schedule is made with: one that takes a limit gets it, and lower ones, as
        a limit of all chunks and of each."""
        terms, most, takes = self._terms, self._terms.max_activations, generator.parameters
        if most is None or "max_activations" not in takes:
            yield {}
            return
        limits = (
            max(1, (most - less) // size)
            for size in (1, terms.chunks)
            for less in range(_LOWER + 1)
        )
        for limit in dict.fromkeys(limits):
            yield {"max_activations": limit, "held_until": terms.held_until}
            yield {"max_activations": limit}

    def _styled(self, style: Style) -> Run | None:
        """The run of a style, which is kept; None if it does not fit, or at the end."""
        if self._ended:
            return None
        run = scheduled(self._task, style)
        self._budget.spend(self._task.actions * SCHEDULED)
        if run is not None:
            run = merged(self._task, run) if style.split else run
            self._try(run)
        return run

    def _rearrange(self, chosen: Run, trials: int) -> None:
        """Make a candidate better, trial by trial."""
        task = self._task
        if not within(task, chosen.order):
            return  # more was reserved since
        for run in islice(improved(task, chosen, self._random), trials):
            # Most of what does not fit is seen at the first few steps.
            self._budget.spend(0 if run is None else task.actions * _RUN)
            if run is not None:
                self._try(run)
            if self._ended or self._task is not task:
                break

    def _reserve(self, line: Timeline) -> None:
        """Set aside for sends and receives the bytes by which a run exceeds the limit."""
        limit = self._terms.memory_limit or 0
        self._reserved = [
            kept + max(0, (rank.peak_bytes or 0) - limit)
            for kept, rank in zip(self._reserved, line.ranks, strict=True)
        ]
        self._task = self._terms.task(self._task.named, self._reserved)
        self._pool = [each for each in self._pool if within(self._task, each.order)]
        self._pool = self._pool or [serial(self._task)]

    def _completed(self, run: Run) -> Completed:
        """Complete a candidate, prove and run it."""
        terms, task = self._terms, self._task
        sizes = [terms.ranks, terms.microbatches, *([terms.chunks] if terms.chunks > 1 else [])]
        name = f"search-{'x'.join(map(str, sizes))}"
        forms = [merged(task, run)]
        if terms.channel is not None:
            forms.append(run)  # a joined backward may wait for a transfer
        waits = (math.inf, *(_WAITS if self._moves else ()))
        found = [completed(terms, task, *form, name) for form in product(forms, waits)]
        return min(found, key=lambda each: (each.over, each.value))


def completed(terms: Terms, task: Task, run: Run, wait: float, name: str) -> Completed:
    """The schedule of a run, with updates where a rank waits for that part of their time: proved
    and simulated."""
    listed = schedule_of(task, with_updates(task, run, wait), name, terms.boundaries)
    proved = prove(listed, terms.proved_under).proved()
    line = simulate(proved, terms.costs, channel=terms.channel)
    return Completed(terms, task.named, run.origin, line)


@attrs.frozen(eq=False)
class Completed:
    """A proved schedule and its simulated run; `named` is its placement."""

    terms: Terms
    named: str
    origin: str | None
    line: Timeline

    @property
    def value(self) -> float:
        """The objective."""
        return self.terms.value(self.line)

    @property
    def most(self) -> float:
        """The most that any rank keeps of what is limited."""
        if self.terms.memory_limit is not None:
            return max(rank.peak_bytes or 0 for rank in self.line.ranks)
        graph, until = graph_of(self.line.schedule), self.terms.held_until
        return max(most for most, _ in peak_activations(graph, until))

    @property
    def over(self) -> bool:
        """True if the most is above the limit."""
        return self.terms.limit is not None and self.most > self.terms.limit

    def found(self, bound: float, seed: int, candidates: int, cut: bool = False) -> Found:
        """The result, with its facts."""
        return Found(
            schedule=self.line.schedule,
            timeline=self.line,
            objective=self.terms.objective,
            value=self.value,
            lower_bound=min(self.value, bound),
            costs=self.terms.costs,
            placement=self.named,
            origin=self.origin,
            candidates=candidates,
            seed=seed,
            cut=cut,
        )


def _refusal(terms: Terms, least: list[Completed]) -> str:
    """The message if nothing is within the limit."""
    works = min(each.most for each in least)
    if terms.memory_limit is None:
        return (
            f"no schedule holds at most {terms.max_activations} activations on each rank: the "
            f"least that works is {works}"
        )
    return (
        f"no schedule keeps at most {terms.memory_limit:.15g} bytes on each rank: the least that "
        f"works is {math.ceil(works)}"
    )


@attrs.frozen(kw_only=True, repr=False)
class Found(DisplayedSearch):
    """The best schedule of a search: what `schedir.finder.find` returns.

    `schedule` is complete and proved, `timeline` its simulated run. `value` is the `objective` that
    it reaches; `lower_bound` is what no schedule of this work can be below, on any of the
    placements tried, and with any of the cuts if cuts were searched. `costs` are those of the
    stages. `placement` names the one chosen. `origin` names the built-in schedule whose
    order it is, None if the search made the order. `candidates` is how many were tried with the
    random `seed`. `cut` is True if the clock or the user ended the search early, so that the same
    seed may find another schedule.

    >>> import schedir
    >>> schedir.finder.find(ranks=2, microbatches=4)
    <Found search-2x4: makespan 13, 0.00% above the lower bound>
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    value: float
    lower_bound: float
    costs: CostModel
    placement: str
    origin: str | None
    candidates: int
    seed: int
    cut: bool = False

    @property
    def boundaries(self) -> tuple[int, ...] | None:
        """The first layers of all stages but the first; None if no layers were cut."""
        return self.schedule.boundaries

    @property
    def distance(self) -> float:
        """How far above the lower bound the value is, as a part of the bound: 0 if no schedule can
        be better."""
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def split(self) -> int:
        """How many backwards are split."""
        return len(self.schedule.columns.where(Kind.BACKWARD_WEIGHT))

    @property
    def recomputed(self) -> int:
        """How many forwards are run again."""
        return len(self.schedule.columns.where(Kind.RECOMPUTE))
