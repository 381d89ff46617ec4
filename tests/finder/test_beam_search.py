"""That going through the orders of small work ends at the exact optimum, whatever was known."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from schedir import CostModel
from schedir.finder.beam_search import branched, is_small
from schedir.finder.candidates import within
from schedir.finder.optimum import exactly
from schedir.finder.orders import timed
from schedir.finder.terms import Task, Terms

UNEQUAL = CostModel(forward=2, backward=5, backward_input=3, backward_weight=4, latency=1)
QUEUED = CostModel(boundary_bytes=3, bandwidth=2, latency=1, optim_step=2)
BYTES = CostModel(backward=3, input_bytes=1, activation_bytes=3, deferred_bytes=2, gradient_bytes=2)


def terms(ranks: int, microbatches: int, chunks: int = 1, **options: Any) -> Terms:
    options = {"placement": "wrapped", **options}
    return Terms(ranks=ranks, microbatches=microbatches, chunks=chunks, **options)


def best_of(task: Task) -> float:
    found = [math.inf]
    for _, order in branched(task, lambda: min(found)):
        if order is not None:
            run = timed(task, order)
            assert run is not None
            assert within(task, order)
            found.append(run.value)
    return min(found)


@pytest.mark.parametrize(
    "work",
    [
        terms(2, 4, costs=UNEQUAL),
        terms(3, 3, max_activations=2, costs=UNEQUAL, objective="span"),
        terms(2, 2, 2, costs=QUEUED),
        terms(2, 2, 2, costs=QUEUED, objective="span", placement="wave"),
        terms(2, 3, 3, max_activations=6, split=False, placement="wave"),
        terms(2, 3, 2, max_activations=4, held_until="I", costs=UNEQUAL),
        terms(2, 3, max_activations=1, recompute=True, costs=UNEQUAL),
        terms(2, 2, 2, memory_limit=10, costs=BYTES, recompute=False),
        terms(1, 2, 3, memory_limit=14, costs=BYTES),
    ],
)
def test_it_ends_at_the_exact_optimum(work: Terms) -> None:
    (named,) = work.placements
    task = work.task(named)
    assert is_small(task)
    assert best_of(task) == exactly(**attrs.asdict(work, recurse=False), seconds=30).value


def test_it_ends_where_nothing_is_quicker_than_what_is_known() -> None:
    task = terms(2, 3).task("wrapped")
    best = best_of(task)
    assert all(order is None for _, order in branched(task, lambda: best))
