"""Stages that share parameters: they step together, and read one version of what they share."""

from __future__ import annotations

import random
import re
from itertools import product
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Action, Kind, Schedule
from schedir.checker import CHANNELS, changed
from schedir.ir import tied_steps
from tests.built_in import SYNCHRONOUS, variants
from tests.command_line import runner
from tests.oracle import happens
from tests.sweeps import sweep
from tests.test_check import BASES, mutate, naive, schedule, with_steps
from tests.test_random import has_inputs, scattered

Groups = list[tuple[int, ...]]


def updating(chance: random.Random) -> tuple[Schedule, Groups]:
    """A right compute-only schedule that updates after every backward, each at its own time, and
    ties for it.

    Sometimes no tied stage steps before all of them have their gradients; and sometimes all stages
    read the same versions.
    """
    ranks, stages, microbatches = (chance.randint(low, 3) for low in (1, 2, 1))
    ties = some_ties(chance, stages)
    placement = [chance.randrange(ranks) for _ in range(stages)]
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    kinds = (schedir.forward, schedir.backward)
    open_ = {kind(s, m) for kind in kinds for s in range(stages) for m in range(microbatches)}
    done: set[Action] = set()
    waits: list[int] = []  # for their steps
    steps = [0] * stages
    met = chance.random() < 0.5
    reads: dict[Action, int] = {}

    def may_step(stage: int) -> bool:
        tied = {s for tie in ties if stage in tie for s in tie}
        return not met or all(s in waits for s in tied if steps[s] == steps[stage])

    while open_ or waits:
        # Backwards come by microbatch, so that every stage applies the same ones in a step.
        ready: list[Action | int] = [
            a
            for a in sorted(open_, key=str)
            if has_inputs(a, stages, done)
            and (
                a.kind is Kind.FORWARD or (a.stage not in waits and steps[a.stage] == a.microbatch)
            )
        ]
        action = chance.choice([*ready, *(s for s in sorted(waits) if may_step(s))])
        if isinstance(action, int):
            waits.remove(action)
            steps[action] += 1
            lists[placement[action]].append(schedir.optim_step(action))
            continue
        open_.remove(action)
        done.add(action)
        lists[placement[action.stage]].append(action)
        if action.kind is Kind.BACKWARD:
            waits.append(action.stage)
        else:
            reads[action] = steps[action.stage]
    if chance.random() < 0.7:  # as vertical sync
        least = {
            m: min(v for a, v in reads.items() if a.microbatch == m) for m in range(microbatches)
        }
        named = {a: attrs.evolve(a, version=least[a.microbatch or 0]) for a in reads}
        lists = [[named.get(a, a) for a in actions] for actions in lists]
    return Schedule("updating", microbatches, placement, lists), ties


def some_ties(chance: random.Random, stages: int) -> Groups:
    """None, one or two groups, which may overlap."""
    if stages < 2:
        return []
    sizes = [chance.randint(2, min(3, stages)) for _ in range(chance.choice([0, 1, 1, 2]))]
    return [tuple(chance.sample(range(stages), size)) for size in sizes]


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_synchronous_built_ins_are_clean_with_any_ties(name: str) -> None:
    for ranks, microbatches, own in product(range(1, 5), range(1, 6), variants(name)):
        built = schedir.build(name, ranks=ranks, microbatches=microbatches, **own)
        last = built.stages - 1
        nested = [(s, last - s) for s in range(built.stages // 2)]
        chain = [(s, s + 1) for s in range(last)]
        for ties in ([(0, last)], nested, chain, [tuple(range(built.stages))]) if last else ():
            assert schedir.check(built, ties=ties).clean_channels == CHANNELS


@sweep("ranks", [2, 3, 4], quick=[3])
@pytest.mark.parametrize("channel", CHANNELS)
def test_pipedream_may_tie_its_ends_with_vertical_sync_only(ranks: int, channel: str) -> None:
    ties = [(0, ranks - 1)]
    for microbatches in (2, 5):
        shape = {"ranks": ranks, "microbatches": microbatches}
        plain = schedir.build("pipedream", **shape)
        assert [d.code for d in schedir.check(plain, channel, ties=ties).diagnostics] == ["S407"]
        assert happens(plain, channel, ties=ties) == "wrong"
        synchronised = schedir.build("pipedream", **shape, vertical_sync=True)
        assert schedir.check(synchronised, channel, ties=ties).diagnostics == ()
        assert happens(synchronised, channel, ties=ties) == "completes"


def test_the_versions_of_untied_stages_may_differ() -> None:
    built = schedir.build("pipedream", ranks=3, microbatches=1)
    assert schedir.check(built, ties=[(0, 2)]).ok
    built = schedule(
        2,
        "0 0 0",
        "0F0@0 1F0@0 2F0@0 2B0 1B0 0B0 0OPTIM_STEP 1OPTIM_STEP 2OPTIM_STEP "
        "0F1@0 1F1@1 2F1@0 2B1 1B1 0B1 0OPTIM_STEP 1OPTIM_STEP 2OPTIM_STEP",
    )
    assert [d.code for d in schedir.check(built, ties=[(0, 2)]).diagnostics] == ["S406"]
    (error,) = schedir.check(built, ties=[(0, 2), (2, 1)]).errors
    said = "stages 2 and 1 share parameters, but run microbatch 1 at versions 0 and 1"
    assert error.message == said
    assert schedir.check(built, ties=[(2, 0, 1)]).errors == (error,)
    assert [str(place) for place in error.locations] == ["rank 0 #11 2F1@0", "rank 0 #10 1F1@1"]


def test_without_updates_there_is_nothing_to_tie() -> None:
    for base in BASES:
        if base.stages == 1:
            continue
        callers = with_steps(base)
        ties = [(0, base.stages - 1)]
        tied, untied = schedir.check(callers, ties=ties), schedir.check(callers)
        assert tied.diagnostics == untied.diagnostics
        assert tied.clean_channels == untied.clean_channels


def test_tied_stages_that_group_differently_are_uneven_steps() -> None:
    uneven = schedule(
        2, "0 0", "0F0 1F0 1B0 1OPTIM_STEP 0B0 0F1@0 1F1@0 1B1 1OPTIM_STEP 0B1 0OPTIM_STEP"
    )
    # That they wait for each other's uneven steps would be an echo.
    assert {d.code for d in schedir.check(uneven, ties=[(0, 1)]).errors} == {"S207"}


def on_one_rank(ending: str) -> Schedule:
    return schedule(1, "0 0 0", f"0F0 1F0 2F0 2B0 {ending}")


@pytest.mark.parametrize(
    "ending",
    [
        "1B0 0B0 0OPTIM_STEP 1OPTIM_STEP 2OPTIM_STEP",
        "1B0 0B0 2OPTIM_STEP 0OPTIM_STEP 1OPTIM_STEP",
        "1B0 0B0 2REDUCE_GRAD 0REDUCE_GRAD 2OPTIM_STEP 1REDUCE_GRAD 0OPTIM_STEP 1OPTIM_STEP",
    ],
)
def test_consecutive_steps_are_reached_together(ending: str) -> None:
    report = schedir.check(on_one_rank(ending), ties=[(0, 2)])
    assert report.diagnostics == ()
    assert {*CHANNELS[1:]} <= set(report.clean_channels)


@pytest.mark.parametrize(
    ("ending", "held", "why", "by"),
    [
        ("2OPTIM_STEP 1B0 0B0 0OPTIM_STEP 1OPTIM_STEP", "0B0", "comes after", "0OPTIM_STEP"),
        (
            "1B0 0B0 1REDUCE_GRAD 1OPTIM_STEP 0REDUCE_GRAD 0OPTIM_STEP 2REDUCE_GRAD 2OPTIM_STEP",
            "2REDUCE_GRAD",
            "needs",
            "2OPTIM_STEP",
        ),
    ],
)
def test_what_a_sum_needs_may_not_stand_behind_its_first_step(
    ending: str, held: str, why: str, by: str
) -> None:
    wrong = on_one_rank(ending)
    report = schedir.check(wrong, ties=[(0, 2)])
    (error,) = report.errors
    assert (error.code, report.clean_channels) == ("S301", ())
    assert (by, why, held) in [
        (row[0].split()[-1], row[1], row[2].removesuffix("   (cycle)").split()[-1])
        for row in error.trace
    ]
    assert happens(wrong, "async", ties=[(0, 2)]) == "blocks"
    assert schedir.check(wrong).ok


def test_a_move_that_mends_is_found() -> None:
    wrong = on_one_rank("1B0 2OPTIM_STEP 0B0 0OPTIM_STEP 1OPTIM_STEP")
    (error,) = schedir.check(wrong, ties=[(0, 2)]).errors
    assert error.help == "move rank 0 #6 before rank 0 #5"
    assert error.change is not None
    assert schedir.check(changed(wrong, error.change), ties=[(0, 2)]).ok


def test_what_is_behind_consecutive_steps_waits_for_all_of_them() -> None:
    """Rank 0 may not go on before stage 0's step, which waits for stage 2's, though stage 1's
    stands between: and rank 1 waits for rank 0."""
    lists = (
        "0F0 1F0 1B0 0B0 0OPTIM_STEP 1OPTIM_STEP 0F1@0 1F1@0 1B1 0B1 0OPTIM_STEP 1OPTIM_STEP",
        "2F0 2I0 2F1@0 2I1 2W0 2OPTIM_STEP 2W1 2OPTIM_STEP",
    )
    stuck = schedule(2, "0 0 1", *lists)
    assert schedir.check(stuck, ties=[(1, 2)]).errors[0].code == "S301"
    (error,) = schedir.check(stuck, ties=[(0, 2)]).errors
    assert ("rank 0 #6 0F1@0", "comes after", "rank 0 #4 0OPTIM_STEP") in [
        (a, why, b.removesuffix("   (cycle)")) for a, why, b in error.trace
    ]
    assert error.change is not None
    assert schedir.check(changed(stuck, error.change), ties=[(0, 2)]).ok
    assert schedir.check(stuck).ok


def test_the_steps_of_overlapping_ties_and_of_replicas_are_one() -> None:
    base = schedule(
        2,
        "0,1 0 1 0",
        "0F0 1F0 1B0 1F1 3F0 3F1 0OPTIM_STEP 1OPTIM_STEP 3OPTIM_STEP 3OPTIM_STEP",
        "2F0 2F1 0OPTIM_STEP 2OPTIM_STEP 0OPTIM_STEP",
    )
    assert tied_steps(base, ((0, 1), (3, 0))) == [(6, 12, 7, 8)]
    assert tied_steps(base, ((0, 1), (2, 3))) == [(6, 12, 7), (13, 8)]
    assert tied_steps(base, ((0, 1), (2, 3), (3, 1))) == [(6, 12, 7, 13, 8)]
    assert tied_steps(base, ()) == []


APART = schedule(  # stages that step after different microbatches, which tied ones may not
    3,
    "0 0",
    "0F0 1F0 0F1 1F1 0F2 1F2 1B0 1B1 0B0 0OPTIM_STEP 1OPTIM_STEP 1B2 0B1 0B2 0OPTIM_STEP "
    "1OPTIM_STEP",
)


@pytest.mark.parametrize("channel", CHANNELS)
def test_stages_may_step_after_different_microbatches_but_not_tied_ones(channel: str) -> None:
    report = schedir.check(APART, channel)
    assert report.ok
    assert [d.code for d in report.diagnostics] == ["S216"]
    assert happens(APART, channel) == "completes"
    assert [d.code for d in schedir.check(APART, channel, ties=[(0, 1)]).diagnostics] == ["S207"]
    assert happens(APART, channel, ties=[(0, 1)]) == "wrong"


@given(
    base=st.sampled_from([*BASES, APART, APART]),
    faults=st.integers(0, 2),
    seed=st.integers(0, 1 << 32),
    channel=st.sampled_from(CHANNELS),
)
def test_the_verdict_is_what_happens(base: Schedule, faults: int, seed: int, channel: str) -> None:
    chance = random.Random(seed)
    for _ in range(faults):
        base = mutate(base, chance)
    if base.is_complete:
        agree(base, channel, some_ties(chance, base.stages), seed)


@given(st.integers(0, 1 << 32), st.sampled_from(CHANNELS), st.integers(0, 1))
def test_the_verdict_on_schedules_that_update_after_every_backward(
    seed: int, channel: str, faults: int
) -> None:
    chance = random.Random(seed)
    compute, ties = updating(chance)
    lower = chance.choice([schedir.insert_communication, naive])
    built = scattered(lower(compute), chance) if chance.random() < 0.7 else lower(compute)
    for _ in range(faults):
        built = mutate(built, chance)
    agree(built, channel, ties, seed)


def agree(checked: Schedule, channel: str, ties: Groups, seed: int) -> None:
    """The verdict is what happens; and ties forbid, they never allow."""
    report, untied = schedir.check(checked, channel, ties=ties), schedir.check(checked, channel)
    outcome = happens(checked, channel, seed, ties)
    assert report.ok == (outcome == "completes"), (outcome, ties, schedir.dumps(checked))
    assert set(report.clean_channels) <= set(untied.clean_channels)
    assert untied.ok or not report.ok


@given(st.integers(0, 1 << 32), st.sampled_from(["rank", "edge"]))
def test_compute_that_ties_stop_is_stopped_under_every_model(seed: int, channel: str) -> None:
    chance = random.Random(seed)
    compute, ties = updating(chance)
    report = schedir.check(compute, channel, ties=ties)
    try:
        complete = schedir.insert_communication(compute)
    except schedir.UnsoundError:
        assert not report.ok
        return
    assert report.ok == (happens(complete, channel, seed, ties) == "completes")
    for finding in report.errors:
        if "under every channel model" in finding.notes:
            assert happens(complete, "async", seed, ties) == "blocks"


@pytest.mark.parametrize(
    ("ties", "said"),
    [
        ([(0,)], "two or more stages"),
        ((0, 3), "two or more stages, such as (0, 3), not 0"),
        (["03"], "no stage '0' to tie"),
        ([(0, True)], "no stage True to tie"),
        ([(0, -1)], "no stage -1 to tie"),
        ([(0, 3), (1, 4)], "1f1b has no stage 4 to tie, only 0..3"),
        ([(2, 1, 2)], "the tie (2, 1, 2) names a stage twice"),
    ],
)
def test_bad_ties(ties: Any, said: str) -> None:
    built = schedir.build("1f1b", ranks=4, microbatches=4)
    with pytest.raises(ValueError, match=re.escape(said)):
        schedir.check(built, ties=ties)


def test_any_iterables_are_ties() -> None:
    built = schedir.build("pipedream", ranks=3, microbatches=4)
    report = schedir.check(built, ties=iter([range(3)]))
    assert [d.code for d in report.errors] == ["S407"]


@pytest.mark.parametrize(
    ("ties", "code", "said"),
    [
        (["0,3"], 0, "clean under rank"),
        (["0,3", "1,2,3"], 0, "clean under rank"),
        (["0,4"], 2, "error: --tie: 1f1b has no stage 4 to tie, only 0..3"),
        (["1,1"], 2, "error: --tie: the tie (1, 1) names a stage twice"),
    ],
)
def test_the_command(
    ties: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [word for tie in ties for word in ("--tie", tie)]
    found, out, err = runner(capsys)("check", "1f1b", *options)
    assert (found, said in out + err) == (code, True)


@pytest.mark.parametrize("tie", ["0", "a,b", "0,", "0;3", "", "0,-1"])
def test_the_command_refuses_nonsense(tie: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = runner(capsys)("check", "1f1b", "--tie", tie)
    assert (code, "does not name two or more stages" in err) == (2, True)
