"""Executed schedules equal plain training in one process, bit for bit."""

from __future__ import annotations

from tests.runtime.on_ranks import name_of, on_ranks
from tests.runtime.parity import Case, assert_trains_as_one_process, cases
from tests.sweeps import sweep


@sweep(
    "ranks, case",
    [(ranks, case) for ranks in (1, 2, 3, 4) for case in cases(ranks)],
    quick=lambda drawn: drawn[0] == 2 and drawn[1].microbatches == 5,
    ids=name_of,
)
@on_ranks()
def test_training_equals_one_process(rank: int, ranks: int, case: Case) -> None:
    assert_trains_as_one_process(case, rank)


@sweep(
    "ranks, case",
    [(ranks, case) for ranks in (2, 3, 5) for case in cases(ranks)],
    quick=lambda drawn: drawn[0] == 3 and drawn[1].microbatches in (1, 7),
    ids=str,
)
def test_all_ranks_in_one_process_equal_plain_training(ranks: int, case: Case) -> None:
    assert_trains_as_one_process(case, None)
