"""Finds a schedule for given work, costs and limits: `find`, and `search` for the schedule alone.

The search tries built-in schedules that fit the limits, then list scheduling by many rules, then
variations of the best of these. It proves and simulates a schedule before returning it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import attrs

from schedir.checker import prove
from schedir.display import DisplayedSearch
from schedir.errors import SchedirError
from schedir.finder.bounds import lower_bound
from schedir.finder.candidates import Budget, Candidate, Search, within
from schedir.finder.orders import schedule_of
from schedir.finder.terms import Objective, Task, Terms
from schedir.graph.alive import HeldUntil, peak_activations
from schedir.graph.board import most_held
from schedir.graph.compile import graph_of
from schedir.ir import Kind, Schedule
from schedir.simulator import CostModel, Timeline, simulate

_SHARES = (0.04, 0.04, 0.04, 0.04, 0.6, 0.12, 0.12)


def search(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    costs: CostModel | None = None,
    placement: str | None = None,
    memory_limit: float | None = None,
    max_activations: int | None = None,
    held_until: HeldUntil = "W",
    objective: Objective = "makespan",
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
    of its last compute. The span is the cost of a step if steps follow each other.

    A rank keeps at most `memory_limit` bytes, counted as in `simulate`, or `max_activations`
    (stage, microbatch) activations. An activation counts until its backward is complete, or with
    `held_until="I"` until the gradient of its input is there. Backwards are split if that helps,
    unless `split` is False. Forwards are run again if that helps: by default under a
    `memory_limit`, if the costs say that inputs are smaller than activations; under
    `max_activations` only if `recompute` is True.

    The result is proved under the `channel` model, by default `rank`. Orders are made and ranked as
    if no transfers waited for each other, and so is the lower bound. If you name a model, or a
    transport that stands for one, the best of them are timed under it (`simulate`), and the
    quickest is taken.

    The search is counted in work, so the same `seed` finds the same schedule on any machine. By
    default it does the work that a slow core does in 5 seconds; `seconds` changes that. If you give
    `seconds`, the search also ends after that much computing time, and may then find another
    schedule for the same seed; by default no clock ends it. `progress` takes (done, total).

    Raises SchedirError if no schedule keeps so little, with the least limit that works, and if the
    costs lack a stage or a link. Raises ValueError or TypeError for a bad argument.

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
    terms = Terms(ranks=ranks, microbatches=microbatches, chunks=chunks, **limits)
    budget = Budget(seconds, stop, progress)
    least = [Candidate.serial(terms.task(named)) for named in terms.placements]
    bound = min(_lower_bound(terms, each.task) for each in least)
    best = None
    if terms.counts_boundaries:
        best = _with_boundaries(terms, least, budget, seed, bound)
    elif any(within(each.task, each.order) for each in least):
        tasks = [each.task for each in least]
        found = Search(terms, tasks, Random(seed), budget, bound).best()
        # Candidates are ranked without a transport's order: under one another may be the best.
        done = [_Finished.of(terms, each) for each in (found if terms.channel else found[:1])]
        best = min(done, key=lambda each: each.value)
    if best is None:
        raise SchedirError(_refusal(terms, [_Finished.of(terms, each) for each in least]))
    return best.found(bound, budget, seed)


def _lower_bound(terms: Terms, task: Task) -> float:
    """A lower bound on the objective of every schedule on a task's placement."""
    return lower_bound(
        task.placement,
        terms.microbatches,
        terms.costs,
        objective=terms.objective,
        split=terms.split,
        recompute=task.recompute,
        max_activations=terms.max_activations,
        held_until=terms.held_until,
        memory_limit=terms.memory_limit,
    )


def _with_boundaries(
    terms: Terms, least: list[Candidate], budget: Budget, seed: int, bound: float
) -> _Finished | None:
    """The best schedule if sends and receives count, which only complete lists show.

    Each try reserves as many bytes as sends and receives took in the one before, and more if that
    was not enough.
    """
    done = [_Finished.of(terms, each) for each in least]
    best = min((each for each in done if not each.over), key=lambda each: each.value, default=None)
    if best is None:
        return None
    free = {each.candidate.task.named: each.boundaries for each in done}
    for share in _SHARES:
        tasks = [terms.task(named, free[named]) for named in terms.placements]
        budget.allow(share)
        over = set()
        for candidate in Search(terms, tasks, Random(seed), budget, bound).best():
            if candidate.run.value > best.value:
                break
            now = _Finished.of(terms, candidate)
            if not now.over:
                best = min(now, best, key=lambda each: each.value)
                if terms.channel is None:
                    break
            elif candidate.task.named not in over:
                over.add(candidate.task.named)
                free[candidate.task.named] = now.raised(free[candidate.task.named])
    return best


@attrs.frozen(eq=False)
class _Finished:
    """A candidate's proved schedule and its simulated run."""

    terms: Terms
    candidate: Candidate
    line: Timeline

    @classmethod
    def of(cls, terms: Terms, candidate: Candidate) -> _Finished:
        """Complete, prove and run it."""
        sizes = [terms.ranks, terms.microbatches, *([terms.chunks] if terms.chunks > 1 else [])]
        name = f"search-{'x'.join(map(str, sizes))}"
        schedule = schedule_of(candidate.task, candidate.order, name)
        proved = prove(schedule, terms.proved_under).proved()
        line = simulate(proved, terms.costs, channel=terms.channel)
        return cls(terms, candidate, line)

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

    @property
    def boundaries(self) -> tuple[float, ...]:
        """The bytes of sends and receives on each rank at its peak."""
        terms, task, limit = self.terms, self.candidate.task, self.terms.memory_limit
        if limit is None or not terms.counts_boundaries:
            return (0,) * terms.ranks
        rest = terms.task(task.named).memory.limit
        own = (most_held(task.steps, steps) for steps in self.candidate.order)
        return tuple(
            max(0, (rank.peak_bytes or 0) - (limit - left) - most)
            for rank, left, most in zip(self.line.ranks, rest, own, strict=True)
        )

    def raised(self, free: tuple[float, ...]) -> tuple[float, ...]:
        """The bytes that should have been reserved for sends and receives."""
        limit = self.terms.memory_limit or 0
        return tuple(
            left + max(0, (rank.peak_bytes or 0) - limit)
            for left, rank in zip(free, self.line.ranks, strict=True)
        )

    def found(self, bound: float, budget: Budget, seed: int) -> Found:
        """The result, with its facts."""
        return Found(
            schedule=self.line.schedule,
            timeline=self.line,
            objective=self.terms.objective,
            value=self.value,
            lower_bound=bound,
            placement=self.candidate.task.named,
            origin=self.candidate.origin,
            candidates=budget.candidates,
            seed=seed,
            cut=budget.cut,
        )


def _refusal(terms: Terms, least: list[_Finished]) -> str:
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
    placements tried. `placement` names the one chosen. `origin` names the built-in schedule whose
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
    placement: str
    origin: str | None
    candidates: int
    seed: int
    cut: bool = False

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
