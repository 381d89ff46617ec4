"""Every pass over lists in which stages have replicas: valid in, valid out.

The oracle runs what comes out, so that no pass is judged by the check alone. Some replicas have no
microbatch at all: they still sum and step with the others.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import CHANNELS, Action, Kind, Schedule
from schedir.passes import (
    advance_receives,
    append_steps,
    batch_communication,
    forward_only,
    insert_communication,
    insert_reductions,
    recompute,
)
from tests.oracle import happens
from tests.sweeps import examples
from tests.test_random import drawn

SEEDS = st.integers(0, 1 << 32)
STAGE_WIDE = (Kind.REDUCE_GRAD, Kind.OPTIM_STEP)


def replicated(chance: random.Random) -> Schedule:
    """A right compute-only schedule some of whose stages are on several ranks."""
    while True:
        schedule = drawn(chance)
        if any(len(held) > 1 for held in schedule.placement):
            return schedule


def without(schedule: Schedule, *kinds: Kind) -> Schedule:
    lists = [[a for a in actions if a.kind not in kinds] for actions in schedule.flat]
    return Schedule(schedule.name, schedule.microbatches, schedule.placement, lists)


def assert_right(schedule: Schedule, seed: int) -> None:
    report = schedir.check(schedule)
    assert report.ok, (report.errors, schedir.dumps(schedule))
    assert happens(report.schedule or schedule, "rank", seed) == "completes"


def steps_of(schedule: Schedule, rank: int) -> list[Action]:
    """What ends a synchronous step on a rank, by the rules."""
    held = schedule.stages_of(rank)
    sums = [schedir.reduce_grad(s) for s in held if len(schedule.placement[s]) > 1]
    return sums + [schedir.optim_step(s) for s in held]


@examples(40)
@given(SEEDS)
def test_steps_are_appended_with_the_sums_of_all_replicas(seed: int) -> None:
    bare = without(replicated(random.Random(seed)), *STAGE_WIDE)
    for schedule in (bare, insert_communication(bare)):
        found = append_steps(schedule)
        for rank, (actions, listed) in enumerate(zip(found.flat, schedule.flat, strict=True)):
            assert list(actions) == [*listed, *steps_of(schedule, rank)]
        assert append_steps(found) == found
        assert append_steps(without(found, Kind.OPTIM_STEP)).flat == found.flat
        assert_right(insert_communication(found), seed)


PASSES: dict[str, Callable[[Schedule], Schedule]] = {
    "recompute": lambda schedule: recompute(schedule, range(schedule.stages)),
    "batch_communication": batch_communication,
    "insert_reductions": insert_reductions,
    "advance_receives": lambda schedule: advance_receives(schedule, "rank", 3),
    "advance_receives, async": lambda schedule: advance_receives(schedule, "async", 3),
}


@pytest.mark.parametrize("name", PASSES)
@examples(40)
@given(seed=SEEDS)
def test_what_is_right_stays_right(name: str, seed: int) -> None:
    complete = insert_communication(replicated(random.Random(seed)))
    found = PASSES[name](complete)
    report = schedir.check(found, "async")
    assert report.ok, (report.errors, schedir.dumps(found))
    assert set(report.clean_channels) == set(CHANNELS) or "async" in name
    assert happens(found, "async", seed) == "completes"
    # No replica's work goes elsewhere, and only what the pass is for is added.
    added: Counter[Action] = Counter()
    for actions, listed in zip(found.flat, complete.flat, strict=True):
        assert not Counter(listed) - Counter(actions)
        added += Counter(actions) - Counter(listed)
    adds = {"recompute": {Kind.RECOMPUTE}, "insert_reductions": {Kind.REDUCE_GRAD}}
    assert {a.kind for a in added} <= adds.get(name, set())


@examples(40)
@given(SEEDS)
def test_forwards_alone(seed: int) -> None:
    complete = insert_communication(replicated(random.Random(seed)))
    forwards = forward_only(complete)
    for actions, listed in zip(forwards.flat, complete.flat, strict=True):
        kept = [a for a in listed if a.kind in (Kind.FORWARD, Kind.SEND_ACT, Kind.RECV_ACT)]
        assert [*map(str, actions)] == [str(a).partition("@")[0] for a in kept]


@examples(40)
@given(SEEDS)
def test_every_replica_gets_its_sum(seed: int) -> None:
    """Also one that runs no microbatch: the others wait for it."""
    bare = insert_communication(without(replicated(random.Random(seed)), *STAGE_WIDE))
    found = insert_reductions(bare)
    assert_right(found, seed)
    for rank, actions in enumerate(found.flat):
        for stage in found.stages_of(rank):
            assert actions.count(schedir.reduce_grad(stage)) == 1
