"""Hanayo's waves: the bubble published for them, and the memory of 1F1B, in any shape.

A unit of time is that of a stage's forward, of which a rank holds as many as there are chunks.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.timelines import simulated

SHAPES = [*product((1, 2, 3, 4, 6, 8), (2, 3, 4, 8))]
"""Ranks and chunks: one wave, one and a half, two, four."""


def test_bubble_of_one_group() -> None:
    """(2P - 2) / (3PW + P - 1) with W waves at most, where a backward takes twice a forward."""
    for ranks, chunks in SHAPES:
        line = simulated("hanayo", ranks, ranks, chunks=chunks)
        waves = chunks / 2
        published = (2 * ranks - 2) / (3 * ranks * waves + ranks - 1)
        assert line.bubble_fraction <= published + 1e-12, (ranks, chunks)


def test_time_of_whole_groups() -> None:
    for (ranks, chunks), groups in product(SHAPES, (1, 2, 3)):
        line = simulated("hanayo", ranks, groups * ranks, chunks=chunks)
        work = 3 * chunks * groups * ranks
        assert line.makespan == work + 2 * (ranks - 1) * (groups + 1), (ranks, chunks, groups)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_no_shape_exceeds_the_memory_of_1f1b(chunks: int) -> None:
    for ranks, microbatches in product((1, 2, 3, 4, 7), (1, 2, 3, 5, 8, 13)):
        line = simulated("hanayo", ranks, microbatches, chunks=chunks)
        most = max(rank.peak_activations for rank in line.ranks)
        assert most <= chunks * min(ranks, microbatches), (ranks, microbatches)


def test_one_chunk_is_1f1b() -> None:
    """No wave at all: the order that is left is that of the backwards first."""
    for ranks, microbatches in product((1, 2, 3, 4, 6), (1, 2, 4, 7, 12)):
        ours = simulated("hanayo", ranks, microbatches, chunks=1)
        assert ours.makespan == simulated("1f1b", ranks, microbatches).makespan
