"""What a help line says to do ends its fault, and leads to a list that is right."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import schedir
from schedir import Kind, Schedule
from schedir.checker import RULES, Rule
from tests.following import LIMITS, Case, Followed, a_case, follow, followed
from tests.oracle import happens
from tests.sweeps import long
from tests.test_check import schedule

ERRORS = {code for code, rule in RULES.items() if rule.severity == "error"} - LIMITS


def updates(counted: Schedule) -> Counter[tuple[int, int]]:
    """How many OPTIM_STEPs each stage has on each rank."""
    return Counter(
        (rank, action.stage)
        for rank, actions in enumerate(counted.flat)
        for action in actions
        if action.kind is Kind.OPTIM_STEP
    )


def example(rule: Rule) -> Case:
    wrong = schedir.loads(rule.example)
    return Case(wrong, wrong, "rank", dict(rule.options), 1)


def assert_right(case: Case, led_to: Schedule) -> None:
    """An interpreter of its own finds the list right."""
    complete = case.report(led_to).proved()
    assert happens(complete, case.channel, ties=case.options.get("ties", ())) == "completes"


def follow_a_case(seed: int) -> Followed:
    """Follow the help of a list that is broken at random. Raises AssertionError where it leads to a
    wrong list, or ends before there is a right one, but for a deadlock that no move undoes."""
    chance = random.Random(seed)
    case = a_case(chance)
    led = follow(case, chance, first=bool(seed % 3))
    if led.helpless is not None:
        assert led.helpless == "S301", schedir.dumps(case.wrong)
        return led
    assert_right(case, led.last)
    # Of several updates nobody can say which is missing, nor of which stage an unknown one is.
    once = case.faults == 1 and set(updates(case.right).values()) == {1}
    if once and led.codes and led.codes[0] != "S101":
        assert updates(led.last) == updates(case.right), (led.codes, schedir.dumps(case.wrong))
    return led


def test_help_that_is_followed_leads_to_a_right_list() -> None:
    led = [follow_a_case(seed) for seed in range(150)]
    assert sum(each.helpless is not None for each in led) <= len(led) // 20
    assert len({code for each in led for code in each.codes}) >= 20


@long
def test_the_help_of_one_list_in_a_hundred_may_lead_astray() -> None:
    astray = helpless = 0
    for seed in range(150, 1150):
        try:
            helpless += follow_a_case(seed).helpless is not None
        except AssertionError:
            astray += 1
    assert astray <= 10
    assert helpless <= 50


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_the_help_of_an_example_leads_to_a_right_list(code: str) -> None:
    case = example(RULES[code])
    led = follow(case, random.Random(0))
    assert code in led.codes
    assert led.helpless is None
    assert_right(case, led.last)


@pytest.mark.parametrize("code", ["S501", "S502", "S503", "S505"])
def test_the_help_of_a_warning_ends_it(code: str) -> None:
    case = example(RULES[code])
    (finding,) = [d for d in case.report(case.wrong).diagnostics if d.code == code]
    assert finding.help is not None
    report = case.report(followed(case.wrong, finding.help))
    assert report.ok
    assert finding.message not in [d.message for d in report.diagnostics]


@pytest.mark.parametrize("code", sorted(LIMITS))
def test_a_limit_has_no_help(code: str) -> None:
    case = example(RULES[code])
    assert {d.help for d in case.report(case.wrong).errors if d.code == code} == {None}


# What was said, and was not so.


def helped(wrong: Schedule) -> Schedule:
    case = Case(wrong, wrong, "rank", {}, 1)
    return follow(case, random.Random(0)).last


def test_a_missing_step_is_added_after_the_sum_of_its_gradients() -> None:
    wrong = schedule(1, "0 1", "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP", "1F0 1B0 1REDUCE_GRAD")
    (finding,) = schedir.check(wrong).errors
    assert (finding.code, finding.help) == ("S205", "add 1OPTIM_STEP after rank 1 #2")
    assert schedir.check(followed(wrong, finding.help or "")).ok


def test_a_step_too_many_goes_and_makes_no_second_update() -> None:
    wrong = schedule(2, "0", "0F0 0OPTIM_STEP 0F1 0B0 0B1 0OPTIM_STEP")
    (finding,) = schedir.check(wrong).errors
    assert (finding.code, finding.help) == ("S206", "remove 0OPTIM_STEP at rank 0 #1")
    assert updates(helped(wrong)) == {(0, 0): 1}


def test_a_step_that_stands_too_early_is_moved_where_others_have_as_many() -> None:
    right = "{0}F0 {0}B0 {0}OPTIM_STEP {0}F1 {0}B1 {0}OPTIM_STEP"
    wrong = schedule(2, "0 1", "0F0 0OPTIM_STEP 0B0 0F1 0B1 0OPTIM_STEP", right.format(1))
    (finding,) = schedir.check(wrong).errors
    assert (finding.code, finding.help) == ("S206", "move rank 0 #1 after rank 0 #2")
    assert updates(helped(wrong)) == {(0, 0): 2, (1, 1): 2}


def test_a_last_step_that_is_missing_is_added_where_others_have_it() -> None:
    right = "{0}F0 {0}B0 {0}OPTIM_STEP {0}F1 {0}B1 {0}OPTIM_STEP"
    wrong = schedule(2, "0 1", "0F0 0B0 0OPTIM_STEP 0F1 0B1", right.format(1))
    (finding,) = schedir.check(wrong).errors
    assert (finding.code, finding.help) == ("S204", "add 0OPTIM_STEP after rank 0 #4")
    assert updates(helped(wrong)) == {(0, 0): 2, (1, 1): 2}


def test_a_missing_receive_is_added_before_its_use_whatever_the_order_of_its_channel() -> None:
    wrong = schedule(
        2,
        "0 1",
        "0F0 0F1 0SEND_ACT1 0SEND_ACT0 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1F0 1RECV_ACT1 1F1 1B0 1SEND_GRAD0 1B1 1SEND_GRAD1",
    )
    (finding,) = [d for d in schedir.check(wrong).errors if d.code == "S304"]
    assert finding.help == "add 1RECV_ACT0 before rank 1 #0"
    assert schedir.check(helped(wrong)).ok


def test_of_two_like_actions_the_one_that_cannot_run_goes() -> None:
    (finding,) = schedir.check(schedule(1, "0", "0B0 0F0 0B0")).errors
    assert (finding.code, finding.help) == ("S104", "remove 0B0 at rank 0 #0")


def test_two_deadlocks_are_undone_one_after_the_other() -> None:
    wrong = schedule(
        2,
        "0 1 0 1",
        "0F0 0F1 2F0 2F1 0B1 2B1 0B0 2B0",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    )
    case = Case(wrong, wrong, "rank", {}, 1)
    led = follow(case, random.Random(0))
    assert (led.codes, led.helpless) == (["S301", "S301"], None)
