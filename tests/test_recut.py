"""Costs of the same model cut into another number of stages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import CostModel, SchedirError
from schedir.simulator import recut

SUMMED = ("forward", "backward", "backward_input", "backward_weight", "reduce_grad", "optim_step")
KEPT = ("activation_bytes", "weight_bytes", "gradient_bytes", "optimizer_bytes")


def test_fewer_stages_are_sums_and_more_are_shares() -> None:
    costs = CostModel(
        forward=(1, 1, 1, 2),
        backward=(2, 4, 2, 4),
        recompute=(1, 2, 3, 4),
        boundary_bytes=(10, 20, 30),
        input_bytes=(1, 10, 20, 30),
        deferred_bytes=(1, 2, 3, 4),
        latency=7,
        unit="ms",
    )
    two: Any = recut(costs, 2, of=4)
    assert two.forward == (2, 3)
    assert two.backward == (6, 6)
    assert two.recompute == two.deferred_bytes == (3, 7)
    assert two.boundary_bytes == (20,)
    assert two.input_bytes == (1, 20)
    eight: Any = recut(costs, 8, of=4)
    assert eight.forward == (0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1, 1)
    assert eight.boundary_bytes == (10, 10, 20, 20, 30, 30, 30)
    assert eight.input_bytes == (1, 10, 10, 20, 20, 30, 30, 30)
    assert recut(costs, 4, of=2).forward == (1, 1, 1, 2)
    assert [each.unit for each in (two, eight)] == ["ms", "ms"]
    assert [each.latency for each in (two, eight)] == [7, 7]


def test_one_number_is_of_as_many_stages_as_it_is_said_to_be_of() -> None:
    costs = CostModel(weight_bytes=12, boundary_bytes=5)
    assert recut(costs, 4, of=4) == costs
    halves: Any = recut(costs, 8, of=4)
    assert (halves.forward, halves.backward, halves.weight_bytes) == (0.5, 1, 6)
    assert (halves.boundary_bytes, halves.recompute, halves.deferred_bytes) == (5, None, None)
    assert recut(costs, 3, of=4).backward == pytest.approx(8 / 3)
    assert isinstance(recut(costs, 2, of=4).backward, int)


def test_one_number_beside_lists_is_of_each_of_their_stages() -> None:
    mixed = CostModel(forward=(1, 1, 1, 1), weight_bytes=12)
    found: Any = recut(mixed, 2, of=2)
    assert (found.forward, found.backward, found.weight_bytes) == ((2, 2), 4, 24)


def test_one_stage_has_no_boundary() -> None:
    one = recut(CostModel(forward=(1, 2, 3), boundary_bytes=(4, 5), input_bytes=(6, 7, 8)), 1, of=1)
    assert (one.forward, one.boundary_bytes, one.input_bytes) == ((6,), 0, (6,))


def test_neither_a_multiple_of_the_other() -> None:
    with pytest.raises(SchedirError, match="forward is given for 4 stages, which can't be made 6"):
        recut(CostModel(forward=(1, 1, 1, 1)), 6, of=3)


@given(st.data(), st.integers(1, 6), st.integers(1, 4))
def test_the_whole_model_stays_the_same(data: st.DataObject, stages: int, many: int) -> None:
    numbers = st.lists(st.integers(0, 1000), min_size=stages * many, max_size=stages * many)
    drawn: dict[str, Any] = {name: data.draw(numbers) for name in (*SUMMED, *KEPT)}
    costs = CostModel(**drawn)
    fewer = recut(costs, stages, of=1)
    back = recut(fewer, stages * many, of=1)
    for name in (*SUMMED, *KEPT):
        before = getattr(costs, name)
        assert sum(getattr(fewer, name)) == sum(before)
        assert sum(getattr(back, name)) == pytest.approx(sum(before))
