"""The exact optimum: what trying every order finds, where that can be done."""

from __future__ import annotations

import random
import sys
from typing import Any, get_args

import pytest

import schedir
from schedir import CostModel, SchedirError
from schedir.finder import exact
from schedir.finder.terms import Objective
from tests.command_line import Run
from tests.finder.brute_force import Small, least
from tests.finder.test_bounds import lower_bound
from tests.sweeps import sweep

TEXTBOOK = CostModel()


def drawn(seed: int, stages: int) -> CostModel:
    """Costs of every kind, by stage."""
    chance = random.Random(seed)

    def times(low: int = 1) -> tuple[int, ...]:
        return tuple(chance.randint(low, 5) for _ in range(stages))

    names = ("forward", "backward", "backward_input", "backward_weight", "recompute")
    each: Any = {name: times() for name in names}
    return CostModel(
        **each,
        optim_step=times(0),
        latency=chance.choice((0, 0.5, 2)),
        boundary_bytes=chance.choice((0, 3)),
        bandwidth=chance.choice((1, 2)),
    )


# A gradient has to wait for an output that was made before it.
QUEUED = CostModel(
    forward=(1, 2, 1, 4), backward=(3, 2, 3, 4), boundary_bytes=(6, 0, 0), bandwidth=1
)
WORK = [
    Small((0, 1), 2, TEXTBOOK),
    Small((0, 1), 3, drawn(1, 2), split=False),
    Small((0, 1), 3, drawn(2, 2), split=False, most=2),
    Small((0, 1), 2, drawn(3, 2)),
    Small((0, 1), 2, drawn(4, 2)),
    Small((0, 1), 2, drawn(5, 2), most=1),
    Small((0, 1), 2, drawn(6, 2), recompute=True, most=1),
    Small((0, 1), 2, drawn(15, 2), most=1, until="I"),
    Small((0, 1), 2, drawn(16, 2), recompute=True, most=1, until="I"),
    Small((0, 1, 2), 2, drawn(7, 3), split=False, most=2),
    Small((0, 1, 2), 2, drawn(8, 3), most=1),
    Small((0, 1, 1, 0), 1, drawn(9, 4)),
    Small((0, 1, 1, 0), 2, drawn(10, 4), split=False),
    Small((0, 1, 1, 0), 2, drawn(11, 4), split=False, most=2),
    Small((0, 1, 0, 1), 2, drawn(12, 4), split=False, most=3),
    Small((0, 1, 0, 1), 2, QUEUED, split=False),
    Small((0, 0), 2, drawn(13, 2), most=2),
    Small((0, 0), 2, drawn(14, 2), split=False, recompute=True, most=1),
]


@sweep("work", WORK, quick=WORK[::2])
def test_it_is_what_trying_every_order_finds(work: Small) -> None:
    expected = least(work)
    assert expected is not None
    ranks = 1 + max(work.placement)
    allowed: dict[str, Any] = {"split": work.split, "recompute": work.recompute}
    allowed |= {"max_activations": work.most, "held_until": work.until}
    for objective, best in zip(get_args(Objective), expected, strict=True):
        chunks = len(work.placement) // ranks
        placement = "wave" if work.placement[1:3] == (1, 1) else "wrapped"
        asked: dict[str, Any] = {"costs": work.costs, "objective": objective, **allowed}
        found = exact(ranks, work.microbatches, chunks, placement=placement, **asked)
        assert found.placement == tuple((rank,) for rank in work.placement)
        line = schedir.simulate(found, work.costs)
        value = line.makespan if objective == "makespan" else max(r.span for r in line.ranks)
        assert value == best
        if work.until == "W" and work.most is not None:
            assert max(rank.peak_activations for rank in line.ranks) <= work.most
        assert lower_bound(work.placement, work.microbatches, **asked) <= best


def test_nothing_fits() -> None:
    work = Small((0, 0), 1, TEXTBOOK, most=1)
    assert least(work) is None
    with pytest.raises(SchedirError, match="no schedule of this work is within the limit"):
        exact(1, 1, 2, max_activations=1)
    weights = CostModel(weight_bytes=(5, 0, 5, 0))  # on one rank if the placement is wrapped
    assert exact(2, 1, 2, costs=weights, memory_limit=5).placement == ((0,), (1,), (1,), (0,))
    with pytest.raises(SchedirError, match="no schedule of this work is within the limit"):
        exact(2, 1, 2, costs=weights, memory_limit=4)


@pytest.mark.parametrize(("limit", "like"), [(45, 3), (35, 2), (25, 1)])
def test_bytes_limit_it(limit: int, like: int) -> None:
    """Weights, optimiser state and gradients take 15, each activation 10."""
    costs = CostModel(activation_bytes=10, weight_bytes=5, optimizer_bytes=6, gradient_bytes=4)
    found = exact(2, 4, costs=costs, memory_limit=limit, recompute=False)
    line = schedir.simulate(found, costs)
    assert max(rank.peak_bytes or 0 for rank in line.ranks) <= limit
    assert line.makespan == schedir.simulate(exact(2, 4, max_activations=like)).makespan


def test_a_stage_that_has_no_gradients_yet_may_hold_more() -> None:
    costs = CostModel(activation_bytes=10, gradient_bytes=4)
    line = schedir.simulate(exact(2, 4, costs=costs, memory_limit=23, recompute=False), costs)
    assert max(rank.peak_activations for rank in line.ranks) == 2
    assert max(rank.peak_bytes or 0 for rank in line.ranks) <= 23


def test_forwards_run_again_within_a_limit_in_bytes() -> None:
    """Two activations, or one and four inputs, which is quicker than one activation at a time."""
    costs = CostModel(activation_bytes=10, input_bytes=2)
    again, alone = (
        schedir.simulate(exact(2, 4, costs=costs, memory_limit=18, recompute=may), costs)
        for may in (True, False)
    )
    assert again.makespan < alone.makespan
    assert max(rank.peak_bytes or 0 for rank in again.ranks) <= 18
    bound = lower_bound((0, 1), 4, costs, memory_limit=18, recompute=True)
    assert bound <= again.makespan


def test_the_same_seed_gives_the_same_schedule() -> None:
    one, other = (exact(2, 4, 2, max_activations=5, seed=3) for _ in range(2))
    assert one == other
    assert schedir.check(one).ok


def test_costs_with_many_digits_are_taken_as_fine_as_matters() -> None:
    costs = CostModel(forward=1 / 3, backward=2 / 3, latency=1 / 7)
    found = schedir.simulate(exact(2, 3, costs=costs, split=False), costs)
    assert found.makespan == pytest.approx(4 + 2 / 7, rel=1e-6)


def test_forty_actions_take_seconds() -> None:
    """3 ranks, 2 chunks, 4 microbatches: 21 was the best known by hand, 38 that of the V."""
    equal = CostModel(backward=1)
    allowed: dict[str, Any] = {"costs": equal, "split": False}
    found = exact(3, 4, 2, placement="wrapped", max_activations=6, **allowed)
    assert schedir.simulate(found, equal).makespan == 20
    found = exact(4, 8, 2, placement="v", max_activations=8, **allowed)
    assert schedir.simulate(found, equal).makespan == 38


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1, not 0"),
        ({"placement": "ring"}, "placement must be wrapped or wave or v, not 'ring'"),
        ({"channel": "wire"}, "wire"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact(**{"ranks": 2, "microbatches": 2, **arguments})


def test_the_command(run: Run) -> None:
    shape = ["--ranks", "3", "--microbatches", "4", "--chunks", "2", "--placement", "wrapped"]
    limits = ["--max-activations", "6", "--no-split", "--cost", "backward=1"]
    code, out, err = run("search", "--exact", *shape, *limits)
    assert code == 0
    assert schedir.simulate(schedir.loads(out), CostModel(backward=1)).makespan == 20
    assert "lower bound of the makespan 20: none can be quicker" in err
    assert "no schedule of this work is within the limit" in run.refuses(
        "search", "--exact", *shape, "--max-activations", "1"
    )


def test_what_it_can_not_solve_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SchedirError, match="backward_weight costs nothing on some stage"):
        exact(2, 2, costs=CostModel(backward_weight=(1, 0)))
    with pytest.raises(SchedirError, match="seconds were too few: the best"):
        exact(4, 8, 2, max_activations=7, recompute=True, seconds=0.01)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(SchedirError, match=r"not installed: pip install 'schedir\[exact\]'"):
        exact(2, 2)
