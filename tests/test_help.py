"""What a help line says to do ends its fault, and leads to a list that is right."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

import schedir
from schedir import Kind, Schedule
from schedir.checker import RULES, Rule
from tests.following import LIMITS, Case, Followed, a_case, follow, followed
from tests.literals import listed
from tests.oracle import happens
from tests.sweeps import is_quick, long

ERRORS = {code for code, rule in RULES.items() if rule.severity == "error"} - LIMITS
SEEDS = range(25 if is_quick() else 150)


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
    led = [follow_a_case(seed) for seed in range(60)]
    assert sum(each.helpless is not None for each in led) <= len(led) // 20
    assert len({code for each in led for code in each.codes}) >= 20


@long
def test_the_help_of_one_list_in_a_hundred_may_lead_astray() -> None:
    astray = helpless = 0
    for seed in range(60, 1060):
        try:
            helpless += follow_a_case(seed).helpless is not None
        except AssertionError:
            astray += 1
    assert astray <= 10
    assert helpless <= 50


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_the_help_of_an_example_leads_to_a_right_list(code: str) -> None:
    case = example(RULES[code])
    # The help of another finding may end this one first: another seed begins with this one.
    ways = (follow(case, random.Random(seed), first=False) for seed in range(9))
    led = next(led for led in ways if code in led.codes)
    assert led.helpless is None
    assert_right(case, led.last)


@pytest.mark.parametrize("code", ["S503", "S506"])
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


SAID = """\
# A missing step is added after the sum of its gradients.
S205: add 1OPTIM_STEP after rank 1 #2: 1
0 1
0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP
1F0 1B0 1REDUCE_GRAD

# A step too many goes, and makes no second update.
S206: remove 0OPTIM_STEP at rank 0 #1: 1
0
0F0 0OPTIM_STEP 0F1 0B0 0B1 0OPTIM_STEP

# One that stands too early is moved, where others have as many.
S206: move rank 0 #1 after rank 0 #2: 2
0 1
0F0 0OPTIM_STEP 0B0 0F1 0B1 0OPTIM_STEP
1F0 1B0 1OPTIM_STEP 1F1 1B1 1OPTIM_STEP

# A last one that is missing is added, where others have it.
S204: add 0OPTIM_STEP after rank 0 #4: 2
0 1
0F0 0B0 0OPTIM_STEP 0F1 0B1
1F0 1B0 1OPTIM_STEP 1F1 1B1 1OPTIM_STEP

# A missing receive is added before its use, whatever the order of its channel.
S302 S303: add 1RECV_ACT0 before rank 1 #0: 0
0 1
0F0 0F1 0SEND_ACT1 0SEND_ACT0 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1
1F0 1RECV_ACT1 1F1 1B0 1SEND_GRAD0 1B1 1SEND_GRAD1

# Of two like actions the one that cannot run goes.
S104: remove 0B0 at rank 0 #0: 0
0
0B0 0F0 0B0

# Two deadlocks are undone one after the other.
S301 S301: move rank 0 #5 before rank 0 #4: 0
0 1 0 1
0F0 0F1 2F0 2F1 0B1 2B1 0B0 2B0
1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

# A receive is posted before the send that waits for it.
S301: post rank 1 #4 before rank 1 #3: 0
0 1
0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1
1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1

# Sums cross under `rank` alone, where the trace counts what schedir has inserted.
S301: post rank 1 #5 before rank 1 #4, in the list as it was given: 0
0,1 0,1 2
0F0 1F0 1B0 0B0 1REDUCE_GRAD 0REDUCE_GRAD
0F1 1F1 1B1 0B1 0REDUCE_GRAD 1REDUCE_GRAD
2F0 2B0 2F1 2B1

# Two receives far apart are swapped.
S303: swap rank 1 #0 and rank 1 #2: 0
0 1
0F0 0SEND_ACT0 0F1 0SEND_ACT1 0F2 0SEND_ACT2 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0RECV_GRAD2 0B2
1RECV_ACT2 1RECV_ACT1 1RECV_ACT0 1F0 1F1 1F2 1B0 1SEND_GRAD0 1B1 1SEND_GRAD1 1B2 1SEND_GRAD2
"""
"""The faults that following the help goes through, what it says first, how often stages step in
the end; placement and lists."""


@pytest.mark.parametrize("case", SAID.split("\n\n"), ids=lambda case: case.splitlines()[0])
def test_what_the_help_says(case: str) -> None:
    _, said, placement, *lists = case.splitlines()
    codes, words, steps = said.split(": ")
    microbatches = 1 + max(map(int, re.findall(r"F(\d)", case)))
    wrong = listed(microbatches, placement, *lists)
    assert {finding.help for finding in schedir.check(wrong).errors} == {words}
    led = follow(Case(wrong, wrong, "rank", {}, 1), random.Random(0))
    assert (led.codes, led.helpless) == (codes.split(), None)
    assert {*updates(led.last).values()} == {int(steps)} - {0}
    assert schedir.check(wrong, "edge").ok or "as it was given" not in words
