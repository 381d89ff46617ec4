"""A schedule that search has found, beside the built-in ones: the same model, the same limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import schedir
from schedir import Action, CostModel, Pipeline, backward, forward, optim_step, schedule
from schedir.finder import Row
from tests.command_line import Run

# Each of 8 stages: the model is cut into these, or into 4 of two each.
COSTS = CostModel(
    forward=(3, 2, 2, 2, 2, 2, 2, 4),
    backward=(6, 4, 4, 4, 4, 4, 4, 8),
    backward_input=(3, 2, 2, 2, 2, 2, 2, 4),
    backward_weight=(3, 2, 2, 2, 2, 2, 2, 4),
    activation_bytes=(10,) * 8,
    weight_bytes=(5,) * 8,
    latency=0.25,
)
SUMMED = CostModel(
    forward=(5, 4, 4, 6),
    backward=(10, 8, 8, 12),
    backward_input=(5, 4, 4, 6),
    backward_weight=(5, 4, 4, 6),
    latency=0.25,
)
BESIDE = ["1f1b", "zb-h1", "interleaved-1f1b", "zbv"]


def rows(*targets: schedir.Schedule | str, limit: float | None = None) -> dict[str, Row]:
    table = schedir.compare([*targets], costs=COSTS, memory_limit=limit)
    assert table.best is not None
    return {row.target: row for row in table.rows} | {"best": table.best}


@pytest.mark.parametrize("placement", ["wrapped", "wave"])
def test_found_ones_are_compared_as_they_are_simulated(placement: str) -> None:
    found = schedir.search(4, 8, 2, costs=COSTS, placement=placement, memory_limit=100, seconds=0.2)
    table = rows(found, *BESIDE, limit=100)
    row, line = table[found.name], schedir.simulate(found, COSTS)
    assert (row.makespan, row.stages, row.microbatches) == (line.makespan, 8, 8)
    assert row.fits
    assert row.peak_bytes == max(rank.peak_bytes or 0 for rank in line.ranks) <= 100
    # Of the same model, two stages in one.
    alone = schedir.simulate(schedir.build("1f1b", ranks=4, microbatches=8), SUMMED)
    assert table["1f1b"].makespan == alone.makespan
    # What is over the limit is not the best, however quick.
    assert table["interleaved-1f1b"].fits is False
    assert table["best"].fits
    assert row.makespan is not None
    within = [each for each in table.values() if each.fits and each.makespan is not None]
    assert row.makespan == min(each.makespan or 0 for each in within if each.stages == 8)


def test_found_of_one_chunk_has_the_summed_stages() -> None:
    found = schedir.search(4, 8, costs=SUMMED, max_activations=4, seconds=0.2)
    table = rows(found, *BESIDE)
    assert table[found.name].makespan == schedir.simulate(found, SUMMED).makespan
    assert table["zbv"].stages == 8


def test_generators_see_the_costs_of_as_many_ranks_as_the_list_has() -> None:
    seen = []

    @schedule("seeing")
    def seeing(pipe: Pipeline, rank: int, costs: CostModel) -> Iterator[Action]:
        """Fill and drain."""
        seen.append(costs)
        yield from (forward(rank, m) for m in range(pipe.microbatches))
        yield from (backward(rank, m) for m in range(pipe.microbatches))
        yield optim_step(rank)

    costs = CostModel(latency=0.25)
    found = schedir.search(3, 5, costs=costs, seconds=0.1)
    schedir.compare([found, seeing], costs=costs)
    assert set(seen) == {costs}


def test_the_command(run: Run) -> None:
    COSTS.save("costs.json")
    shape = ["--ranks", "4", "--microbatches", "8"]
    limit = ["--costs", "costs.json", "--memory-limit", "100"]
    out = ["-o", "found.sched"]
    assert run("search", *shape, "--chunks", "2", *limit, "--seconds", "0.2", *out)[0] == 0
    table = run.prints("compare", "found.sched", *BESIDE, *shape, *limit)
    assert "found.sched" in table
    assert "1 schedule over it" in table
