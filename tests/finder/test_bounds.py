"""No schedule is quicker than its lower bound, and the best ones known are as quick as that."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import CostModel, SchedirError, Schedule
from schedir.finder import bounds
from schedir.finder.terms import Objective, StageCosts, Task, Terms
from tests.built_in import EVERY, NAMES
from tests.sweeps import examples, sweep

EQUAL = CostModel(backward=1)
"""F = B = 1, in which stages of V placements and wrapped ones are counted."""


def lower_bound(
    placement: Sequence[int],
    microbatches: int,
    costs: CostModel | None = None,
    recompute: bool = False,
    **limits: Any,
) -> float:
    """The bound of stages on any placement."""
    ranks = 1 + max(placement)
    terms = Terms(ranks=ranks, microbatches=microbatches, chunks=1, costs=costs, **limits)
    of_stages, memory = StageCosts.of(placement, terms.costs), terms.memory(placement)
    allowed = terms.objective, terms.split, recompute
    return bounds.lower_bound(Task(microbatches, "any", of_stages, memory, *allowed))


def placement_of(schedule: Schedule) -> list[int] | None:
    """The rank of every stage; None where one has several."""
    alone = [held[0] for held in schedule.placement if len(held) == 1]
    return alone if len(alone) == len(schedule.placement) else None


def kinds(schedule: Schedule) -> set[str]:
    return {action.kind.value for actions in schedule.flat for action in actions}


def built(name: str, ranks: int, microbatches: int) -> Schedule | None:
    try:
        return schedir.build(name, ranks=ranks, microbatches=microbatches)
    except SchedirError:  # it takes other shapes
        return None


def costs_for(stages: int) -> st.SearchStrategy[CostModel]:
    """Costs of all kinds, by stage."""
    times, sizes = (
        st.lists(st.integers(low, 9), min_size=stages, max_size=stages) for low in (0, 1)
    )
    few = st.integers(0, 3)
    of_kinds = ("forward", "backward", "backward_input", "backward_weight", "optim_step")
    return st.builds(
        CostModel,
        **dict.fromkeys(of_kinds, times),
        **dict.fromkeys(("activation_bytes", "input_bytes"), sizes),
        **dict.fromkeys(("weight_bytes", "latency", "boundary_bytes"), few),
        deferred_bytes=st.none() | sizes,
        bandwidth=st.sampled_from((1, 2, float("inf"))),
    )


@sweep("name", EVERY, quick=[*NAMES, "zb-h1", "zbv", "1f1b-rr", "eager-1f1b"])
@examples(12)
@given(data=st.data())
def test_no_built_in_schedule_is_quicker(name: str, data: st.DataObject) -> None:
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    schedule = built(name, ranks, microbatches)
    placement = placement_of(schedule) if schedule else None
    if schedule is None or placement is None:
        return
    costs = data.draw(costs_for(len(placement)))
    line = schedir.simulate(schedule, costs)
    has = kinds(schedule)
    allowed: dict[str, Any] = {"split": "I" in has, "recompute": "R" in has}
    best = {"makespan": line.makespan, "span": max(rank.span for rank in line.ranks)}
    peaks = {  # It keeps its own.
        "max_activations": max(rank.peak_activations for rank in line.ranks),
        "memory_limit": max(rank.peak_bytes or 0 for rank in line.ranks),
    }
    for objective, (limit, most) in product(best, peaks.items()):
        asked = {**allowed, "objective": objective, limit: most}
        found = lower_bound(placement, microbatches, costs, **asked)
        assert found <= (1 + 1e-9) * best[objective]  # sums of floats in another order


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (4, 8), (8, 24)])
def test_one_f_one_b_is_at_its_bound(ranks: int, microbatches: int) -> None:
    costs = CostModel(forward=3, backward=5)
    found = lower_bound(range(ranks), microbatches, costs, split=False, max_activations=ranks)
    assert found == 8 * (microbatches + ranks - 1)
    allowed: dict[str, Any] = {"split": False, "max_activations": ranks}
    longest = lower_bound(range(ranks), microbatches, costs, objective="span", **allowed)
    assert longest == (found if microbatches >= ranks else 8 * ranks)


WRAPPED, V = [0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("placement", "microbatches", "most", "objective", "known"),
    [
        # Of published schedules, by sail-sg's generators: makespan or longest span, limit.
        (range(4), 8, 4, "makespan", 27),  # ZB-H1, ZB-1p
        (range(4), 12, 4, "makespan", 39),
        (range(4), 8, 8, "span", 24),  # ZB-2p
        (V, 8, 8, "span", 48),  # ZBV
        (V, 12, 8, "span", 72),
        (V, 8, 6, "makespan", 53),  # V-half
        (V, 12, 6, "makespan", 77),
        (V, 8, 4, "makespan", 59),  # V-min
        (V, 12, 4, "makespan", 83),
    ],
)
def test_published_schedules_are_at_their_bounds(
    placement: Sequence[int], microbatches: int, most: int, objective: Objective, known: int
) -> None:
    found = lower_bound(placement, microbatches, objective=objective, max_activations=most)
    assert found == known


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        ((8, 24, 18522, 18086, 9337, 601), 0.1585),
        ((8, 32, 18513, 18086, 9331, 626), 0.1242),
        ((8, 64, 18546, 18097, 9321, 762), 0.0674),
        ((16, 48, 11347, 11248, 8132, 377), 0.1397),
        ((32, 96, 10419, 10207, 7715, 408), 0.1421),
    ],
)
def test_zb_1p_on_an_a100_is_at_its_bound(shape: tuple[int, ...], published: float) -> None:
    ranks, microbatches, f, i, w, latency = shape
    costs = CostModel(
        forward=f, backward_input=i, backward_weight=w, backward=i + w, latency=latency
    )
    found = lower_bound(range(ranks), microbatches, costs, max_activations=ranks)
    assert round(1 - microbatches * (f + i + w) / found, 4) == published


def test_interleaving_and_what_was_found_by_hand_are_at_their_bounds() -> None:
    assert lower_bound(WRAPPED, 8, split=False) == 57
    # By hand: 21, one above what is proved, and 38, which is the best.
    assert lower_bound([0, 1, 2] * 2, 4, EQUAL, split=False, max_activations=6) == 20
    assert lower_bound(V, 8, EQUAL, split=False, max_activations=8) == 38


def test_memory_makes_a_difference() -> None:
    """One activation at a time: each microbatch goes down all ranks and up again alone."""
    assert lower_bound(range(4), 8, split=False, max_activations=1) == 8 * 12
    in_bytes = CostModel(activation_bytes=10, weight_bytes=5, optimizer_bytes=6)
    assert lower_bound(range(4), 8, in_bytes, split=False, memory_limit=30) == 8 * 12
    assert lower_bound(range(4), 8, in_bytes, split=False, memory_limit=51) == 33
    again = CostModel(activation_bytes=10, input_bytes=1)
    assert lower_bound(range(4), 8, again, split=False, memory_limit=14) == 8 * 12
    assert lower_bound(range(4), 8, again, split=False, recompute=True, memory_limit=14) < 8 * 12


def test_a_channel_is_busy() -> None:
    costs = CostModel(boundary_bytes=5, bandwidth=1)
    # F, then 4 activations one after the other, and after the last one F, B, its gradient, B.
    assert lower_bound([0, 1], 4, costs, split=False) == 1 + 4 * 5 + 1 + 2 + 5 + 2


def test_costs_of_other_stages_are_refused() -> None:
    with pytest.raises(SchedirError, match="forward has 3 numbers, but 2 are needed"):
        lower_bound([0, 1], 4, CostModel(forward=(1, 2, 3)))
    with pytest.raises(SchedirError, match=r"latency has no number for the link \(1, 0\)"):
        lower_bound([0, 1], 4, CostModel(latency={(0, 1): 1}))
