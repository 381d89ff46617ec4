"""Random schedules of every shape: what the pass makes of them, and check's verdict on them.

A schedule is drawn as a run: one after the other, some action whose inputs are there is added to
the list of its rank. So its compute is right, whatever the placement (loops, Vs, replicas, stages
side by side). Its communication is inserted by schedir, or scattered anywhere that data allows.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import schedir
from schedir import Action, Kind, Placement, Schedule
from schedir.checker import CHANNELS
from schedir.ir import BACKWARDS
from schedir.passes import strip_communication
from tests.oracle import happens
from tests.test_check import mutate


def drawn(chance: random.Random) -> Schedule:
    """A right compute-only schedule."""
    ranks, stages, microbatches = (chance.randint(1, n) for n in (3, 4, 3))
    placement: Placement = tuple(
        tuple(sorted(chance.sample(range(ranks), chance.choice([1, 1, 1, min(2, ranks)]))))
        for _ in range(stages)
    )
    runs = {(s, m): chance.choice(placement[s]) for s in range(stages) for m in range(microbatches)}
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    backwards = [
        (schedir.backward,),
        (schedir.backward_input, schedir.backward_weight),
        (schedir.recompute_forward, schedir.backward),
        (schedir.recompute_forward, schedir.backward_input, schedir.backward_weight),
    ]
    open_ = {make(s, m) for s, m in runs for make in (schedir.forward, *chance.choice(backwards))}
    while open_:
        ready = [
            a
            for a in sorted(open_, key=str)
            if has_inputs(a, stages, done)
            and not (a.kind in BACKWARDS and Action(Kind.RECOMPUTE, a.stage, a.microbatch) in open_)
        ]
        action = chance.choice(ready)
        open_.remove(action)
        done.add(action)
        lists[runs[action.stage, action.microbatch or 0]].append(action)
    if chance.random() < 0.7:
        for stage, held in enumerate(placement):
            for rank in held:
                if len(held) > 1:
                    lists[rank].append(schedir.reduce_grad(stage))
                lists[rank].append(schedir.optim_step(stage))
    elif any(len(held) > 1 for held in placement):
        for stage, held in enumerate(placement):
            for rank in held:
                lists[rank] += [schedir.reduce_grad(stage)] * (len(held) > 1)
    return Schedule("drawn", microbatches, placement, lists)


def has_inputs(action: Action, stages: int, done: set[Action]) -> bool:
    """Whether an action's inputs are there."""
    stage, m = action.stage, action.microbatch or 0
    if action.kind is Kind.FORWARD:
        return stage == 0 or schedir.forward(stage - 1, m) in done
    if action.kind is Kind.BACKWARD_WEIGHT:
        return schedir.backward_input(stage, m) in done
    if action.kind is Kind.RECOMPUTE:
        return schedir.forward(stage, m) in done
    if stage == stages - 1:
        return schedir.forward(stage, m) in done
    return schedir.backward(stage + 1, m) in done or schedir.backward_input(stage + 1, m) in done


def scattered(complete: Schedule, chance: random.Random) -> Schedule:
    """The schedule with each receive moved ahead, and each send back, as far as chance will."""
    lists = []
    for actions in complete.flat:
        moved = list(actions)
        for action in actions:
            if action.kind in (Kind.RECV_ACT, Kind.RECV_GRAD) and chance.random() < 0.3:
                index = moved.index(action)
                moved.insert(chance.randint(0, index), moved.pop(index))
            elif action.kind in (Kind.SEND_ACT, Kind.SEND_GRAD) and chance.random() < 0.3:
                index = moved.index(action)
                moved.insert(chance.randint(index, len(moved) - 1), moved.pop(index))
        lists.append(moved)
    return Schedule(complete.name, complete.microbatches, complete.placement, lists)


@given(st.integers(0, 1 << 32))
def test_what_the_pass_completes_is_clean_under_every_model(seed: int) -> None:
    compute = drawn(random.Random(seed))
    complete = schedir.insert_communication(compute)
    assert strip_communication(complete).actions == compute.flat
    report = schedir.check(complete)
    assert report.ok, (report.errors, schedir.dumps(compute))
    assert report.clean_channels == CHANNELS
    assert happens(complete, "host", seed) == "completes"
    # Without costs for communication nothing is gained or lost by it.
    assert schedir.simulate(complete).makespan == schedir.simulate(compute).makespan


@given(st.integers(0, 1 << 32), st.sampled_from(CHANNELS), st.integers(0, 2))
@example(13571, "host", 2)  # a forward runs again, the second time with its version named
def test_the_verdict_on_scattered_communication(seed: int, channel: str, faults: int) -> None:
    chance = random.Random(seed)
    built = scattered(schedir.insert_communication(drawn(chance)), chance)
    for _ in range(faults):
        built = mutate(built, chance)
    outcome = happens(built, channel, seed)
    report = schedir.check(built, channel)
    assert report.ok == (outcome == "completes"), (outcome, report.errors, schedir.dumps(built))
    if report.ok:
        assert (schedir.simulate(built, channel=channel).starts >= 0).all()
    else:
        with pytest.raises(schedir.ScheduleError):
            schedir.simulate(built, channel=channel)


@given(st.integers(0, 1 << 32), st.sampled_from(CHANNELS), st.integers(1, 2))
def test_the_verdict_on_compute_alone(seed: int, channel: str, faults: int) -> None:
    """What check lets through as compute runs once completed; what blocks is never let through."""
    chance = random.Random(seed)
    compute = drawn(chance)
    for _ in range(faults):
        compute = mutate(compute, chance)
    report = schedir.check(compute, channel)
    for finding in report.diagnostics:
        for place in finding.locations:  # as it was given
            if place.index is not None and not any("completes it" in n for n in finding.notes):
                assert compute.flat[place.rank][place.index] == place.action
    try:
        complete = schedir.insert_communication(compute)
    except schedir.UnsoundError:
        assert not report.ok
        return
    if complete.is_complete:
        assert report.ok == (happens(complete, channel, seed) == "completes")
