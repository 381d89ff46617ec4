"""Which stages' gradients are summed in one process group."""

from __future__ import annotations

import schedir
from schedir.passes import insert_reductions
from schedir.runtime.gradients.reduction import reduction_groups
from tests.literals import listed


def test_stages_of_the_same_ranks_in_the_same_order_share_a_group() -> None:
    schedule = insert_reductions(schedir.build("interleaved-1f1b", ranks=2, microbatches=4))
    assert reduction_groups(schedule) == [(0, 2), (1, 3)]


def replicated(first: str, second: str) -> schedir.Schedule:
    """Two stages on two ranks, which sum as these say."""
    return listed(
        2,
        "0,1 0,1",
        f"0F0 1F0 1B0 0B0 {first} 0OPTIM_STEP 1OPTIM_STEP",
        f"0F1 1F1 1B1 0B1 {second} 0OPTIM_STEP 1OPTIM_STEP",
    )


def test_in_another_order_each_has_its_own() -> None:
    forth, back = "0REDUCE_GRAD 1REDUCE_GRAD", "1REDUCE_GRAD 0REDUCE_GRAD"
    twice, pairs = f"{forth} {forth}", "0REDUCE_GRAD 0REDUCE_GRAD 1REDUCE_GRAD 1REDUCE_GRAD"
    assert schedir.check(replicated(forth, forth)).ok
    for both in (forth, back, twice):
        assert reduction_groups(replicated(both, both)) == [(0, 1)]
    for first, second in ((forth, back), (twice, pairs)):
        assert reduction_groups(replicated(first, second)) == [(0,), (1,)]
