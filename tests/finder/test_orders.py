"""What the search reckons with is what `simulate` says, to the last bit."""

from __future__ import annotations

import math
from itertools import islice
from random import Random
from typing import Any

import pytest

from schedir import CostModel, check, simulate
from schedir.finder.list_scheduling import scheduled, styles
from schedir.finder.local_search import improved
from schedir.finder.orders import fits, order_of, schedule_of, serial, timed, with_updates
from schedir.finder.terms import Task, Terms
from schedir.graph.board import Order, most_held
from tests.sweeps import sweep


def costs_of(random: Random, stages: int) -> CostModel:
    def each(most: float) -> tuple[float, ...]:
        return tuple(round(random.uniform(0.1, most), 3) for _ in range(stages))

    full = each(9)
    times: Any = {name: each(3) for name in ("forward", "backward_input", "backward_weight")}
    sizes: Any = {name: each(5) for name in ("gradient_bytes", "weight_bytes", "optimizer_bytes")}
    return CostModel(
        **times,
        backward=each(6),
        optim_step=each(1),
        latency=random.choice((0, 0.3)),
        bandwidth=random.choice((math.inf, 2.0)),
        boundary_bytes=random.choice((0, 1.5)),
        activation_bytes=full,
        input_bytes=tuple(size / 4 for size in full),
        deferred_bytes=random.choice((None, tuple(size / 2 for size in full))),
        **sizes,
    )


def tried(random: Random) -> tuple[Terms, Task, list[Order]]:
    """Orders of all kinds, under a limit that lets nearly all be."""
    ranks, chunks, microbatches = random.randint(1, 4), random.randint(1, 3), random.randint(1, 5)
    terms = Terms(
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        costs=costs_of(random, ranks * chunks),
        placement=random.choice(("wrapped", "wave")),
        memory_limit=random.choice((60.0, 100.0, 1000.0)),
        max_activations=None,
        held_until="W",
        objective=random.choice(("makespan", "span")),
        split=random.random() < 0.8,
        recompute=None,
        channel=None,
    )
    task = terms.task(terms.placements[0])
    orders = [serial(task)]
    for style in islice(styles(task, random), 300, 303):
        found = scheduled(task, style)
        if found is not None:
            orders.append(found)
    run = timed(task, orders[-1])
    assert run is not None
    made = islice(improved(task, orders[-1], run, random), 30)
    orders += [each[0] for each in made if each is not None]
    return terms, task, orders


@sweep("seed", range(30), quick=range(8))
def test_times_and_peaks_are_those_of_simulate(seed: int) -> None:
    terms, task, orders = tried(Random(seed))
    for order in orders:
        run = timed(task, order)
        assert run is not None
        schedule = schedule_of(task, with_updates(task, order, run), "tried")
        assert check(schedule).ok
        line = simulate(schedule, terms.costs)
        spans = [rank.span for rank in line.ranks]
        assert run.value == (line.makespan if terms.objective == "makespan" else max(spans))
        assert order_of(task, line.schedule) == order
        if terms.counts_boundaries:
            continue
        for rank, (steps, stats) in enumerate(zip(order, line.ranks, strict=True)):
            kept = terms.memory_limit - task.memory.limit[rank]  # type: ignore[operator]
            most = most_held(task.steps, steps)
            assert kept + most == pytest.approx(stats.peak_bytes)
            assert fits(task, rank, steps) == (most <= task.memory.limit[rank])


def test_what_a_rank_can_not_run_does_not_fit() -> None:
    _, task, orders = tried(Random(1))
    assert not fits(task, 0, orders[0][0][::-1])
