"""The maintainer's tools: those that hold this tree against a commit, and one that breaks it."""

from __future__ import annotations

import json
from math import nan
from typing import Any

import attrs
import pytest
from at_commit import ROOT
from bench_drift import row
from mutants import KINDS, in_turns, mutants_of, names_in, now_called, pick, sources_in
from size import tokens
from trial_verdicts import Case, case_of, differing, lists_of, summed_alone, summed_twice, text_of
from verdict_run import answers

import schedir
from schedir import CostModel, Schedule, Timeline
from tests.built_in import NAMES
from tests.sweeps import long

CODE = b"""\
x = {"a": f"{1 + 1}"}
def f(y: int) -> str:
    return "b" \\
        "c"
"""
EXPLAINED = b'''\
"""A module.

Of two paragraphs.
"""

x = {"a": f"{1 + 1}"}  # why
"""What x is."""


def f(y: int) -> str:
    """What f
    returns."""
    # Two strings.
    return (
        "b"
        "c"
    )
'''


def test_explaining_costs_no_tokens() -> None:
    assert tokens(EXPLAINED) == tokens(CODE) + 2  # the brackets
    assert tokens(CODE + b"x = 1\n") == tokens(CODE) + 3


@pytest.mark.parametrize("name", NAMES)
def test_lists_as_tokens_and_back(name: str) -> None:
    text = schedir.dumps(schedir.batch_communication(schedir.build(name)))
    assert text_of(*lists_of(text)) == text


def answered(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = answers(json.loads(json.dumps(attrs.asdict(case))))
    json.dumps(found)
    return found


def test_a_case_is_drawn_and_answered_alike() -> None:
    for seed in range(20):
        assert case_of(seed) == case_of(seed)
        assert differing(answered(case_of(seed)), answered(case_of(seed))) == []


def test_a_time_that_is_a_fraction_now_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(
        case for case in map(case_of, range(100)) if case.faults == 0 and "SEND" in case.text
    )
    then = answered(case)
    simulate = schedir.simulate

    def inexact(schedule: Schedule, costs: CostModel | None, **how: Any) -> Timeline:
        line = simulate(schedule, costs, **how)
        return attrs.evolve(line, starts=line.starts * 1.0, ends=line.ends * 1.0)

    monkeypatch.setattr(schedir, "simulate", inexact)
    assert "times" in differing(then, answered(case))


def test_sums_in_vain_on_one_rank_are_explained() -> None:
    text = "schedir 1\nname x\nmicrobatches 1\nplacement {}\nrank 0: 0F0 0B0 0REDUCE_GRAD\n"
    case = attrs.evolve(case_of(0), text=text.format("0"))
    new = {"codes": [["S210", "error", ["rank 0 #3 0REDUCE_GRAD"]]]}
    assert summed_twice(case, {"codes": []}, new)
    assert not summed_twice(case, new, new)
    replicated = attrs.evolve(case, text=text.format("0,1"))
    assert not summed_twice(replicated, {"codes": []}, new)
    assert summed_alone(case, {}, {})
    assert not summed_alone(replicated, {}, {})


def test_a_row_of_drift() -> None:
    assert row("x", [1, 2, 4], [2, 2, 2]) == "| x | 2 | 2 | 1.000 (0.750 to 1.500) | 3 |"
    assert row("x", [nan, 2], [1.5, 3]) == "| x | 2 | 2.25 | 1.500 (1.500 to 1.500) | 1 |"
    assert row("x", [], [1]) == "| x | - | 1 | - | 0 |"


BREAKABLE = b"""\
import os

LIMIT = 3


def f(x: int = 4) -> list[str]:
    os.sync()
    if x < 5 and (
        x
    ):
        return [f"{x + 1}"]
    return [str(x + 1)] if x else []
"""


def test_mutants_of_a_module() -> None:
    """Of functions alone; no line moves."""
    mutants = list(mutants_of("a.py", BREAKABLE))
    assert [(mutant.line, mutant.kind, mutant.new) for mutant in mutants] == [
        (7, "call", "(None)"),
        (8, "branch", "(not (x < 5 and x)\n\n)"),
        (8, "operator", "(x < 5 or x\n\n)"),
        (8, "operator", "(x <= 5)"),
        (8, "constant", "(6)"),
        (12, "branch", "(not (x))"),
        (12, "operator", "(x - 1)"),
        (12, "constant", "(2)"),
    ]
    rows = BREAKABLE.splitlines()
    for mutant in mutants:
        compile(mutant.applied(BREAKABLE), mutant.path, "exec")
        probed = mutant.probed(BREAKABLE, 7)
        compile(probed, mutant.path, "exec")
        assert len(probed.splitlines()) == len(rows)
        assert mutant.applied(BREAKABLE) != BREAKABLE
    with pytest.raises(ValueError, match="does not stand here"):
        mutants[0].applied(BREAKABLE[1:])


def test_mutants_are_drawn_alike_and_apart() -> None:
    sources = sources_in(ROOT)
    assert "schedules/fill_drain.py" in sources
    assert not any(path.startswith("schedir/schedules") for path in sources)
    some = dict([*sources.items()][::4])  # parsing all takes long
    drawn = pick(some, seed=3, count=60)
    assert drawn == pick(some, seed=3, count=60) != pick(some, seed=4, count=60)
    assert {mutant.kind for mutant in drawn} == set(KINDS)
    assert len({mutant.path.split("/")[1] for mutant in drawn}) > 10
    assert len({(mutant.path, mutant.line) for mutant in drawn}) == len(drawn) > 55
    for mutant in drawn:
        compile(mutant.applied(sources[mutant.path]), mutant.path, "exec")


def test_tests_are_tried_in_turns() -> None:
    times = {"a::x": 3.0, "a::y": 1.0, "b::x": 2.0, "b::y": 0.5, "c::x": 9.0, "a::z[2 ranks]": 0.1}
    assert in_turns(times, times) == ["b::y", "a::y", "c::x", "b::x", "a::x", "a::z[2 ranks]"]


def test_tests_by_the_names_that_they_have_now() -> None:
    now = ["a::x[1]", "a::x[2]", "a::y[0-1]", "a::y[0-2]", "b::z"]
    assert now_called(["a::x[2]", "a::y[1]", "a::gone"], now) == {
        "a::x[2]",
        "a::y[0-1]",
        "a::y[0-2]",
    }


@long
def test_the_tests_that_there_are_have_names() -> None:
    found = names_in(ROOT, "tests/test_tools.py")
    assert "tests/test_tools.py::test_tests_are_tried_in_turns" in found
