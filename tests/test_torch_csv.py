"""torch's CSV as its versions wrote it: what is read, what is named, what is refused."""

from __future__ import annotations

import re

import pytest

import schedir
from schedir import Kind, ParseError
from schedir.ir import dumps_torch_csv, loads_torch_csv
from tests.torch_schedules import computed, dumped

# ZB-H1 of 2 ranks and 2 microbatches: up to 2.5, B was the gradient of the input alone.
OLD = "0F0,0F1,,0B0,0W0,0B1,0W1\n,1F0,1B0,1F1,1B1,1W0,1W1\n"
NEW = OLD.replace("B", "I")
FULL = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"


def test_the_gradient_of_the_input_under_its_old_name_is_refused() -> None:
    with pytest.raises(ParseError) as error:
        loads_torch_csv(OLD, "old.csv")
    assert (error.value.line, error.value.column) == (1, 10)
    assert "'0B0' is not a full backward, because there is '0W0'" in str(error.value)
    assert "which is I now" in str(error.value)


def test_the_mend_is_what_the_message_says() -> None:
    read = loads_torch_csv(NEW)
    assert schedir.check(schedir.append_steps(read)).ok
    assert str(read.actions[1][1]) == "1I0"


def test_a_pair_in_the_old_dialect_is_refused_at_its_part() -> None:
    text = (
        "10F0\n" + "".join(f"{s}F0\n" for s in range(10)) + "0F1,(0F2;0B1)OVERLAP_F_B,0B0,0W0,0W1\n"
    )
    with pytest.raises(ParseError, match="'0B1' is not a full backward") as error:
        loads_torch_csv(text)
    assert (error.value.line, error.value.column) == (12, 10)


def test_full_backwards_mean_the_same_in_all_versions() -> None:
    read = loads_torch_csv(FULL)
    assert {a.kind for row in read.flat for a in row} == {Kind.FORWARD, Kind.BACKWARD}
    # One stage may split its backwards where another does not.
    mixed = loads_torch_csv(FULL.replace("1B0", "1I0").replace("1F1", "1F1,1W0"))
    assert schedir.check(schedir.append_steps(mixed)).ok


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("0BW0", "BW for the full backward, which is B now"),
        ("0SEND_F0_0RECV_B0", "write its send and receive as two cells"),
        ("1SEND_B0_1RECV_F1", "write its send and receive as two cells"),
        ("0SEND_F0_RECV_B0", "is not an action"),
        ("F0_s0", "is not an action"),
    ],
)
def test_older_words_are_refused_by_name(cell: str, said: str) -> None:
    with pytest.raises(ParseError, match=said) as error:
        loads_torch_csv(f"0F0,0F1\n,1F0,{cell}\n")
    assert (error.value.line, error.value.column) == (2, 6)


@pytest.mark.parametrize(
    "name", ["ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble", "ScheduleDualPipeV"]
)
def test_shards_are_named_and_left_out_and_sums_are_read(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = dumped(name, 2, 4)
    read = loads_torch_csv(text, "theirs.csv")
    counted = {word: len(re.findall(rf"\d{word}\b", text)) for word in ("UNSHARD", "RESHARD")}
    for word, number in counted.items():
        assert f"{number} {word}" in caplog.text
    assert min(counted.values()) >= 4
    actions = [action for row in read.flat for action in row]
    assert sum(a.kind is Kind.REDUCE_GRAD for a in actions) == 4
    cells = [cell for row in text.splitlines() for cell in row.split(",") if cell]
    assert len(actions) + sum(counted.values()) == len(cells) + text.count(";")
    # Without its communication it is what torch computes.
    compute = [[a for a in row if a.microbatch is not None] for row in computed(name, 2, 4).flat]
    kept = [[a for a in row if a.kind.value in "FBIW"] for row in read.flat]
    assert kept == compute


def test_sums_are_torchs_own_in_the_compute_only_dialect() -> None:
    schedule = schedir.loads(
        "schedir 1\nname a\nmicrobatches 1\nplacement 0\nrank 0: 0F0 0B0 0REDUCE_GRAD\n"
    )
    assert dumps_torch_csv(schedule) == ("0F0,0B0,0REDUCE_GRAD\n", [])
    left_out = ["0REDUCE_GRAD is left out: torch lists its own"]
    assert dumps_torch_csv(schedule, compute_only=True) == ("0F0,0B0\n", left_out)
