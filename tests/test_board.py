"""The Board: its times are the simulator's, and it lets run what the oracle lets run."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Action, CostModel, Kind, Schedule, simulate
from schedir.finder.orders import schedule_of
from schedir.finder.terms import Memory, StageCosts, Task
from schedir.graph.board import (
    DEFERRED,
    KEPT,
    QUEUES,
    WAYS,
    Board,
    Order,
    follow,
    most_held,
    options,
    play,
    take,
)
from schedir.ir.kinds import uses_of
from tests.oracle import happens
from tests.stepped import Stepped
from tests.test_stepped import some_costs, spans_of

SEEDS = st.integers(0, 1 << 32)


def some_task(chance: random.Random) -> tuple[Task, CostModel]:
    """A pipeline on any placement without replicas, with whole costs and sizes."""
    ranks, microbatches = chance.randint(1, 3), chance.randint(1, 4)
    placement = [*range(ranks), *(chance.randrange(ranks) for _ in range(chance.randint(0, 2)))]
    chance.shuffle(placement)
    bare = Schedule.of("bare", tuple(placement), [[]] * ranks, microbatches)
    costs = some_costs(bare, chance)

    def sizes() -> tuple[int, ...]:
        return tuple(chance.randint(0, 5) for _ in placement)

    memory = Memory(sizes(), sizes(), sizes(), sizes(), (math.inf,) * ranks)
    of_stages = StageCosts.of(placement, costs)
    return Task(microbatches, "any", of_stages, memory, "makespan", True, True), costs


def some_order(task: Task, chance: random.Random) -> Order:
    """Lists that are drawn one step after the other, of all that may run next."""
    takers: dict[int, list[int]] = {}
    for step, queue in enumerate(task.steps.queue):
        takers.setdefault(queue, []).append(step)
    board = Board.of(task.steps)
    order: Order = [[] for _ in range(task.ranks)]
    while True:
        can = [
            (rank, value, stage)
            for rank in range(task.ranks)
            for _, value, stage in options(board, rank, 0)
        ]
        if not can:
            return order
        rank, value, stage = chance.choice(can)
        step = chance.choice(takers[value * task.stages + stage])
        order[rank].append(step)
        take(board, step, 0)


def played_as(task: Task, order: Order) -> tuple[list[list[float]], list[float]] | None:
    """When the steps of lists start, and the most that each rank holds, as played."""
    board = Board.of(task.steps)
    starts: list[list[float]] = [[] for _ in order]
    most = [0.0] * len(order)

    def choose(rank: int, now: float) -> tuple[float, int]:
        most[rank] = max(most[rank], board.held[rank])
        if len(starts[rank]) < len(order[rank]):
            step = order[rank][len(starts[rank])]
            for start, value, stage in options(board, rank, now):
                if value * task.stages + stage == task.steps.queue[step]:
                    if start <= now:
                        starts[rank].append(now)
                    return start, step
        return -1, -1

    return (starts, most) if play(board, choose) == order else None


@given(SEEDS)
def test_it_runs_lists_as_the_simulators_do(seed: int) -> None:
    chance = random.Random(seed)
    task, costs = some_task(chance)
    order = some_order(task, chance)
    bare = schedule_of(task, order, "drawn")
    schedule = schedir.insert_communication(bare)
    played, ran = played_as(task, order), follow(task.steps, order)
    assert played is not None
    assert ran is not None
    starts, most = played
    assert starts == ran[0]
    stepped = Stepped(schedule, {}, costs, "ahead").run()
    assert stepped is not None
    for line in (spans_of(simulate(schedule, costs)), stepped):
        for rank, steps in enumerate(order):
            listed = bare.flat[rank][: len(steps)]
            spans = [line[rank, str(action)] for action in listed]
            lasts = [task.steps.lasts[step] for step in steps]
            assert spans == [
                [(start, start + time)] for start, time in zip(starts[rank], lasts, strict=True)
            ]
    assert most == [most_held(task.steps, steps) for steps in order]


def as_sent(bare: Schedule) -> Schedule:
    """Each send behind what makes its payload, and all receives ahead, in the order of the sends:
    so nothing but compute waits for compute."""
    (placement,) = zip(*bare.placement, strict=True)
    lists: list[list[Action]] = [[] for _ in placement]
    receives: list[list[Action]] = [[] for _ in placement]
    for rank, actions in enumerate(bare.flat):
        for action in actions:
            lists[rank].append(action)
            stage, of = action.stage, action.microbatch
            if action.kind is Kind.FORWARD:
                to, ends = stage + 1, (Kind.SEND_ACT, Kind.RECV_ACT)
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                to, ends = stage - 1, (Kind.SEND_GRAD, Kind.RECV_GRAD)
            else:
                continue
            if 0 <= to < len(placement) and placement[to] != rank:
                lists[rank].append(Action(ends[0], stage, of))
                receives[placement[to]].append(Action(ends[1], to, of))
    both = [early + late for early, late in zip(receives, lists, strict=True)]
    return Schedule.of("sent", bare.placement, both[: bare.ranks], bare.microbatches)


@given(SEEDS)
def test_it_lets_run_next_what_the_oracle_does(seed: int) -> None:
    """One rank is stopped somewhere, while the others go on as far as they can. Of all that it has
    listed from there on, the Board lets run just what may come first."""
    chance = random.Random(seed)
    task, _ = some_task(chance)
    order = some_order(task, chance)
    rank = chance.randrange(task.ranks)
    place = chance.randrange(len(order[rank]))
    board, queues = Board.of(task.steps), task.steps.queue

    def can(rank: int) -> set[int]:
        return {value * task.stages + stage for _, value, stage in options(board, rank, 0)}

    left = [[*steps] for steps in order]
    left[rank] = order[rank][:place]
    moved = True
    while moved:
        moved = False
        for other, steps in enumerate(left):
            if steps and queues[steps[0]] in can(other):
                take(board, steps.pop(0), 0)
                moved = True
    assert not left[rank]
    for queue in {queues[step] for step in order[rank][place:]}:
        changed = [[*steps] for steps in order]
        at = next(n for n in range(place, len(order[rank])) if queues[order[rank][n]] == queue)
        changed[rank].insert(place, changed[rank].pop(at))
        sent = as_sent(schedule_of(task, changed, "moved"))
        assert (happens(sent, "async", seed) == "completes") == (queue in can(rank))
        alone = most_held(task.steps, changed[rank]) < math.inf
        if queue in can(rank):
            assert alone
        elif board.there[queue] or queue // task.stages in (KEPT, DEFERRED):
            assert not alone


def test_every_way_takes_from_a_queue() -> None:
    assert {uses_of(kind, "end")[0].value for kind, _ in WAYS} == set(QUEUES)
