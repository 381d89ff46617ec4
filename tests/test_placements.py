"""The placements that have a name."""

from __future__ import annotations

import pytest

import schedir
from schedir import Pipeline


def ranks_of(place: object, ranks: int, chunks: int) -> list[tuple[int, ...]]:
    assert callable(place)
    return list(place(Pipeline(ranks, 1, chunks, ())))


@pytest.mark.parametrize(
    ("place", "chunks", "expected"),
    [
        (schedir.wrapped, 2, "0 1 2 0 1 2"),
        (schedir.wave, 2, "0 1 2 2 1 0"),
        (schedir.wave, 3, "0 1 2 2 1 0 0 1 2"),
        (schedir.mirrored, 1, "0,2 1 0,2"),
    ],
)
def test_placement_of_three_ranks(place: object, chunks: int, expected: str) -> None:
    written = " ".join(",".join(map(str, held)) for held in ranks_of(place, 3, chunks))
    assert written == expected
