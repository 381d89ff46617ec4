"""check: each value is made before it is used, and ended, whatever the kinds of action."""

from __future__ import annotations

import random

import pytest

import schedir
from schedir.checker.rules import NEVER_ENDED, USED_AFTER_ITS_END, USED_TOO_EARLY
from schedir.checker.structure import structure
from schedir.passes import offload
from tests.built_in import NAMES
from tests.literals import listed
from tests.sweeps import sweep
from tests.test_check import found, mutate
from tests.test_graph import naive_faults, shuffled
from tests.test_random import drawn

GENERAL = {rule.code for rule in (USED_TOO_EARLY, USED_AFTER_ITS_END, NEVER_ENDED)}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("0F0 0OFFLOAD0 0RELOAD0 0B0", []),
        ("0OFFLOAD0 0F0 0RELOAD0 0B0", [("S217", 0), ("S218", 2)]),
        ("0F0 0RELOAD0 0OFFLOAD0 0B0", [("S217", 1), ("S218", 1), ("S218", 3)]),
        ("0F0 0OFFLOAD0 0B0 0RELOAD0", [("S217", 2)]),
        ("0F0 0OFFLOAD0 0B0", [("S409", 1), ("S218", 2)]),
        ("0F0 0B0 0OFFLOAD0", [("S218", 2), ("S409", 2)]),
        ("0F0 0RELOAD0 0B0", [("S218", 1)]),
        # Nothing is kept where it is recomputed, before that is.
        ("0F0 0OFFLOAD0 0R0 0RELOAD0 0B0", [("S217", 1), ("S218", 3)]),
        ("0F0 0R0 0OFFLOAD0 0RELOAD0 0B0", []),
        # What has a rule of its own is told by that alone.
        ("0B0 0F0 0OFFLOAD0 0RELOAD0", [("S201", 0)]),
        ("0F0 0OFFLOAD0 0RELOAD0 0W0 0I0", [("S202", 3)]),
    ],
)
def test_copies(wrong: str, expected: list[tuple[str, int]]) -> None:
    schedule = listed(1, "0", wrong)
    tokens = wrong.split()
    places = [(code, f"rank 0 #{index} {tokens[index]}") for code, index in expected]
    assert sorted(found(schedule)) == sorted(places)


@pytest.mark.parametrize(
    ("placement", "lists", "expected"),
    [
        ("0", ("0F0 0SEND_ACT0 0RECV_GRAD0 0B0",), {"S306"}),
        ("0 0", ("0F0 0SEND_ACT0 1RECV_ACT0 1F0 1B0 0B0",), {"S306"}),
        ("0 0", ("1RECV_ACT0 1F0 0F0 1B0 0B0",), {"S203"}),  # which is there before all others
    ],
)
def test_what_meets_nobody_makes_and_ends_nothing(
    placement: str, lists: tuple[str, ...], expected: set[str]
) -> None:
    assert {code for code, _ in found(listed(1, placement, *lists))} == expected


def test_a_copy_on_another_replica() -> None:
    wrong = listed(
        2,
        "0,1",
        "0F0 0RELOAD0 0B0 0REDUCE_GRAD 0OPTIM_STEP",
        "0F1 0OFFLOAD0 0B1 0REDUCE_GRAD 0OPTIM_STEP",
    )
    (finding,) = schedir.check(wrong).errors
    assert finding.code == "S107"
    assert finding.message == (
        "stage 0 runs microbatch 0 forward on rank 0, but 0OFFLOAD0 is on rank 1"
    )


@sweep("seed", range(4), quick=[0])
def test_every_fault_that_walking_finds_is_an_error(seed: int) -> None:
    """With copies in the lists, of which no rule knows."""
    chance = random.Random(seed)
    general = 0
    for _ in range(80):
        schedule = schedir.insert_communication(drawn(chance))
        schedule = offload(schedule, range(schedule.stages), ahead=chance.choice([1, 2]))
        if chance.random() < 0.8:
            schedule = shuffled(schedule, chance)
        if any(each.many for each in structure(schedule)):
            continue
        errors = schedir.check(schedule, "async").errors
        codes = {error.code for error in errors}
        general += not GENERAL.isdisjoint(codes)
        faulty = {place for place, _ in naive_faults(schedule)}
        assert bool(faulty) <= bool(errors)
        if codes.isdisjoint({"S201", "S202", "S203"}):  # of which a missing receive is an echo
            told = {schedule.columns.place(e.rank, e.index or 0) for e in errors}
            heads = schedule.columns.heads[schedule.columns.entry[[*faulty]]].tolist()
            assert {*heads} <= told, schedir.dumps(schedule)
    assert general > 10


@sweep("name", NAMES, quick=["1f1b", "pipedream"])
def test_what_has_a_rule_of_its_own_is_never_told_in_general(name: str) -> None:
    chance = random.Random(name)
    base = schedir.build(name, ranks=2, microbatches=3)
    for _ in range(60):
        mutant = base
        for _ in range(chance.randint(1, 3)):
            mutant = mutate(mutant, chance)
        assert GENERAL.isdisjoint(code for code, _ in found(mutant))
