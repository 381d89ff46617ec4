"""Finds the best possible schedule of small work: `exact`.

The order is a constraint model, which OR-Tools' CP-SAT solves to the end. Every action is an
interval of its rank's time, and no two of a rank overlap:

    rank 0   [F0][F1]          [B0  ][B1  ]       held: [F0 ............. B0  ]
    rank 1       [F0][B0  ][F1][B1  ]                       [F1 .......... B1  ]

An activation is held from one action to another, and a rank never holds more than the limit. All
microbatches of a stage cost the same. So the k-th forward of each stage is that of microbatch k,
and so are the k-th gradient of its input and the k-th split gradient of its weights: two that
change places give the same schedule by other names.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise, product
from typing import Any, TypeAlias

import attrs

from schedir.errors import SchedirError
from schedir.finder.orders import Run, timed
from schedir.finder.searching import Found, completed
from schedir.finder.terms import (
    BACKWARD,
    FORWARD,
    INPUT,
    LEAN,
    RECOMPUTE,
    WEIGHT,
    Memory,
    Objective,
    StageCosts,
    Task,
    Terms,
)
from schedir.graph.alive import HeldUntil
from schedir.graph.board import Order
from schedir.ir import Schedule
from schedir.simulator import CostModel

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
    channel: str | None = None,
) -> Schedule:
    """The best possible schedule of small work, if no transport's order holds up anything.

    The arguments are those of `schedir.search`; a `channel` only says what it is proved and timed
    under, and `seconds` is the longest that it may take on each placement, by the clock. It is for
    small work: 40 actions take seconds. It places the kinds of action that `schedir.search` places.
    Costs that are not round numbers are rounded to a millionth of the largest, times and bytes
    alike.

    OR-Tools solves the problem (CP-SAT) and must be installed: pip install 'schedir[exact]'.

    Raises SchedirError if OR-Tools is missing, if no schedule is within the limits, if the time is
    over before a schedule is proved best, for costs of other stages, for compute that costs nothing
    (no time determines its order), and for a limit in bytes if boundaries have bytes, which it
    can't count. Raises ValueError or TypeError for a bad argument.

    >>> import schedir
    >>> schedule = schedir.finder.exact(ranks=2, microbatches=2)
    >>> schedir.simulate(schedule).makespan
    7
    """
    return exactly(**locals()).schedule  # all that it was called with


def exactly(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    *,
    seconds: float = EXACT_SECONDS,
    seed: int = 0,
    **limits: Any,
) -> Found:
    """`exact`, with everything known about the schedule that it found.

    `limits` are the other arguments of `exact`. Raises what `exact` raises.

    >>> from schedir import finder
    >>> found = finder.exactly(ranks=2, microbatches=2)
    >>> found.value == found.lower_bound
    True
    """
    terms = Terms(ranks=ranks, microbatches=microbatches, chunks=chunks, **limits)
    if terms.counts_boundaries:
        raise SchedirError(
            "the exact search can't count the bytes of boundaries: leave boundary_bytes out of the "
            "costs, or limit activations"
        )
    if terms.steps != "last":
        raise SchedirError('the exact search updates stages at the end: leave out steps="anywhere"')
    best: list[tuple[Task, Run]] = []
    for task in map(terms.task, terms.placements):
        _expect_time(task)
        order = _solved(_in_whole_numbers(task), seconds, seed)
        run = None if order is None else timed(task, order)
        if run is not None:
            best.append((task, run))
    if not best:
        raise SchedirError("no schedule of this work is within the limit")
    task, run = min(best, key=lambda each: each[1].value)
    found = completed(terms, task, run, math.inf, "exact")
    return found.found(run.value, seed, candidates=len(terms.placements))


def _expect_time(task: Task) -> None:
    """Raise SchedirError where compute takes no time."""
    names = ["forward", "backward"]
    names += ["backward_input", "backward_weight"] * task.split + ["recompute"] * task.recompute
    for name in names:
        if not min(getattr(task.costs, name)):
            raise SchedirError(
                f"{name} costs nothing on some stage, so no time tells its order: give it a cost"
            )


def _in_whole_numbers(task: Task) -> Task:
    """The task with whole numbers alone: what is kept is rounded up, and the limit down."""
    placement, *times = attrs.astuple(task.costs, recurse=False)
    *kept, limit = attrs.astuple(task.memory, recurse=False)
    costs, memory = StageCosts(placement, *_whole(times, times, round)), task.memory
    if memory.limited:
        memory = Memory(*_whole(kept, kept, math.ceil), *_whole([limit], kept, math.floor))
    return attrs.evolve(task, costs=costs, memory=memory)


_Rows: TypeAlias = Sequence[Sequence[float]]


def _whole(
    rows: _Rows, beside: _Rows, rounded: Callable[[Fraction], int]
) -> Iterator[tuple[int, ...]]:
    """Whole numbers, in a unit that makes all `beside` them whole, or as fine as they need be."""
    numbers = [Fraction(str(number)) for row in beside for number in row]
    scale, most = Fraction(math.lcm(*(each.denominator for each in numbers))), max(numbers)
    if scale * most > 10**3 * _FINEST:
        scale = _FINEST / most
    for row in rows:
        yield tuple(rounded(Fraction(str(number)) * scale) for number in row)


def _solved(task: Task, seconds: float, seed: int) -> Order | None:
    """The best order of a task whose numbers are all whole, None where its limits allow none.

    Raises SchedirError where OR-Tools is not installed, or where the time is over before an order
    is proved to be the best.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise SchedirError(
            "the exact optimum is found by OR-Tools, which is not installed: "
            "pip install 'schedir[exact]'"
        ) from None
    if min(task.memory.limit) < 0:
        return None  # what is kept all the time is too much
    model = _Model(task, cp_model.CpModel())
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = seed
    # On one thread: the same seed, the same order. Linear relaxations know nothing of orders.
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 0
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        found = f"{solver.objective_value:g}" if status == cp_model.FEASIBLE else "none"
        raise SchedirError(
            f"{seconds:g} seconds were too few: the best schedule found is {found}, and none is "
            f"below {solver.best_objective_bound:g}, both in the costs' smallest step; give it "
            "more `seconds`, or search for a good one"
        )
    return [
        [
            solver.value(step)
            for _, lasts, _, step in sorted(own, key=lambda each: solver.value(each[0]))
            if solver.value(lasts)
        ]
        for own in model.on_rank
    ]


Expression: TypeAlias = Any
"""A variable of the model, or a sum of some."""


@attrs.frozen
class _Cell:
    """The variables of one (stage, microbatch).

    `split` and `runs_again` say whether it has a W and an R. `forward`, `again`, `backward` (of its
    B or I) and `weight` are starts, and `ready`, `returned` and `complete` the ends of the last
    three: without an R, `again` is `forward`; without a W, `weight` is `returned`.
    """

    split: Expression
    runs_again: Expression
    forward: Expression
    again: Expression
    ready: Expression
    backward: Expression
    returned: Expression
    weight: Expression
    complete: Expression


_Stream: TypeAlias = tuple[list[tuple[Expression, Expression]], float, float]
"""The transfers between two stages: when each payload is made and used; how long a transfer takes,
and how long it occupies its channel."""


class _Model:
    """A task as variables and constraints of CP-SAT."""

    def __init__(self, task: Task, model: Any) -> None:
        self.task, self.model, self.costs = task, model, task.costs
        # One after the other takes no longer than this.
        times = attrs.astuple(task.costs, recurse=False)[1:]
        self.horizon = int(task.microbatches * sum(map(sum, times)))
        # By rank, its steps: start, duration (0 if it does not run), end, and which it is.
        self.on_rank: list[list[tuple[Expression, ...]]] = [[] for _ in range(task.ranks)]
        microbatches = range(task.microbatches)
        self.cells = [[self._cell(stage) for _ in microbatches] for stage in range(task.stages)]
        self._in_order()
        self._transfers()
        for rank, actions in enumerate(self.on_rank):
            model.add_no_overlap(model.new_interval_var(*each[:3], "") for each in actions)
            self._hold(rank)
        self._minimise()

    def _time(self) -> Expression:
        return self.model.new_int_var(0, self.horizon, "")

    def _cell(self, stage: int) -> _Cell:
        """The variables, with what holds for them alone."""
        task, model = self.task, self.model
        switches = (
            model.new_bool_var("") if free else model.new_constant(0)
            for free in (task.split, task.recompute)
        )
        cell = _Cell(*switches, *(self._time() for _ in range(7)))
        split, again = cell.split, cell.runs_again
        takes = task.steps.lasts[stage :: task.stages]  # by way
        forward = cell.forward + takes[FORWARD]
        shorter = takes[BACKWARD] - takes[INPUT]
        for start, lasts, end, way in (
            (cell.forward, takes[FORWARD], forward, FORWARD + (LEAN - FORWARD) * again),
            (cell.again, takes[RECOMPUTE] * again, cell.ready, RECOMPUTE),
            (
                cell.backward,
                takes[BACKWARD] - shorter * split,
                cell.returned,
                BACKWARD + (INPUT - BACKWARD) * split,
            ),
            (cell.weight, takes[WEIGHT] * split, cell.complete, WEIGHT),
        ):
            step = way * task.stages + stage
            self.on_rank[task.placement[stage]].append((start, lasts, end, step))
        model.add(cell.backward >= cell.ready)
        model.add(cell.weight >= cell.returned)
        model.add(cell.weight == cell.returned).only_enforce_if(~split)
        model.add(cell.again >= forward).only_enforce_if(again)
        model.add(cell.again == cell.forward).only_enforce_if(~again)
        return cell

    def _in_order(self) -> None:
        """Microbatches, by each of their actions."""
        model, costs = self.model, self.costs
        for stage, cells in enumerate(self.cells):
            for cell, following in pairwise(cells):
                model.add(following.forward >= cell.forward + costs.forward[stage])
                model.add(following.backward >= cell.returned)
            for cell, later in combinations(cells, 2):
                model.add(later.weight >= cell.complete).only_enforce_if(cell.split, later.split)

    def _transfers(self) -> None:
        """What a stage needs of its neighbours, over channels that are first in, first out."""
        costs = self.costs
        channels: dict[tuple[int, int], list[_Stream]] = defaultdict(list)
        for stage, (below, above) in enumerate(pairwise(self.cells)):
            low, high = costs.placement[stage : stage + 2]
            done = costs.forward[stage]
            cells = [*zip(below, above, strict=True)]
            down = [(source.forward + done, target.forward) for source, target in cells]
            up = [(source.returned, target.backward) for target, source in cells]
            channels[low, high].append((down, costs.down[stage + 1], costs.down_holds[stage + 1]))
            channels[high, low].append((up, costs.up[stage], costs.up_holds[stage]))
        for cell in self.cells[-1]:
            self.model.add(cell.backward >= cell.forward + costs.forward[-1])
        for streams in channels.values():
            self._first_in_first_out(streams)

    def _first_in_first_out(self, streams: list[_Stream]) -> None:
        """Transfers of one channel, by when they are made; if none occupies it, none waits."""
        model, queued = self.model, any(holds for _, _, holds in streams)
        sent = []
        for way, takes, holds in streams:
            stream = [(made, self._time() if queued else made, holds) for made, _ in way]
            for (made, begin, _), (_, used) in zip(stream, way, strict=True):
                model.add(begin >= made)
                model.add(used >= begin + takes)
            for (_, begin, _), (_, following, _) in pairwise(stream):
                model.add(following >= begin + holds)
            sent.append(stream)
        for one, other in combinations(sent, 2) if queued else ():
            for pair in product(one, other):
                before = model.new_bool_var("")
                for is_so, (early, late) in ((before, pair), (~before, pair[::-1])):
                    model.add(early[0] <= late[0]).only_enforce_if(is_so)
                    model.add(early[1] + early[2] <= late[1]).only_enforce_if(is_so)

    def _hold(self, rank: int) -> None:
        """Never more than the limit at once."""
        task, model, memory, end = self.task, self.model, self.task.memory, self.horizon + 1
        stages = task.stages_of[rank]
        most = sum(task.microbatches * memory.full[s] + memory.gradient[s] for s in stages)
        if most <= memory.limit[rank]:
            return
        lasting: list[tuple[Expression, Expression, float]] = []
        for stage in stages:
            cells, first = self.cells[stage], self._time()
            model.add_min_equality(first, [cell.complete for cell in cells])
            lasting.append((first, end, memory.gradient[stage]))
            for cell in cells:
                lasting += [
                    (cell.forward, cell.again, memory.lean[stage] * task.recompute),
                    (cell.again, cell.returned, memory.full[stage]),
                    (cell.returned, cell.complete, memory.rest[stage]),
                ]
        kept = [each for each in lasting if each[2]]
        intervals = [
            model.new_interval_var(start, model.new_int_var(0, end, ""), until, "")
            for start, until, _ in kept
        ]
        model.add_cumulative(intervals, [size for _, _, size in kept], memory.limit[rank])

    def _minimise(self) -> None:
        model, costs = self.model, self.costs
        longest = self._time()
        for rank, own in enumerate(self.task.stages_of):
            after = sum(costs.optim_step[stage] for stage in own)
            since: float = 0
            if self.task.objective == "span":
                # It starts as soon as it can: later would be shorter, and no list can say so.
                since = sum(costs.forward[: own[0]]) + sum(costs.down[: own[0] + 1])
                model.add(self.cells[own[0]][0].forward == since)
            # Said once more: what a rank does all in all is no sum that its order shows.
            busy = sum(lasts for _, lasts, _, _ in self.on_rank[rank])
            model.add(longest >= after + busy)
            for stage in own:
                for cell in self.cells[stage]:
                    model.add(longest >= cell.complete + after - since)
        model.minimize(longest)
