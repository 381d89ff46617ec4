"""The page on GPUs: its table is that of today's schedules."""

from __future__ import annotations

import pytest
from write_gpus import GUIDE, Need, need, page

import schedir
from tests.runtime.lists import megatron
from tests.test_golden import compare


def test_the_table_is_current(request: pytest.FixtureRequest) -> None:
    compare(GUIDE, page(), request)
    assert "`1f1b`" in page()


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        # Rank 0 sends to rank 1 and receives from it; each over a communicator of its own.
        ("1f1b", 2, Need(2, 0, 1 * 8 * 9.2)),
        # Rank 1 does so with ranks 0 and 2.
        ("1f1b", 4, Need(4, 0, 2 * 8 * 9.2)),
        # Both ranks hold both stages.
        ("dualpipe", 2, Need(2, 1, 1 * 8 * 9.2)),
    ],
)
def test_a_rank_needs_what_its_list_says(name: str, ranks: int, expected: Need) -> None:
    found = need(schedir.build(name, ranks=ranks, microbatches=2 * ranks))
    assert (found.transfers, found.sums) == (expected.transfers, expected.sums)
    assert found.memory == pytest.approx(expected.memory)


def test_channels_that_go_together_need_one() -> None:
    assert need(megatron(2, 4)).transfers == 1
