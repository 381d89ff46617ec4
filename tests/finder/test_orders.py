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
from schedir.finder.orders import Run, fits, order_of, schedule_of, serial, with_updates
from schedir.finder.terms import Task, Terms
from schedir.graph.board import most_held
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


def tried(random: Random) -> tuple[Terms, Task, list[Run]]:
    """Runs of all kinds, under a limit that lets nearly all be."""
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
    made = [scheduled(task, style) for style in islice(styles(task, random), 300, 303)]
    runs = [serial(task), *(run for run in made if run is not None)]
    made = [*islice(improved(task, runs[-1], random), 30)]
    return terms, task, runs + [run for run in made if run is not None]


@sweep("seed", range(30), quick=range(8))
def test_times_and_peaks_are_those_of_simulate(seed: int) -> None:
    terms, task, runs = tried(Random(seed))
    for run in runs:
        schedule = schedule_of(task, with_updates(task, run), "tried")
        assert check(schedule).ok
        line = simulate(schedule, terms.costs)
        spans = [rank.span for rank in line.ranks]
        assert run.value == (line.makespan if terms.objective == "makespan" else max(spans))
        assert order_of(task, line.schedule) == run.order
        if terms.counts_boundaries:
            continue
        for rank, (steps, stats) in enumerate(zip(run.order, line.ranks, strict=True)):
            kept = terms.memory_limit - task.memory.limit[rank]  # type: ignore[operator]
            most = most_held(task.steps, steps)
            assert kept + most == pytest.approx(stats.peak_bytes)
            assert fits(task, rank, steps) == (most <= task.memory.limit[rank])


def test_what_a_rank_can_not_run_does_not_fit() -> None:
    _, task, runs = tried(Random(1))
    assert not fits(task, 0, runs[0].order[0][::-1])
