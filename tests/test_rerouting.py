"""Schedules without a lost rank: the figures of ReCycle's paper, and that no work is lost."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import recurrence_of
from torch import nn

import schedir
from schedir import CHANNELS, Action, Kind, Schedule, Timeline
from schedir.passes import strip_communication
from tests import test_replicas as replicas
from tests.oracle import happens
from tests.runtime.kit import Twins, adamw, linear_stages, random_batches
from tests.sweeps import examples, is_quick

SPLIT = {"split": True}


@cache
def three_pipelines() -> Schedule:
    """The example of the paper: three pipelines of 4 ranks, 6 microbatches each. Rank 3 s + p is
    stage s of pipeline p."""
    schedule = schedir.build("1f1b-rr", ranks=12, microbatches=18, replicas="3,3,3,3")
    assert schedule.placement == tuple((3 * s, 3 * s + 1, 3 * s + 2) for s in range(4))
    return schedule


def simulated(rank: int, **options: Any) -> Timeline:
    return schedir.simulate(schedir.without(three_pipelines(), rank, **options))


def again_and_again(schedule: Schedule, times: int) -> Schedule:
    """The lists of so many steps in a row: each rank begins the next as soon as it can."""
    each = schedule.microbatches

    def later(a: Action, n: int) -> Action:
        return a if a.microbatch is None else Action(a.kind, a.stage, a.microbatch + n * each)

    lists = [
        [later(a, n) for n in range(times) for a in actions]
        for actions in strip_communication(schedule).flat
    ]
    longer = Schedule(schedule.name, times * each, schedule.placement, lists)
    return schedir.insert_communication(longer)


def test_27_slots_without_a_fault() -> None:
    assert schedir.simulate(three_pipelines()).makespan == 3 * (6 + 3) == 27


def test_36_slots_where_peers_take_its_microbatches_over() -> None:
    """The paper's 36 are those of 1F1B for 9 microbatches, and of a lost last stage here. Other
    stages find gaps."""
    assert [simulated(rank).makespan for rank in range(12)] == [
        *(31, 32, 31),
        *(33, 33, 33),
        *(34, 35, 34),
        *(36, 36, 36),
    ]


def test_29_slots_with_decoupled_backwards() -> None:
    """The least there can be: both peers of stage s have 9 x 3 slots of work, and begin at s. So
    the paper's 29 are those of stage 2."""
    for rank in range(12):
        stage = rank // 3
        assert simulated(rank, **SPLIT).makespan == 27 + stage
    assert simulated(7, **SPLIT).makespan == 29


def test_27_slots_with_staggered_steps() -> None:
    """The time from one step to the next, as no rank waits for the updates of other stages: the
    longest span of a rank, and the period of the lists in a row."""
    for rank in range(0, 12, 3):
        line = simulated(rank, **SPLIT)
        assert max(each.span for each in line.ranks) == 27
        repeated = again_and_again(line.schedule, 6)
        assert schedir.check(repeated).ok
        assert schedir.simulate(repeated).makespan == line.makespan + 5 * 27
        steady = schedir.steady_state(repeated)
        assert steady is not None
        assert (steady.period, steady.period_microbatches) == (27, 18)
    whole = again_and_again(schedir.without(three_pipelines(), 7), 6)
    assert schedir.simulate(whole).makespan == 6 * 35  # whole backwards leave no such gap


def peak(line: Timeline) -> int:
    return max(each.peak_activations for each in line.ranks)


def test_memory_is_what_it_is_said_to_be() -> None:
    assert peak(simulated(7)) == 4
    for rank in range(12):
        assert peak(simulated(rank)) <= 6
        assert peak(simulated(rank, **SPLIT)) <= 8


@pytest.mark.parametrize(("numbers", "ranks"), [("3,3,3,3", 12), ("4,2,2,2", 10)])
def test_split_holds_at_most_twice_the_activations(numbers: str, ranks: int) -> None:
    """However many microbatches there are."""
    schedule = schedir.build("1f1b-rr", ranks=ranks, microbatches=72, replicas=numbers)
    most = 2 * peak(schedir.simulate(schedule))
    for rank in range(ranks):
        assert peak(schedir.simulate(schedir.without(schedule, rank, split=True))) <= most


SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b-rr", {"ranks": 4, "replicas": "2,2"}),
    ("1f1b-rr", {"ranks": 6, "replicas": "3,1,2"}),
    ("1f1b-rr", {"ranks": 6, "replicas": "2,2,2", "flush": False}),
    ("1f1b-rr", {"ranks": 9, "replicas": "3,3,3"}),
    *((name, {"ranks": ranks}) for name in ("chimera", "dualpipe") for ranks in (4, 6)),
]


@st.composite
def losses(draw: st.DrawFn) -> tuple[Schedule, int]:
    """A built-in schedule with replicas, and a rank whose stages have other holders."""
    name, shape = draw(st.sampled_from(SHAPES))
    least = 2 * shape["ranks"] if name == "dualpipe" else 1
    microbatches = least + 2 * draw(st.integers(0, 2 if is_quick() else 6))
    schedule = schedir.build(name, microbatches=microbatches, **shape)
    shared = [
        rank
        for rank in range(schedule.ranks)
        if all(len(schedule.placement[s]) > 1 for s in schedule.stages_of(rank))
    ]
    return schedule, draw(st.sampled_from(shared))


def work(schedule: Schedule) -> Counter[tuple[str, int, int | None]]:
    """How often each stage runs forwards, and completes gradients, for each microbatch."""
    names = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_WEIGHT: "B"}
    every = (a for a in chain(*schedule.flat) if a.kind in names)
    return Counter((names[a.kind], a.stage, a.microbatch) for a in every)


def reads(schedule: Schedule) -> list[list[int]]:
    """By stage and microbatch, the version of the weights."""
    found, microbatches = recurrence_of(schedule).reads, range(schedule.microbatches)
    return [[found(s, m) for m in microbatches] for s in range(schedule.stages)]


def applied(schedule: Schedule) -> list[list[list[int]]]:
    """By stage and update, the microbatches whose gradients it applies, over all ranks."""
    return [[sorted(chain(*parts)) for parts in own] for own in recurrence_of(schedule).updates]


@examples(40)
@given(losses(), st.booleans(), st.integers(0, 1 << 32))
def test_nothing_is_lost(lost: tuple[Schedule, int], split: bool, seed: int) -> None:
    schedule, rank = lost
    split = split and not schedule.is_asynchronous
    found = schedir.without(schedule, rank, split=split)
    report = schedir.check(found)
    assert report.ok, (report.errors, schedir.dumps(found))
    assert set(report.clean_channels) == set(CHANNELS)
    assert happens(found, "rank", seed) == "completes"
    pairs = {(s, m) for s in range(schedule.stages) for m in range(schedule.microbatches)}
    assert work(found) == Counter((what, *pair) for what in "FB" for pair in pairs)
    others = [r for r in range(schedule.ranks) if r != rank]
    assert found.ranks == len(others)
    for now, before in zip(found.placement, schedule.placement, strict=True):
        assert [others[r] for r in now] == [r for r in before if r != rank]
    # The same versions are read, and the same gradients applied together.
    assert reads(found) == reads(schedule)
    assert applied(found) == applied(schedule)
    # What the other ranks ran stays with them.
    for own, rank in zip(found.flat, others, strict=True):
        assert {a for a in schedule.flat[rank] if a.kind is Kind.FORWARD} <= {*own}


@examples(60)
@given(st.integers(0, 1 << 32))
def test_any_schedule_goes_on(seed: int) -> None:
    """Drawn lists, of several stages a rank in any order."""
    chance = random.Random(seed)
    schedule = replicas.replicated(chance)
    rank = chance.randrange(schedule.ranks)
    if any(len(schedule.placement[s]) == 1 for s in schedule.stages_of(rank)):
        with pytest.raises(schedir.LoadError, match="can't go on without rank"):
            schedir.without(schedule, rank)
        return
    for split in (False, True):
        if split:
            schedule = replicas.without(schedule, Kind.RECOMPUTE)
        found = schedir.without(schedule, rank, split=split)
        assert schedir.check(found).ok, schedir.dumps(found)
        assert happens(found, "rank", seed) == "completes"
        assert work(found) == work(schedule)


def test_an_update_comes_before_what_begins_at_its_time() -> None:
    """Though the lost rank had less to do between the sum and its next forward."""
    schedule = Schedule.of(
        "rounds",
        [[0, 1], 1, 1],
        [
            "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP 0F2 0B2 0REDUCE_GRAD 0OPTIM_STEP",
            "0F1 1F1 2F1 2B1 1B1 0B1 1F0 2F0 2B0 1B0 0REDUCE_GRAD 1OPTIM_STEP 2OPTIM_STEP "
            "0OPTIM_STEP 1F2 2F2 2B2 1B2 1OPTIM_STEP 2OPTIM_STEP 0REDUCE_GRAD 0OPTIM_STEP",
        ],
    )
    assert schedir.check(schedule).ok
    assert reads(schedir.without(schedule, 0)) == [[0, 0, 1]] * 3


def close(mine: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


@examples(15)
@given(losses(), st.booleans())
def test_it_trains_the_same_weights(lost: tuple[Schedule, int], split: bool) -> None:
    """Bit for bit those that its own lists stand for, and up to rounding those of the schedule
    before the loss, whose gradients are added in another order."""
    schedule, rank = lost
    found = schedir.without(schedule, rank, split=split and not schedule.is_asynchronous)
    stages = linear_stages(schedule.stages)
    before, after = (Twins(stages, each, None, adamw) for each in (schedule, found))
    with before.executor() as first, after.executor() as second:
        for batch in random_batches(2, 2 * schedule.microbatches):
            loss = first.step(batch[0], target=batch[1]).loss
            assert second.step(batch[0], target=batch[1]).loss == pytest.approx(loss, rel=1e-4)
            after.step(batch, recurrence=recurrence_of(found))
    after.assert_equal()
    assert all(close(after.local[s], before.local[s]) for s in range(schedule.stages))


def test_overlapped_pairs_and_copies_go_along() -> None:
    """A pair whose parts one peer takes over stays one; an activation is copied where it is."""
    schedule = schedir.build("dualpipe", ranks=4, microbatches=8)
    pairs, kept = (
        {str(a) for a in chain(*each.actions) if not isinstance(a, Action)}
        for each in (schedule, schedir.without(schedule, 0))
    )
    assert pairs == kept != set()
    offloaded = schedir.offload(three_pipelines(), [0])
    again = schedir.recompute(three_pipelines(), [0, 1])
    for each in (offloaded, again):
        smaller = schedir.without(each, 1)
        assert schedir.check(smaller).ok
        kinds = [Counter(a.kind for a in chain(*s.flat)) for s in (each, smaller)]
        for kind in (Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD):
            assert kinds[0][kind] == kinds[1][kind]
        with pytest.raises(ValueError, match=r"1f1b-rr can't be split: only a schedule with"):
            schedir.without(each, 1, split=True)


def test_one_rank_after_the_other() -> None:
    schedule = three_pipelines()
    for _ in range(2):
        schedule = schedir.without(schedule, 0, split=True)
    assert schedule.placement[0] == (0,)
    assert schedir.check(schedule).ok
    assert schedir.reduce_grad(0) not in chain(*schedule.flat)


def test_what_cannot_go_on() -> None:
    alone = r"1f1b can't go on without rank 2: no other rank holds stage 2; build .* for 3 ranks"
    with pytest.raises(schedir.LoadError, match=alone):
        schedir.without(schedir.build("1f1b", ranks=4, microbatches=8), 2)
    for rank in (12, -1, "1"):
        with pytest.raises(ValueError, match=r"1f1b-rr has no rank .*, only 0\.\.11"):
            schedir.without(three_pipelines(), rank)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="schedule must be a Schedule"):
        schedir.without("1f1b", 0)  # type: ignore[arg-type]
    late = Schedule.of(
        "late",
        [[0, 1]],
        [
            "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP 0F2 0B2 0REDUCE_GRAD 0OPTIM_STEP",
            "0F1 0B1 0REDUCE_GRAD 0F3@0 0OPTIM_STEP 0B3 0REDUCE_GRAD 0OPTIM_STEP",
        ],
    )
    assert schedir.check(late).ok
    with pytest.raises(schedir.LoadError, match="updates later than it did"):
        schedir.without(late, 0)
