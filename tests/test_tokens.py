"""Schedules from lists of tokens, as they come from elsewhere, and the steps that these lack."""

from __future__ import annotations

from typing import Any

import pytest

import schedir
from schedir import Schedule, append_steps, backward, forward, together
from schedir.ir import Entry, loads_torch_csv
from schedir.passes import strip_communication
from tests.literals import listed


def test_a_schedule_of_tokens() -> None:
    lists = ["0F0 0F1 0B0 0B1", "1F0 (1B0;1F1)\n 1B1"]
    made = Schedule.of("mine", [0, 1], lists)
    assert made == listed(2, "0 1", "0F0 0F1 0B0 0B1", "1F0 (1B0;1F1) 1B1", name="mine")
    assert Schedule.of("mine", [0, 1], [x.split() for x in lists]) == made
    pair = together(backward(1, 0), forward(1, 1))
    mixed: list[list[str | Entry]] = [["0F0", forward(0, 1), "0B0", "0B1"], ["1F0", pair, "1B1"]]
    assert Schedule.of("mine", (0, 1), mixed) == made
    assert schedir.insert_communication(made).is_complete


def test_the_number_of_microbatches() -> None:
    assert Schedule.of("x", [0], ["0F0 0F4"]).microbatches == 5
    assert Schedule.of("x", [0], ["0F0"], microbatches=3).microbatches == 3
    assert Schedule.of("x", [0, (0, 1)], ["0F0", ""], 1).placement == ((0,), (0, 1))
    with pytest.raises(ValueError, match="the lists name no microbatch; say how many there are"):
        Schedule.of("x", [0], ["0OPTIM_STEP"])


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (["0F0", "0F1 1F0 1Fx"], r"rank 1 #2 '1Fx': '1Fx' is not an action"),
        ([["0F0", "0F1 0F2"]], r"rank 0 #1 '0F1 0F2': '0F1 0F2' is not an action"),
        (["0F0 (0F1;0B1)"], r"rank 0 #1 '\(0F1;0B1\)': 0B1 needs 0F1"),
        (["0F0 (0F1; 1B0)"], r"rank 0 #1 '\(0F1;': '\(0F1;' lacks its '\)'"),
        ([[forward(0, 0), 7]], "rank 0 #1 is not an Action but 7"),
        (["0F0", None], "the list of rank 1 is not a list: None"),
        ("0F0 0B0", "lists must hold one list for each rank, not be a str"),
        ([], "a schedule needs at least one rank"),
    ],
)
def test_what_is_no_token_is_named_with_its_place(lists: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Schedule.of("x", [0], lists, microbatches=1)


def tokens(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, entries)) for entries in schedule.actions]


def test_each_stage_steps_at_the_end_of_its_list() -> None:
    schedule = Schedule.of("v", [0, 1, 1, 0], ["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"])
    stepped = append_steps(schedule)
    assert tokens(stepped) == [
        "0F0 3F0 3B0 0B0 0OPTIM_STEP 3OPTIM_STEP",
        "1F0 2F0 2B0 1B0 1OPTIM_STEP 2OPTIM_STEP",
    ]
    assert schedir.check(stepped).ok
    assert not schedir.check(stepped).diagnostics


def test_replicas_sum_before_they_step() -> None:
    schedule = Schedule.of("r", [(0, 1), 1], ["0F0 0B0", "1F0 1B0 0F1 1F1 1B1 0B1"])
    stepped = append_steps(schedule)
    assert tokens(stepped) == [
        "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP",
        "1F0 1B0 0F1 1F1 1B1 0B1 0REDUCE_GRAD 0OPTIM_STEP 1OPTIM_STEP",
    ]
    assert schedir.check(stepped).ok
    summed = Schedule.of(
        "r", [(0, 1), 1], ["0F0 0B0 0REDUCE_GRAD", "1F0 1B0 0F1 1F1 1B1 0B1 0REDUCE_GRAD"]
    )
    assert tokens(append_steps(summed)) == tokens(stepped)


def test_steps_are_appended_once_and_only_to_what_trains() -> None:
    once = append_steps(Schedule.of("x", [0], ["0F0 0F1 0B0 0B1"]))
    assert append_steps(once) is once
    built = schedir.build("pipedream")
    assert append_steps(built) is built
    forwards = Schedule.of("x", [0, 1], ["0F0 0F1", "1F0 1F1"])
    assert append_steps(forwards) == forwards
    with pytest.raises(TypeError, match="schedule must be a Schedule"):
        append_steps("1f1b")  # type: ignore[arg-type]


def test_entries_and_lines_of_python_are_kept() -> None:
    @schedir.schedule("plain")
    def plain(pipe: schedir.Pipeline, rank: int) -> Any:
        yield forward(0, 0)
        yield together(forward(0, 1), backward(0, 0))
        yield backward(0, 1)

    stepped = append_steps(schedir.library.load(plain, ranks=1, microbatches=2))
    assert tokens(stepped) == ["0F0 (0F1;0B0) 0B1 0OPTIM_STEP"]
    first = stepped.source_of(0, 0)
    assert first is not None
    assert [getattr(stepped.source_of(0, index), "line", None) for index in range(4)] == [
        *(first.line, first.line + 1, first.line + 2, None)
    ]


def test_a_list_of_torch_trains() -> None:
    read = loads_torch_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert schedir.check(append_steps(read)).ok
    complete = append_steps(schedir.insert_communication(read))
    assert strip_communication(complete) == append_steps(read)
    assert schedir.check(complete).ok
