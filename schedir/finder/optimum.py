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
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import cached_property, reduce
from itertools import combinations, pairwise
from typing import Any, TypeAlias

import attrs

from schedir.checker import prove
from schedir.errors import SchedirError
from schedir.finder.searching import Found
from schedir.finder.terms import Memory, Objective, StageCosts, Task, Terms
from schedir.graph.alive import HeldUntil
from schedir.ir import Action, Kind, Schedule
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
    given = locals()
    terms = Terms(**{field.name: given[field.name] for field in attrs.fields(Terms)})
    return exactly(terms, seconds, seed).schedule


def exactly(terms: Terms, seconds: float, seed: int) -> Found:
    """`exact`, with everything known about the schedule that it found.

    `terms` are the work and its limits.

    >>> from schedir import finder
    >>> from schedir.finder.terms import Terms
    >>> found = finder.exactly(Terms(ranks=2, microbatches=2, chunks=1), seconds=60, seed=0)
    >>> found.value == found.lower_bound
    True
    """
    if terms.counts_boundaries:
        raise SchedirError(
            "the exact search can't count the bytes of boundaries: leave boundary_bytes out of the "
            "costs, or limit activations"
        )
    best: list[tuple[Fraction, Task, Schedule]] = []
    for named in terms.placements:
        task = terms.task(named)
        _expect_time(task)
        whole, scale = _in_whole_numbers(task)
        solved = solve(whole, seconds, seed)
        if solved is not None:
            best.append((solved.value / scale, task, _schedule(solved, task, terms.proved_under)))
    if not best:
        raise SchedirError("no schedule of this work is within the limit")
    _, task, schedule = min(best, key=lambda each: each[0])
    line = simulate(schedule, terms.costs, channel=terms.channel)
    return Found(
        schedule=schedule,
        timeline=line,
        objective=terms.objective,
        value=terms.value(line),
        lower_bound=terms.value(simulate(schedule, terms.costs)),
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
                f"{name} costs nothing on some stage, so no time tells its order: give it a cost"
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


Expression: TypeAlias = Any
"""A variable of the model, or a sum of some."""


@attrs.frozen
class Solved:
    """The best there is: `lists[rank]` are its actions, (kind, stage, microbatch), in order."""

    value: int
    lists: list[list[tuple[Kind, int, int]]]


def solve(task: Task, seconds: float, seed: int) -> Solved | None:
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
    model = _Model(task, cp_model.CpModel())
    model.constrain()
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
    return Solved(round(solver.objective_value), model.lists(solver))


@attrs.frozen
class _Actions:
    """The variables of one (stage, microbatch).

    `forward`, `backward` (the start of its B or I), `weight` and `again` are starts; `split` and
    `runs_again` say whether the last two are there; `returned` is when the gradient of the input is
    made, `complete` when all of it is over.
    """

    forward: Expression
    backward: Expression
    weight: Expression
    again: Expression
    split: Expression
    runs_again: Expression
    returned: Expression
    complete: Expression


class _Model:
    """A task as variables and constraints of CP-SAT."""

    def __init__(self, task: Task, model: Any) -> None:
        self.task, self.model, self.costs = task, model, task.costs
        # One after the other takes no longer than this.
        costs = self.costs
        backwards = costs.backward, costs.backward_input, costs.backward_weight
        each = costs.forward, *backwards, costs.recompute, costs.down, costs.up
        self.horizon = int(task.microbatches * sum(map(sum, each)) + sum(costs.optim_step))
        self.on_rank: list[list[Any]] = [[] for _ in costs.ranks]
        self.cells = [
            [self._cell(stage) for _ in range(task.microbatches)] for stage in costs.stages
        ]

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def _switch(self, free: bool) -> Any:
        """Whether something is there: to be chosen, or not."""
        return self.model.new_bool_var("") if free else self.model.new_constant(0)

    def _cell(self, stage: int) -> _Actions:
        task, costs, model = self.task, self.costs, self.model
        cell = _Actions(
            forward=self._time(),
            backward=self._time(),
            weight=self._time() if task.split else 0,
            again=self._time() if task.recompute else 0,
            split=self._switch(task.split),
            runs_again=self._switch(task.recompute),
            returned=self._time(),
            complete=self._time(),
        )
        busy = self.on_rank[costs.placement[stage]]
        whole, part = costs.backward[stage], costs.backward_input[stage]
        busy.append(model.new_fixed_size_interval_var(cell.forward, costs.forward[stage], ""))
        if not task.split:
            busy.append(model.new_fixed_size_interval_var(cell.backward, whole, ""))
        else:
            last = costs.backward_weight[stage]
            optional = model.new_optional_fixed_size_interval_var
            busy.append(optional(cell.backward, whole, ~cell.split, ""))
            busy.append(optional(cell.backward, part, cell.split, ""))
            busy.append(optional(cell.weight, last, cell.split, ""))
            model.add(cell.weight >= cell.returned).only_enforce_if(cell.split)
            model.add(cell.complete == cell.weight + last).only_enforce_if(cell.split)
            model.add(cell.weight == 0).only_enforce_if(~cell.split)
        model.add(cell.returned == cell.backward + whole + (part - whole) * cell.split)
        model.add(cell.complete == cell.returned).only_enforce_if(~cell.split)
        if task.recompute:
            time = costs.recompute[stage]
            busy.append(
                model.new_optional_fixed_size_interval_var(cell.again, time, cell.runs_again, "")
            )
            forward = cell.forward + costs.forward[stage]
            model.add(cell.again >= forward).only_enforce_if(cell.runs_again)
            model.add(cell.backward >= cell.again + time).only_enforce_if(cell.runs_again)
            model.add(cell.again == 0).only_enforce_if(~cell.runs_again)
        return cell

    def constrain(self) -> None:
        """Add all constraints, and the objective."""
        self._in_order()
        self._transfers()
        for intervals in self.on_rank:
            self.model.add_no_overlap(intervals)
        for rank in self.costs.ranks:
            self._hold(rank)
        self._minimise()

    def _in_order(self) -> None:
        """Microbatches, by each of their actions."""
        model, costs = self.model, self.costs
        for stage, cells in enumerate(self.cells):
            for cell, following in pairwise(cells):
                model.add(following.forward >= cell.forward + costs.forward[stage])
                model.add(following.backward >= cell.returned)
            if self.task.split:
                for cell, later in combinations(cells, 2):
                    model.add(later.weight >= cell.complete).only_enforce_if(
                        cell.split, later.split
                    )

    def _transfers(self) -> None:
        """What a stage needs of its neighbours, over channels that are first in, first out."""
        model, costs = self.model, self.costs
        channels: dict[tuple[int, int], list[list[tuple[Any, Any, float]]]] = {}
        for stage in costs.stages[1:]:
            low, high = costs.placement[stage - 1], costs.placement[stage]
            cells = list(zip(self.cells[stage - 1], self.cells[stage], strict=True))
            done = costs.forward[stage - 1]
            downward = [(below.forward + done, above.forward) for below, above in cells]
            upward = [(above.returned, below.backward) for below, above in cells]
            for ends, way, takes, holds in (
                ((low, high), downward, costs.down[stage], costs.down_holds[stage]),
                ((high, low), upward, costs.up[stage - 1], costs.up_holds[stage - 1]),
            ):
                stream = []
                for made, used in way:
                    begin = self._time() if ends in self.queues else made
                    model.add(begin >= made)
                    model.add(used >= begin + takes)
                    stream.append((made, begin, holds))
                channels.setdefault(ends, []).append(stream)
        for cell in self.cells[-1]:
            model.add(cell.backward >= cell.forward + costs.forward[-1])
        for ends in self.queues:
            self._first_in_first_out(channels[ends])

    @cached_property
    def queues(self) -> set[tuple[int, int]]:
        """The channels that some transfer occupies, so that others wait for it."""
        costs, found = self.costs, set()
        for stage in costs.stages[1:]:
            low, high = costs.placement[stage - 1], costs.placement[stage]
            if low != high:
                found |= {(low, high)} if costs.down_holds[stage] else set()
                found |= {(high, low)} if costs.up_holds[stage - 1] else set()
        return found

    def _first_in_first_out(self, streams: list[list[tuple[Any, Any, float]]]) -> None:
        """Transfers of one channel, by when they are made."""
        for stream in streams:
            for (_, begin, holds), (_, following, _) in pairwise(stream):
                self.model.add(following >= begin + holds)
        for one, other in combinations(streams, 2):
            for made, begin, holds in one:
                for made_there, begin_there, holds_there in other:
                    before = self._switch(free=True)
                    for is_so, early, late in (
                        (before, (made, begin, holds), (made_there, begin_there)),
                        (~before, (made_there, begin_there, holds_there), (made, begin)),
                    ):
                        self.model.add(early[0] <= late[0]).only_enforce_if(is_so)
                        self.model.add(early[1] + early[2] <= late[1]).only_enforce_if(is_so)

    def _hold(self, rank: int) -> None:
        """Never more than the limit at once."""
        model, memory, stages = self.model, self.task.memory, self.costs.stages_of(rank)
        held = [self.task.microbatches * memory.full[s] + memory.gradient[s] for s in stages]
        if sum(held) <= memory.limit[rank]:
            return
        lasting: list[tuple[Any, Any, float]] = []
        for stage in stages:
            full, lean, rest = memory.full[stage], memory.lean[stage], memory.rest[stage]
            for cell in self.cells[stage]:
                since = cell.forward
                if self.task.recompute:
                    since = self._time()
                    model.add(since == cell.forward).only_enforce_if(~cell.runs_again)
                    model.add(since == cell.again).only_enforce_if(cell.runs_again)
                    lasting.append((cell.forward, since, lean))
                lasting.append((since, cell.returned, full))
                lasting.append((cell.returned, cell.complete, rest))
            first = self._time()
            model.add_min_equality(first, [cell.complete for cell in self.cells[stage]])
            lasting.append((first, self.horizon + 1, memory.gradient[stage]))
        kept = [each for each in lasting if each[2]]
        intervals = [self._lasting(start, end) for start, end, _ in kept]
        model.add_cumulative(intervals, [size for _, _, size in kept], max(0, memory.limit[rank]))

    def _lasting(self, start: Any, end: Any) -> Any:
        return self.model.new_interval_var(
            start, self.model.new_int_var(0, self.horizon + 1, ""), end, ""
        )

    def _minimise(self) -> None:
        model, costs = self.model, self.costs
        longest = model.new_int_var(0, self.horizon, "")
        for rank in costs.ranks:
            own = costs.stages_of(rank)
            after = sum(costs.optim_step[stage] for stage in own)
            since: float = 0
            if self.task.objective == "span":
                # It starts as soon as it can: later would be shorter, and no list can say so.
                since = sum(costs.forward[: own[0]]) + sum(costs.down[: own[0] + 1])
                model.add(self.cells[own[0]][0].forward == since)
            # Said once more: what a rank does all in all is no sum that its order shows.
            model.add(longest >= after + sum(self._busy(stage) for stage in own))
            for stage in own:
                for cell in self.cells[stage]:
                    model.add(longest >= cell.complete + after - since)
        model.minimize(longest)

    def _busy(self, stage: int) -> Any:
        """How long the actions of a stage take, of all microbatches."""
        costs, cells = self.costs, self.cells[stage]
        whole = costs.backward[stage]
        more = costs.backward_input[stage] + costs.backward_weight[stage] - whole
        return (
            len(cells) * (costs.forward[stage] + whole)
            + more * sum(cell.split for cell in cells)
            + costs.recompute[stage] * sum(cell.runs_again for cell in cells)
        )

    def lists(self, solver: Any) -> list[list[tuple[Kind, int, int]]]:
        """The actions of each rank in the order of time."""
        timed: list[list[tuple[int, Kind, int, int]]] = [[] for _ in self.costs.ranks]
        for stage, cells in enumerate(self.cells):
            for microbatch, cell in enumerate(cells):
                timed[self.costs.placement[stage]] += [
                    (solver.value(start), kind, stage, microbatch)
                    for start, kind in self._kinds(cell, solver)
                ]
        return [[action[1:] for action in sorted(actions)] for actions in timed]

    def _kinds(self, cell: _Actions, solver: Any) -> Iterator[tuple[Any, Kind]]:
        split = solver.value(cell.split)
        yield cell.forward, Kind.FORWARD
        yield cell.backward, Kind.BACKWARD_INPUT if split else Kind.BACKWARD
        if split:
            yield cell.weight, Kind.BACKWARD_WEIGHT
        if solver.value(cell.runs_again):
            yield cell.again, Kind.RECOMPUTE
