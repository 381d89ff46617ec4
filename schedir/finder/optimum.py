"""The best schedule there is, for small work: `exact`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import reduce

import attrs

from schedir.checker import prove
from schedir.errors import SchedirError
from schedir.finder.bounds import Objective
from schedir.finder.exact_model import Solved, solve
from schedir.finder.found import Found
from schedir.finder.stage_costs import StageCosts
from schedir.finder.task import Memory, Task
from schedir.finder.terms import Terms
from schedir.graph.alive import HeldUntil
from schedir.ir import DEFAULT_CHANNEL, Action, Schedule
from schedir.passes import append_steps
from schedir.simulator import CostModel, simulate

EXACT_SECONDS = 60.0
# Parts of the largest cost: all that is told apart where costs are no round numbers.
_FINEST = 10**6


def exact(
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
    seconds: float = EXACT_SECONDS,
    seed: int = 0,
    channel: str = DEFAULT_CHANNEL,
) -> Schedule:
    """The schedule that no other is better than, proved under the `channel` model.

    The arguments are those of `schedir.search`, but that `seconds` are the most that it may take on
    each placement, by the clock. It is for small work: 40 actions take seconds. Costs that are no
    round numbers are taken to a millionth of the largest, times and bytes alike.

    OR-Tools solves it (CP-SAT), which has to be installed: pip install 'schedir[exact]'.

    Raises SchedirError where OR-Tools is missing, where no schedule is within the limits, where the
    time is over before one is proved to be the best, for costs of other stages, for compute that
    costs nothing, whose order no time tells, and for a limit in bytes where boundaries have some,
    which it can't count; ValueError or TypeError for a bad argument.
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
    return exactly(terms, seconds, seed).schedule


def exactly(terms: Terms, seconds: float, seed: int) -> Found:
    """`exact`, and all that there is to say of what it has found."""
    if terms.counts_boundaries:
        raise SchedirError(
            "the exact optimum counts no bytes of boundaries: leave boundary_bytes out of the "
            "costs, or limit activations"
        )
    best: list[tuple[Fraction, Task, Schedule]] = []
    for named in terms.placements:
        task = terms.task(named)
        _expect_time(task)
        whole, scale = _in_whole_numbers(task)
        solved = solve(whole, seconds, seed)
        if solved is not None:
            best.append((solved.value / scale, task, _schedule(solved, task, terms.channel)))
    if not best:
        raise SchedirError("no schedule of this work is within the limit")
    _, task, schedule = min(best, key=lambda each: each[0])
    line = simulate(schedule, terms.costs)
    value = line.makespan
    if terms.objective == "span":
        value = max(rank.span for rank in line.ranks)
    return Found(
        schedule=schedule,
        timeline=line,
        objective=terms.objective,
        value=value,
        lower_bound=value,
        placement=task.named,
        origin=None,
        candidates=len(terms.placements),
        seed=seed,
    )


def _expect_time(task: Task) -> None:
    """Raise SchedirError where compute takes no time."""
    names = ["forward", "backward"]
    names += ["backward_input", "backward_weight"] * task.split + ["recompute"] * task.recompute
    for name in names:
        if not min(getattr(task.costs, name)):
            raise SchedirError(
                f"{name} costs nothing on some stage, so that no time tells its order: give it one"
            )


def _in_whole_numbers(task: Task) -> tuple[Task, Fraction]:
    """The task with whole numbers alone, and how many of these are one of its unit of time."""
    times = attrs.asdict(
        task.costs, recurse=False, filter=lambda field, _: field.name != "placement"
    )
    scale = _scale(value for values in times.values() for value in values)
    whole = {
        name: tuple(round(Fraction(str(value)) * scale) for value in values)
        for name, values in times.items()
    }
    costs: StageCosts = attrs.evolve(task.costs, **whole)
    return attrs.evolve(task, costs=costs, memory=_whole_memory(task.memory)), scale


def _whole_memory(memory: Memory) -> Memory:
    """What is kept rounded up, and the limit down."""
    if not memory.limited:
        return memory
    kept = [memory.full, memory.lean, memory.rest, memory.gradient]
    scale = _scale(size for sizes in kept for size in sizes)
    full, lean, rest, gradient = (
        tuple(math.ceil(Fraction(str(size)) * scale) for size in sizes) for sizes in kept
    )
    limit = tuple(math.floor(Fraction(str(room)) * scale) for room in memory.limit)
    return Memory(full, lean, rest, gradient, limit)


def _scale(values: Iterable[float]) -> Fraction:
    """What makes all whole, or all as fine as they need be."""
    exactly = [Fraction(str(value)) for value in values]
    whole, most = reduce(math.lcm, (value.denominator for value in exactly), 1), max(exactly)
    return Fraction(whole) if whole * most <= 10**3 * _FINEST else _FINEST / most


def _schedule(solved: Solved, task: Task, channel: str) -> Schedule:
    """The complete schedule, proved."""
    lists = [[Action(*action) for action in actions] for actions in solved.lists]
    bare = Schedule.of("exact", task.placement, lists, task.microbatches)
    return prove(append_steps(bare), channel).proved()
