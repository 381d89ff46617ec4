"""The placements that have a name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import schedir
from schedir import Action, CostModel, LoadError, Pipeline, backward, forward
from schedir.library import generator_of


@pytest.mark.parametrize(
    ("place", "chunks", "expected"),
    [
        (schedir.wrapped, 2, "0 1 2 0 1 2"),
        (schedir.wave, 2, "0 1 2 2 1 0"),
        (schedir.wave, 3, "0 1 2 2 1 0 0 1 2"),
        (schedir.mirrored, 1, "0,2 1 0,2"),
    ],
)
def test_placement_of_three_ranks(place: Any, chunks: int, expected: str) -> None:
    written = (",".join(map(str, held)) for held in place(Pipeline(3, 1, chunks, ())))
    assert " ".join(written) == expected


def slowest_last(pipe: Pipeline, *, costs: CostModel, turned: bool = False) -> list[int]:
    """Stages on ranks by their cost."""
    assert isinstance(costs.forward, tuple)
    by_cost = sorted(range(pipe.ranks), key=costs.forward.__getitem__, reverse=turned)
    return [by_cost.index(stage) for stage in range(pipe.ranks)]


@schedir.schedule("by-cost", placement=slowest_last)
def by_cost(pipe: Pipeline, rank: int, *, turns: int = 1) -> Iterator[Action]:
    """Each microbatch by itself."""
    for m in range(pipe.microbatches * turns // turns):
        yield from (make(s, m) for s in pipe.stages_of(rank) for make in (forward, backward))


@schedir.schedule("anything", placement=slowest_last)
def anything(pipe: Pipeline, rank: int, **others: Any) -> list[Action]:
    """Says what it was given."""
    raise ValueError(f"given {others}")


@pytest.mark.parametrize("own", [{}, {"turned": True}, {"turned": False, "turns": 2}])
def test_a_placement_may_ask_for_costs_and_for_parameters(own: dict[str, Any]) -> None:
    costs = CostModel(forward=(3, 1, 2))
    found = schedir.build(by_cost, ranks=3, microbatches=2, costs=costs, **own)
    expected = ((0,), (2,), (1,)) if own.get("turned") else ((2,), (0,), (1,))
    assert found.placement == expected


def test_what_a_placement_asks_for_is_a_parameter_of_the_schedule() -> None:
    generator = generator_of(by_cost)
    assert [*generator.parameters] == ["turned", "turns"]
    assert generator.sees_costs
    costs = CostModel(forward=(3, 1, 2))
    with pytest.raises(LoadError, match="by-cost has no parameter 'turn'; it has: turned, turns"):
        schedir.build(by_cost, ranks=3, costs=costs, turn=1)
    with pytest.raises(LoadError, match="turned of by-cost is true or false, not 1"):
        schedir.build(by_cost, ranks=3, costs=costs, turned=1)
    with pytest.raises(LoadError, match=r"given \{'turned': True, 'more': 2\}"):
        schedir.build(anything, ranks=3, costs=costs, turned=True, more=2)


def test_costs_are_asked_for_where_a_placement_does() -> None:
    """As a function they may refuse a number of stages that nobody needs."""

    def refuses(stages: int) -> CostModel:
        raise LoadError(f"no costs of {stages} stages")

    assert schedir.build("1f1b", ranks=2, microbatches=2, costs=refuses).ranks == 2
    with pytest.raises(LoadError, match="no costs of 3 stages"):
        schedir.build(by_cost, ranks=3, microbatches=2, costs=refuses)
