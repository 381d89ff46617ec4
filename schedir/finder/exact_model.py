"""The order of a pipeline's work as a constraint model, which OR-Tools' CP-SAT solves to the end.

Every action is an interval of its rank's time, and no two of a rank overlap:

    rank 0   [F0][F1]          [B0  ][B1  ]       held: [F0 ............. B0  ]
    rank 1       [F0][B0  ][F1][B1  ]                       [F1 .......... B1  ]

What is held lasts from one of them to another, and never sums up to more than the limit. All
microbatches of a stage cost the same, so the k-th forward of each stage is that of microbatch k,
and so are the k-th gradient of its input and, of those that are split, of its weights: two that
change places are the same schedule by other names.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any, TypeAlias

import attrs

from schedir.errors import SchedirError
from schedir.finder.task import Task
from schedir.ir import Kind

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
