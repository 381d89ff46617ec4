"""The gallery shows every built-in schedule as it is, and its formulas are right."""

from __future__ import annotations

from itertools import product

import pytest
from write_gallery import DOCS, formulas_of, pages

import schedir
from schedir import CostModel, Generator, SchedirError
from schedir.library import built_in
from tests.sweeps import sweep
from tests.test_golden import compare

SHAPES = {
    "few": ((2, 3, 4), (1, 2, 5, 8, 10, 12), (2, 3)),
    "many": ((2, 3, 4, 5, 6, 8), (*range(1, 13), 16, 24), (2, 3, 4)),
}
"""Of each, the ranks, microbatches and chunks."""
FEWEST = 6
"""Shapes that a formula has to speak of, so that none holds of nothing."""


def test_the_gallery_is_current(request: pytest.FixtureRequest) -> None:
    found = pages()
    for path, text in found.items():
        compare(DOCS / path, text, request)
    pictures = {f"gallery/{path.name}" for path in (DOCS / "gallery").iterdir()}
    assert {"gallery.md", *pictures} == set(found)


def figures(generator: Generator, ranks: int, microbatches: int, chunks: int) -> dict[str, float]:
    """What the formulas are about, simulated."""
    costs = CostModel()
    built = schedir.build(
        generator, ranks=ranks, microbatches=microbatches, chunks=chunks, costs=costs
    )
    line = schedir.simulate(built)
    peak = max(rank.peak_activations for rank in line.ranks)
    found = {
        "Bubble": line.bubble_fraction,
        "Bubble of the longest span": line.span_bubble_fraction,
        "Memory": peak * ranks / built.stages,
    }
    if built.is_asynchronous:
        steady = schedir.steady_state(generator, costs, ranks=ranks, microbatches=microbatches)
        assert steady is not None
        found["Bubble once full"] = steady.bubble_fraction
    return found


@sweep("shapes", SHAPES, quick=["few"])
@pytest.mark.parametrize("generator", built_in(), ids=lambda generator: generator.name)
def test_the_formulas_are_what_is_simulated(generator: Generator, shapes: str) -> None:
    assert "\n    Choose it" in (generator.function.__doc__ or "")
    formulas = formulas_of(generator)
    assert {"Bubble", "Memory"} <= formulas.keys()
    held = dict.fromkeys(formulas, 0)
    met = dict.fromkeys(formulas, False)
    numbers, batches, chunks = SHAPES[shapes]
    if generator.chunks == 1:
        chunks = (1,)
    for ranks, microbatches, each in product(numbers, batches, chunks):
        try:
            simulated = figures(generator, ranks, microbatches, each)
        except SchedirError:  # a shape that the schedule refuses
            continue
        for name, formula in formulas.items():
            stated = formula.of(ranks, microbatches, each)
            if stated is None or name not in simulated:
                continue
            held[name] += 1
            equal = simulated[name] == pytest.approx(float(stated), abs=1e-9)
            met[name] |= equal
            below = formula.is_bound and simulated[name] <= stated
            where = f"{name} on {ranks} ranks, {microbatches} microbatches, {each} chunks"
            assert equal or below, f"{where} is {simulated[name]}, not {float(stated)}"
    assert all(count >= FEWEST for count in held.values()), held
    assert all(met.values()), "a bound that no shape comes to is too loose"
