"""What came after PipeDream's own schedule: two weight versions (2BW), and replicated stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import schedir
from schedir import CostModel, Kind, LoadError, plan_replicas
from schedir.checker.memory import delays
from schedir.graph.compile import graph_of
from schedir.passes import strip_communication
from tests.oracle import happens
from tests.runtime.kit import Twins, momentum, random_batches
from tests.runtime.on_ranks import on_ranks
from tests.runtime.recurrences import pipedream_2bw, round_robin
from tests.sweeps import long, sweep

WIDE = {Kind.REDUCE_GRAD: "SUM", Kind.OPTIM_STEP: "OPT"}


def orders(schedule: schedir.Schedule) -> list[str]:
    """Each rank's compute, as papers write it where a rank has one stage."""
    found = []
    for actions in strip_communication(schedule).flat:
        words = []
        for a in actions:
            at = "" if a.version is None else f"@{a.version}"
            words.append(WIDE.get(a.kind) or f"{a.kind}{a.microbatch}{at}")
        found.append(" ".join(words))
    return found


# PipeDream-2BW.


def test_2bw_is_as_published() -> None:
    """Two ranks and two microbatches a batch."""
    assert orders(schedir.build("pipedream-2bw", ranks=2, microbatches=6)) == [
        "F0@0 F1@0 B0 F2@0 B1 OPT F3@0 B2 F4@1 B3 OPT F5@1 B4 B5 OPT",
        "F0@0 B0 F1@0 B1 OPT F2@0 B2 F3@0 B3 OPT F4@1 B4 F5@1 B5 OPT",
    ]


@sweep("ranks", range(1, 7), quick=[1, 3])
def test_2bw_keeps_two_versions_and_is_one_update_late(ranks: int) -> None:
    for microbatches, size in product(range(1, 13), range(max(1, ranks - 1), 9)):
        shape = {"ranks": ranks, "microbatches": microbatches}
        built = schedir.build("2bw", **shape, gradient_accumulation=size)
        report = schedir.check(built, max_versions=2, max_delay=1)
        assert report.diagnostics == (), (microbatches, size)
        for m in range(microbatches):
            versions = graph_of(built).reads[:, m].tolist()
            assert versions == [max(0, m // size - 1)] * ranks
        steps = [a for actions in built.flat for a in actions if a.kind is Kind.OPTIM_STEP]
        assert len(steps) == -(-microbatches // size) * ranks


@pytest.mark.parametrize(
    ("ranks", "microbatches", "size"), [(4, 8, 4), (4, 6, 6), (2, 9, 3), (3, 7, 7), (4, 2, 2)]
)
def test_2bw_takes_batches_that_divide(ranks: int, microbatches: int, size: int) -> None:
    shape = {"ranks": ranks, "microbatches": microbatches}
    wanted = schedir.build("2bw", **shape, gradient_accumulation=max(size, ranks - 1))
    assert schedir.build("2bw", **shape).actions == wanted.actions


@pytest.mark.parametrize("size", [0, 2, "3", True])
def test_2bw_refuses_batches_that_need_more_versions(size: Any) -> None:
    with pytest.raises(LoadError, match="gradient_accumulation must be an int >= 3, as 4 ranks"):
        schedir.build("2bw", ranks=4, microbatches=8, gradient_accumulation=size)


def train_2bw(ranks: int, microbatches: int, size: int, rank: int | None) -> None:
    """On a rank, or all in this process: bit for bit as the recurrence says."""
    shape = {"ranks": ranks, "microbatches": microbatches}
    schedule = schedir.build("2bw", **shape, gradient_accumulation=size)
    torch.manual_seed(3)
    whole: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(ranks)]
    twins = Twins(whole, schedule, rank, momentum)
    with twins.executor() as executor:
        for x, y in random_batches(3, 2 * microbatches + 1):  # one microbatch is larger
            found = executor.step(x, target=y).loss
            recurrence = pipedream_2bw(ranks, microbatches, size)
            assert found == twins.step((x, y), recurrence=recurrence)
    twins.assert_equal()


@pytest.mark.parametrize(
    ("ranks", "microbatches", "size"), [(1, 3, 1), (2, 6, 2), (2, 7, 3), (3, 12, 3), (4, 11, 4)]
)
def test_2bw_trains_as_its_recurrence_in_one_process(
    ranks: int, microbatches: int, size: int
) -> None:
    train_2bw(ranks, microbatches, size, None)


@on_ranks(2)
def test_2bw_trains_as_its_recurrence_on_two_ranks(rank: int) -> None:
    train_2bw(2, 7, 3, rank)


@long
@on_ranks(4)
def test_2bw_trains_as_its_recurrence_on_four_ranks(rank: int) -> None:
    train_2bw(4, 11, 4, rank)


# 1F1B-RR.


def shares(ranks: int, stages: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every way to share ranks out among stages."""
    if not ranks:
        yield ()
    for first in range(1, ranks + 1):
        for rest in shares(ranks - first):
            if stages is None or len(rest) == stages - 1:
                yield first, *rest


def built(replicas: Sequence[int], microbatches: int, flush: bool) -> schedir.Schedule:
    shape = {"ranks": sum(replicas), "microbatches": microbatches}
    return schedir.build("1f1b-rr", **shape, replicas=",".join(map(str, replicas)), flush=flush)


def test_1f1b_rr_is_as_published() -> None:
    """Two replicas of the first stage, in the paper's figure 8."""
    assert orders(built((2, 1), 6, flush=False)) == [
        "F0 F2 B0 SUM OPT F4 B2 SUM OPT B4 SUM OPT",
        "F1 F3 B1 SUM OPT F5 B3 SUM OPT B5 SUM OPT",
        "F0 B0 OPT F1 B1 OPT F2 B2 OPT F3 B3 OPT F4 B4 OPT F5 B5 OPT",
    ]
    plain = schedir.build("pipedream", ranks=4, microbatches=6)
    assert built((1, 1, 1, 1), 6, flush=False).actions == plain.actions
    synchronous = schedir.build("1f1b", ranks=4, microbatches=6)
    assert built((1, 1, 1, 1), 6, flush=True).actions == synchronous.actions


@sweep(
    "replicas",
    [each for ranks in range(1, 5) for each in shares(ranks)],
    quick=lambda replicas: sum(replicas) <= 3,
)
def test_1f1b_rr_is_clean_and_late_by_what_is_in_flight(replicas: tuple[int, ...]) -> None:
    for microbatches, flush in product(range(1, 8), (True, False)):
        schedule = built(replicas, microbatches, flush)
        report = schedir.check(schedule)
        assert report.ok
        assert {d.code for d in report.diagnostics} <= {"S216", "S406"}
        if microbatches * len(replicas) <= 6:
            assert happens(schedule, "rank") == "completes"
        for stage, own in enumerate(replicas):
            in_flight = -(-sum(replicas[stage:]) // own)
            versions = [max(0, m // own - in_flight + 1) for m in range(microbatches)]
            late = min(in_flight, -(-microbatches // own)) - 1
            read = graph_of(schedule).reads[stage].tolist()
            assert read == ([0] * microbatches if flush else versions)
            assert delays(schedule)[stage].max() == (0 if flush else late)


@pytest.mark.parametrize("replicas", ["2,1", "2,2,1", "0,4", "4,", "four", "-1,5", True])
def test_1f1b_rr_refuses_replicas_that_do_not_add_up(replicas: Any) -> None:
    with pytest.raises(LoadError, match="as in 2,1, that add up to 4 ranks, not"):
        schedir.build("1f1b-rr", ranks=4, microbatches=8, replicas=replicas)


def test_1f1b_rr_has_one_stage_on_a_rank() -> None:
    with pytest.raises(LoadError, match="one stage on each rank: leave chunks out"):
        schedir.build("1f1b-rr", ranks=4, microbatches=8, chunks=2)


def train_round_robin(replicas: tuple[int, ...], microbatches: int, rank: int | None) -> None:
    """On a rank, or all in this process: as the recurrence says, and bit for bit where no order of
    a sum is the transport's."""
    schedule = built(replicas, microbatches, flush=False)
    torch.manual_seed(3)
    whole: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in replicas]
    twins = Twins(whole, schedule, rank, momentum)
    with twins.executor() as executor:
        # One microbatch is larger, where no stage updates after a part of the loss stage's.
        larger = replicas[-1] <= min(replicas)
        for batch in random_batches(2, 2 * microbatches + larger):
            x, y = (tensor.double() for tensor in batch)
            found = executor.step(x, target=y).loss
            expected = twins.step((x, y), recurrence=round_robin(replicas, microbatches))
            assert found == pytest.approx(expected, rel=1e-14)
    if max(replicas) <= 2:
        twins.assert_equal()
    for stage, module in twins.local.items():
        for mine, theirs in zip(module.parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (2, 2), (2, 1, 1), (3, 1), (1, 3), (3, 2)])
def test_1f1b_rr_trains_as_its_recurrence_in_one_process(replicas: tuple[int, ...]) -> None:
    train_round_robin(replicas, 7, None)


@on_ranks(2)
@sweep("replicas", [(2,), (1, 1)], quick=[(2,)])
def test_1f1b_rr_trains_as_its_recurrence_on_two_ranks(
    rank: int, replicas: tuple[int, ...]
) -> None:
    train_round_robin(replicas, 5, rank)


@long
@on_ranks(4)
@pytest.mark.parametrize("replicas", [(2, 2), (1, 2, 1), (3, 1), (1, 3)])
def test_1f1b_rr_trains_as_its_recurrence_on_four_ranks(
    rank: int, replicas: tuple[int, ...]
) -> None:
    train_round_robin(replicas, 7, rank)


# PipeDream's planner.


def period_of(costs: Sequence[Sequence[int]], boundary: int, replicas: Sequence[int]) -> float:
    """Of whatever takes longest; costs are the stages' forwards, backwards, steps and sums."""
    each = zip(replicas, *costs, strict=True)
    stages = [float(f + b + o + (a if r > 1 else 0)) / r for r, f, b, o, a in each]
    slowest: float = max([*stages, boundary / 2 if len(stages) > 1 else 0.0])
    return slowest


@given(st.data())
def test_no_other_plan_is_better(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 7))
    stages = data.draw(st.integers(1, ranks))

    numbers = st.lists(st.integers(0, 9), min_size=stages, max_size=stages).map(tuple)
    drawn = [data.draw(numbers) for _ in range(4)]
    boundary = data.draw(st.integers(0, 20))
    names = ("forward", "backward", "optim_step", "reduce_grad")
    by_stage: dict[str, Any] = dict(zip(names, drawn, strict=True))
    costs = CostModel(**by_stage, boundary_bytes=boundary, bandwidth=2)
    plan = plan_replicas(costs, ranks)
    least = min(period_of(drawn, boundary, replicas) for replicas in shares(ranks, stages))
    assert plan.period == period_of(drawn, boundary, plan.replicas) == least
    best = [each for each in shares(ranks, stages) if period_of(drawn, boundary, each) == least]
    assert plan.replicas == max(best)
    assert plan.throughput == (1 / least if least else math.inf)


def test_the_planned_period_is_never_beaten_and_often_met() -> None:
    """By the makespan of more and more microbatches, once the pipeline is full."""
    met = []
    for forward in [(2, 1), (1, 3), (3, 1, 1), (1, 1, 1), (1, 4, 2), (5, 1)]:
        costs = CostModel(forward=forward, backward=tuple(2 * cost for cost in forward))
        for ranks in range(len(forward), 6):
            plan = plan_replicas(costs, ranks)
            made = [
                schedir.build("1f1b-rr", ranks=ranks, microbatches=m, costs=costs, flush=False)
                for m in (60, 120)
            ]
            assert [*map(len, made[0].placement)] == [*plan.replicas]
            first, second = (schedir.simulate(each, costs).makespan for each in made)
            assert (second - first) / 60 >= plan.period - 1e-9
            met.append((second - first) / 60 <= plan.period + 1e-9)
    assert sum(met) > 0.7 * len(met)


def test_without_costs_by_stage_there_are_two_equal_ones() -> None:
    for ranks, replicas in ((1, [1]), (2, [1, 1]), (3, [2, 1]), (4, [2, 2]), (7, [4, 3])):
        schedule = schedir.build("1f1b-rr", ranks=ranks, microbatches=4)
        assert [*map(len, schedule.placement)] == replicas


def test_what_can_not_be_planned_is_said() -> None:
    costs = CostModel(forward=(1, 2, 3))
    with pytest.raises(ValueError, match="pass the number of `stages`"):
        plan_replicas(CostModel(), 4)
    with pytest.raises(ValueError, match="3 stages need at least 3 ranks, one each"):
        plan_replicas(costs, 2)
    with pytest.raises(LoadError, match="need at least 3 ranks, one each"):
        schedir.build("1f1b-rr", ranks=2, microbatches=4, costs=costs)
    with pytest.raises(schedir.SchedirError, match="forward has 3 numbers, but 2 are needed"):
        plan_replicas(costs, 4, stages=2)
    # One rank has no link, and its costs may say so.
    assert plan_replicas(CostModel(bandwidth={}), 1, stages=1).replicas == (1,)
