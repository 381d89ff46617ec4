"""The text form: print → parse is the identity, and what is not whole is refused at its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import Action, Kind, ParseError, Schedule
from schedir.ir import NAMES_VERSION, dumps_torch_csv, loads_torch_csv, parse_action
from schedir.ir.kinds import STAGE_WIDE
from tests.joined import joined

NUMBERS = st.integers(0, 999_999_999)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(list(Kind)))
    stage_wide = kind in STAGE_WIDE
    return Action(
        kind,
        draw(NUMBERS),
        None if stage_wide else draw(NUMBERS),
        draw(st.none() | NUMBERS) if kind in NAMES_VERSION else None,
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any well-formed schedule, whether or not it makes sense; some neighbours run together."""
    ranks = draw(st.integers(1, 5))
    held = st.sets(st.integers(0, ranks - 1), min_size=1).map(tuple)
    name = draw(
        st.text(st.characters(exclude_characters="#", exclude_categories=("C", "Z"))).filter(bool)
    )
    made = Schedule(
        name + draw(st.sampled_from(["", " v2", "  two blanks"])),
        draw(st.integers(1, 999_999_999)),
        tuple(draw(st.lists(held, min_size=1, max_size=6))),
        tuple(tuple(draw(st.lists(actions(), max_size=8))) for _ in range(ranks)),
    )
    return joined(made, draw(st.randoms(use_true_random=False)))


@given(schedules())
def test_print_then_parse_is_the_identity(schedule: Schedule) -> None:
    again = schedir.loads(schedir.dumps(schedule))
    assert (again, again.actions) == (schedule, schedule.actions)
    assert again.content_hash == schedule.content_hash
    assert hash(again) == hash(schedule)


@given(actions())
def test_tokens_parse_whole(action: Action) -> None:
    assert parse_action(str(action)) == action
    for broken in (f"{action}garbage", f" {action}", f"{action} ", f"0{action}", f"{action}@"):
        with pytest.raises(ValueError, match=r"action|known|microbatch"):
            parse_action(broken)


EXAMPLE = """\
schedir 1
name 1f1b
microbatches 2
placement 0 1                 # the rank of each stage; 0,3 for a stage on two ranks
rank 0: 0F0 0SEND_ACT0 0F1 0SEND_ACT1
   0RECV_GRAD0 0B0 0RECV_GRAD1 0B1 0OPTIM_STEP  # continued

# a comment of its own
rank 1: 1RECV_ACT0 1F0 1RECV_ACT1 1B0 1SEND_GRAD0 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP
"""


def test_comments_and_continuation_lines() -> None:
    assert schedir.loads(EXAMPLE) == schedir.build("1f1b", ranks=2, microbatches=2)
    assert schedir.loads(EXAMPLE.replace("\n", "\r\n")) == schedir.loads(EXAMPLE)
    assert schedir.loads(EXAMPLE.encode()) == schedir.loads(EXAMPLE)


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "message"),
    [
        ("0F1 ", "0F1garbage ", 5, 24, "'0F1garbage' is not an action"),
        ("0F1 ", "0Q1 ", 5, 24, "unknown action kind 'Q'"),
        ("0F1 ", "0F ", 5, 24, "lacks its microbatch"),
        ("0F1 ", "0B1@2 ", 5, 24, "only FORWARD and RECOMPUTE name a weight version"),
        ("0F1 ", "99999999999F1 ", 5, 24, "is not an action"),
        ("0B1 ", "00B1 ", 6, 32, "'00B1' is not an action"),
        ("0OPTIM_STEP", "0OPTIM_STEP3", 6, 36, "names no microbatch"),
        ("schedir 1", "schedir 2", 1, 9, "format 2 is unknown"),
        ("schedir 1\n", "", 1, 1, "the first line must be 'schedir 1'"),
        ("schedir 1", "  schedir 1", 1, 1, "no line above to continue"),
        ("name 1f1b\n", "", 9, 1, "ends without a 'name' line"),
        ("name 1f1b", "name", 2, 5, "'name' needs a value"),
        ("name 1f1b", "name 1f1b\nname x", 3, 1, "a second 'name' line; the first is line 2"),
        ("name 1f1b", "name 1f\x01b", 2, 8, "can't stand in a name"),
        ("name 1f1b", "author me", 2, 1, "unknown header 'author'"),
        ("microbatches 2", "microbatches two", 3, 14, "expected a number"),
        ("microbatches 2", "microbatches 2 3", 3, 16, "takes one value"),
        ("microbatches 2", "microbatches 0", 3, 14, "at least one microbatch"),
        ("placement 0 1", "placement 0 5", 4, 13, "names rank 5, but there are 2 rank lines"),
        ("placement 0 1", "placement 0,0 1", 4, 13, "rank 0 is named twice"),
        ("rank 1:", "rank 3:", 10, 1, "ends without a 'rank 1:' line"),
        ("rank 1:", "rank 0:", 9, 1, "a second 'rank 0:' line; the first is line 5"),
    ],
)
def test_errors_name_line_and_column(
    old: str, new: str, line: int, column: int, message: str
) -> None:
    with pytest.raises(ParseError) as error:
        schedir.loads(EXAMPLE.replace(old, new, 1), "my.sched")
    assert message in error.value.message
    assert (error.value.line, error.value.column) == (line, column)
    assert error.value.file == "my.sched"
    assert str(error.value).startswith(f"my.sched:{line}:{column}: ")


def test_bad_utf8_is_located() -> None:
    with pytest.raises(ParseError, match="byte 0xff is not UTF-8") as error:
        schedir.loads(EXAMPLE.encode().replace(b"1f1b", "é".encode() + b"\xff"))
    assert (error.value.line, error.value.column) == (2, 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "two\nlines"}, "name"),
        ({"name": "a # b"}, "name"),
        ({"microbatches": 0}, "microbatches"),
        ({"microbatches": 2.0}, "microbatches"),
        ({"microbatches": 10**9}, "microbatches"),
        ({"placement": ((0.0,),)}, "distinct ranks"),
        ({"placement": (0, 7)}, "rank outside 0..0"),
        ({"placement": ()}, "at least one stage"),
        ({"actions": ()}, "at least one rank"),
    ],
)
def test_a_schedule_that_no_file_could_hold_is_refused(
    fields: dict[str, object], message: str
) -> None:
    sound: dict[str, object] = {"name": "x", "microbatches": 1, "placement": (0,), "actions": ((),)}
    with pytest.raises(ValueError, match=message):
        Schedule(**(sound | fields))  # type: ignore[arg-type]


def test_torch_csv_round_trip_in_both_dialects() -> None:
    for name in ("1f1b", "interleaved-1f1b"):
        complete = schedir.build(name, ranks=4, microbatches=8)
        text, lost = dumps_torch_csv(complete)
        read = loads_torch_csv(text)
        kept = [[a for a in actions if a.kind is not Kind.OPTIM_STEP] for actions in complete.flat]
        assert [list(actions) for actions in read.flat] == kept
        assert read.placement == complete.placement
        assert read.microbatches == 8
        assert lost[0] == "0OPTIM_STEP is left out: torch has no OPTIM_STEP"


def test_torch_csv_names_what_it_loses() -> None:
    _, lost = dumps_torch_csv(
        schedir.build("pipedream", ranks=1, microbatches=2, vertical_sync=True)
    )
    assert lost == [
        "0F0@0 loses its weight version: torch has none",
        "0OPTIM_STEP is left out: torch has no OPTIM_STEP (2 times)",
        "0F1@1 loses its weight version: torch has none",
    ]


def test_torch_csv_idle_cells_overlaps_and_what_is_not_modelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read = loads_torch_csv("0UNSHARD,0F0,,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD\r\n", "a/b.csv")
    assert [*map(str, read.actions[0])] == ["0F0", "(0F1;0B0)", "0B1", "0REDUCE_GRAD"]
    assert read.name == "b"
    assert "left out what schedir.shard lists anew: 1 UNSHARD (0UNSHARD)" in caplog.text


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("0F0,0F1garbage", 1, 5, "not an action"),
        ("0F0\n1F0, 1X3", 2, 6, "unknown action kind 'X'"),
        ("0F0,0F", 1, 5, "lacks its microbatch"),
        ("0F0,0REDUCE_GRAD1", 1, 5, "names no microbatch"),
        ("0F0,(0F1;0B0)F", 1, 5, "not a composite action"),
        ("((0F1;0B0)OVERLAP_F_B;0F1)OVERLAP_F_B", 1, 1, "not a composite action"),
    ],
)
def test_torch_csv_errors(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(ParseError, match=message) as error:
        loads_torch_csv(text)
    assert (error.value.line, error.value.column) == (line, column)
