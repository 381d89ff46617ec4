"""insert_reductions: where the sums over data-parallel pipelines stand."""

from __future__ import annotations

import pytest

import schedir
from schedir import CHANNELS, Kind
from schedir.passes import insert_reductions
from tests.built_in import NAMES
from tests.literals import listed
from tests.oracle import happens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 3), (4, 8)])
def test_every_step_has_its_sum_and_the_proof_holds(
    name: str, ranks: int, microbatches: int
) -> None:
    plain = schedir.build(name, ranks=ranks, microbatches=microbatches)
    found = insert_reductions(plain)
    assert insert_reductions(found) == found
    assert schedir.check(found, "host").ok
    for with_sums, without in zip(found.flat, plain.flat, strict=True):
        assert tuple(a for a in with_sums if a.kind is not Kind.REDUCE_GRAD) == without
        open_: set[int] = set()
        for action in with_sums:
            if action.kind is Kind.BACKWARD:
                open_.add(action.stage)
            elif action.kind is Kind.REDUCE_GRAD:
                open_.remove(action.stage)
            elif action.kind is Kind.OPTIM_STEP:
                assert action.stage not in open_
        assert not open_


def test_a_sum_stands_after_what_its_gradient_sends() -> None:
    schedule = listed(
        1,
        "0 1 0",
        "0F0 0SEND_ACT0 2RECV_ACT0 2F0 2W0 2I0 2SEND_GRAD0 0RECV_GRAD0 0B0 2OPTIM_STEP 0OPTIM_STEP",
        "1RECV_ACT0 1F0 1SEND_ACT0 1RECV_GRAD0 1B0 1SEND_GRAD0 1OPTIM_STEP",
    )
    assert " ".join(map(str, insert_reductions(schedule).actions[0])) == (
        "0F0 0SEND_ACT0 2RECV_ACT0 2F0 2W0 2REDUCE_GRAD 2I0 2SEND_GRAD0 0RECV_GRAD0 0B0 "
        "0REDUCE_GRAD 2OPTIM_STEP 0OPTIM_STEP"
    )


def test_without_a_step_the_last_gradient_has_the_sum() -> None:
    schedule = listed(2, "0", "0F0 0B0 0F1 0B1")
    assert " ".join(map(str, insert_reductions(schedule).actions[0])) == (
        "0F0 0B0 0F1 0B1 0REDUCE_GRAD"
    )


def test_a_stage_that_has_sums_is_left_alone() -> None:
    schedule = listed(1, "0 0", "0F0 1F0 1B0 0B0 0REDUCE_GRAD 0OPTIM_STEP 1OPTIM_STEP")
    assert " ".join(map(str, insert_reductions(schedule).actions[0])) == (
        "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD 0OPTIM_STEP 1OPTIM_STEP"
    )


def test_forwards_may_run_while_the_gradients_are_summed() -> None:
    """Rank 0 has nothing to add to the first sum, and goes on beside it."""
    schedule = listed(
        2,
        "0,1",
        "0REDUCE_GRAD 0F1 0OPTIM_STEP 0B1 0REDUCE_GRAD 0OPTIM_STEP",
        "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP 0REDUCE_GRAD 0OPTIM_STEP",
    )
    for channel in CHANNELS:
        assert schedir.check(schedule, channel).ok
        for seed in range(5):
            assert happens(schedule, channel, seed) == "completes"
