"""Garbage in `.sched` and CSV files ends in a located error, at a cost that its size bounds."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from unittest.mock import patch

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import ParseError, Schedule
from schedir.cli import main
from schedir.cli.terminal import tell
from schedir.ir import dumps_torch_csv, loads_torch_csv
from schedir.passes import strip_communication
from tests.built_in import NAMES
from tests.command_line import without_page
from tests.sweeps import long, sweep

Parse = Callable[[str | bytes], Schedule]
PARSERS = pytest.mark.parametrize("parse", [schedir.loads, loads_torch_csv])

HEAD = "schedir 1\nname x\nmicrobatches 1\nplacement 0\n"
SOUND = HEAD + "rank 0: 0F0 0B0\n"


# Whatever stands in a file, it is a schedule or an error inside the file.


def parses_or_locates(parse: Parse, content: str | bytes) -> None:
    try:
        found = parse(content)
    except ParseError as raised:
        error = raised
    else:
        assert schedir.loads(schedir.dumps(found)) == found
        return
    # What precedes a bad byte is read as it stands, so that lines and columns stay.
    text = content if isinstance(content, str) else content.decode("utf-8", "replace")
    lines = text.split("\n")
    assert 1 <= error.line <= len(lines)
    assert 1 <= error.column <= len(lines[error.line - 1]) + 1
    assert len(error.message) < 600


BLANKS = [" ", "  ", "\t", "\n", "\n\n", "\n ", "\r\n", "\r"]
ODD = [
    "\0",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x85",
    "\xa0",
    "\u2028",
    "\u3000",
    "\ufeff",
    "\ud800",
    "\u0660",
    "\xb2",
]
TOKENS = ["0F0", "0F1@0", "1B0", "2I0", "0W0", "0REDUCE_GRAD", "0OPTIM_STEP", "1RECV_ACT0", "F"]
TOKENS += [
    "0F999999999",
    "0SEND_F0",
    "1RECV_B0",
    "0UNSHARD",
    "0RESHARD1",
    ")OVERLAP_F_B",
    "(0F0;0B0)OVERLAP_F_B",
    "(0F1;0B0)",
    "(0SEND_ACT0;0RECV_GRAD0)",
]
NUMBERS = ["0", "1", "01", "-1", "1e3", "999999998", "999999999", "1000000000", "9" * 5000]
LINES = ["schedir 1", "name x", "microbatches 2", "placement 0", "placement 0,1 1", "rank 0:"]
LINES += ["rank", "rank 1:", "rank 999999999:", "# ", HEAD, SOUND]
PIECES = [*BLANKS, *ODD, *TOKENS, *NUMBERS, *LINES, *",;:()#@"]


@PARSERS
@given(st.binary())
def test_bytes(parse: Parse, content: bytes) -> None:
    parses_or_locates(parse, content)
    parses_or_locates(parse, SOUND.encode() + content)


@PARSERS
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=25).map("".join))
def test_pieces_of_the_formats(parse: Parse, text: str) -> None:
    parses_or_locates(parse, text)
    parses_or_locates(parse, HEAD + text)


@cache
def sound_files() -> list[str]:
    found = []
    for name in NAMES:
        schedule = schedir.build(name, ranks=2, microbatches=4)
        found.append(schedir.dumps(schedule))
        for exported in (schedule, strip_communication(schedule)):
            found.append(dumps_torch_csv(exported)[0])
    return found


@st.composite
def mutilated(draw: st.DrawFn) -> bytes:
    """A sound file of any format after a few accidents."""
    content = draw(st.sampled_from(sound_files())).encode()
    for _ in range(draw(st.integers(1, 4))):
        a, b, c = sorted(draw(st.integers(0, len(content))) for _ in range(3))
        head, one, two, tail = content[:a], content[a:b], content[b:c], content[c:]
        new = draw(st.binary(max_size=3) | st.sampled_from(PIECES[:20]).map(_encode))
        content = draw(
            st.sampled_from(
                [
                    head + two + tail,  # cut
                    head,
                    head + new + one + two + tail,  # insert
                    head + new + two + tail,  # replace
                    head + one + one + two + tail,  # duplicate
                    head + two + one + tail,  # transpose
                ]
            )
        )
    return content


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@PARSERS
@given(mutilated())
def test_accidents(parse: Parse, content: bytes) -> None:
    parses_or_locates(parse, content)


# Single cases of what only looks right, or looks right in an editor only.


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "the file ends without a 'schedir' line"),
        ("\n# a comment\n", 3, 1, "the file ends without a 'schedir' line"),
        ("\ufeff\ufeff" + SOUND, 1, 1, r"must be 'schedir 1', not '\ufeffschedir'"),
        ("\0" * 9, 1, 1, r"not '\x00\x00"),
        (SOUND.replace("\n", "\r"), 1, 10, "takes one value"),
        (SOUND.replace(" 0B0\n", "\r0B0\n"), 5, 12, r"'\r' is not an action"),
        (SOUND.replace(" 0B0\n", "\u20280B0\n"), 5, 9, r"'0F0\u20280B0' is not an action"),
        (SOUND.replace(" 0B0", "\xa00B0"), 5, 9, r"'0F0\xa00B0' is not an action"),
        (SOUND.replace("0B0", "\u0660B0"), 5, 13, "'\u0660B0' is not an action"),
        (SOUND.replace("0B0", "0B0\x0c"), 5, 13, r"'0B0\x0c' is not an action"),
        (SOUND.replace("0B0", "0B" + "9" * 10**6), 5, 13, "99999...' is not an action"),
        (SOUND.replace("rank 0", "rank \u0660"), 5, 1, "unknown header 'rank'"),
        (SOUND.replace("rank 0", "\u2028rank 0"), 5, 1, r"unknown header '\u2028rank'"),
        (SOUND.replace("name x", "name x\u2028"), 2, 7, r"'\u2028' can't stand in a name"),
        (SOUND.replace("name x", "name x\ry"), 2, 7, r"'\r' can't stand in a name"),
        (SOUND.replace("name x", "name\n x"), 3, 2, "a name stands on one line"),
        (SOUND.replace("name x", "name x\n y"), 3, 2, "a name stands on one line"),
        (SOUND.replace("placement 0", "placement 0,"), 4, 13, "at most 9 digits, not ''"),
        (SOUND.replace("placement 0", "placement \u0660"), 4, 11, "not '\u0660'"),
        (SOUND.replace("placement 0", "placement 0\nplacement 0"), 5, 1, "the first is line 4"),
        (SOUND.replace("placement 0", "placement 0 0,2"), 4, 13, "names rank 2, but there are 1"),
        (SOUND.replace("0B0\n", "0B0\n\n\n  0Q0"), 8, 3, "unknown action kind 'Q'"),
        (SOUND.replace("rank 0:", "rank 1:"), 5, 1, "rank 0 has no line"),
        (SOUND + "rank 0:", 6, 1, "a second line for rank 0; the first is line 5"),
        ("rank 0:", 1, 1, "must be 'schedir 1', not 'rank'"),
        ("\n\t# a comment\n 0F0\n" + SOUND, 3, 1, "no line above to continue"),
    ],
)
def test_sched_errors(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(ParseError) as error:
        schedir.loads(text)
    assert message in error.value.message
    assert (error.value.line, error.value.column) == (line, column)


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        (",\n , \r\n\n", 1, 1, "no action"),
        ("0OPTIM_STEP", 1, 1, "unknown action 'OPTIM_STEP'"),
        ("\ufeff\ufeff0F0,0B0\n", 1, 1, r"'\ufeff0F0' is not an action"),
        ("0F0,0B0\r1F0,1B0\r", 1, 5, r"'0B0\r1F0' is not an action"),
        # Read as a blank, the CR would make one rank of two.
        ("0F0,0B0,\r,1F0,1B0\r", 1, 9, r"'\r' is not an action"),
        ("0F0,0B0\u2028,1F0", 1, 5, r"'0B0\u2028' is not an action"),
        ("0F0,\xa00B0", 1, 5, r"'\xa00B0' is not an action"),
        ("0F0,\u0660B0", 1, 5, "'\u0660B0' is not an action"),
        ("0F0\0", 1, 1, r"'0F0\x00' is not an action"),
        ("0F0\n\n \t0F999999999", 3, 3, "at most 999999999 microbatches"),
        ("0F1000000000", 1, 1, "'0F1000000000' is not an action"),
        ("999999999F0", 1, 1, "stage 0 is on no rank"),
        ("0F0,1F0,3F0,3B0", 1, 1, "stage 2 is on no rank"),
        ("0F0,((0F1;0B0))OVERLAP_F_B", 1, 5, "not a composite action"),
        ("0F0,(0F1; 0Q1 )OVERLAP_F_B", 1, 11, "unknown action 'Q'"),
        ("0F0, (0F1; )OVERLAP_F_B", 1, 11, "an empty part"),
        ("0F0 0B0", 1, 1, "'0F0 0B0' is not an action"),
    ],
)
def test_csv_errors(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(ParseError) as error:
        loads_torch_csv(text)
    assert message in error.value.message
    assert (error.value.line, error.value.column) == (line, column)


def test_the_ends_of_lines_and_files() -> None:
    whole = schedir.loads(SOUND)
    for ended in (SOUND[:-1], SOUND.replace("\n", "\r\n"), SOUND.replace("\n", " \t\r\n")):
        assert schedir.loads(ended) == schedir.loads(ended.encode()) == whole
        assert schedir.loads(ended.rstrip("\n")) == whole
    rows = loads_torch_csv("0F0,0B0\n\n1F0,1B0\n")
    assert (rows.ranks, rows.placement) == (3, ((0,), (2,)))
    for text in ("0F0,0B0\r\n\r\n1F0,1B0\r\n", "0F0 ,0B0\t\n\n1F0,1B0", "0F0,0B0\n\n1F0,1B0\n \t"):
        assert loads_torch_csv(text) == rows


def test_csv_placement_counts_forwards_where_there_are_any() -> None:
    read = loads_torch_csv("0F0,1SEND_F0,2F0\n1F0,0F1,0F2\n0F3,2B0,3B0\n3B1,1F1\n")
    assert read.placement == ((0, 1, 2), (1, 3), (0,), (2, 3))


def test_csv_names_only_some_of_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    loads_torch_csv("0F0," + ",".join(f"{stage}UNSHARD,{stage}RESHARD" for stage in range(9)))
    assert (
        "left out what schedir.shard lists anew: 9 UNSHARD, 9 RESHARD (0UNSHARD 0RESHARD "
        in caplog.text
    )
    assert caplog.messages[0].endswith(" 3UNSHARD 3RESHARD and others)")


# What is no file, and what is shown of one.


def check(capsys: pytest.CaptureFixture[str], target: Path) -> str:
    assert main(["check", str(target)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    return without_page(err)[0]


@pytest.mark.parametrize("suffix", [".sched", ".csv"])
def test_what_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    directory, fifo, device = (tmp_path / f"{name}{suffix}" for name in ("dir", "fifo", "zero"))
    directory.mkdir()
    os.mkfifo(fifo)  # nobody writes to it
    device.symlink_to("/dev/zero")
    for path in (directory, fifo, device):
        assert check(capsys, path) == f"error: {path}: not a regular file\n"
    assert "no such file" in check(capsys, tmp_path / f"none{suffix}")


def test_empty_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (
        ("a.sched", "the file ends without a 'schedir' line"),
        ("a.csv", "the file holds no action of any microbatch"),
    ):
        path = tmp_path / name
        path.touch()
        assert check(capsys, path) == f"error: {path}:1:1: {message}\n"


def test_more_than_memory_holds_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_much(content: bytes, file: str) -> Schedule:
        raise MemoryError

    monkeypatch.setattr("schedir.library.targets.loads", too_much)
    path = tmp_path / "a.sched"
    path.write_text(SOUND)
    assert check(capsys, path) == f"error: {path}: too large for the memory of this machine\n"


@given(
    st.lists(st.sampled_from(["a", "é", "\n", "\r", "a" * 60]), max_size=12).map("".join),
    st.integers(1, 9),
    st.data(),
)
def test_the_line_that_is_shown(
    tmp_path_factory: pytest.TempPathFactory, text: str, piece: int, data: st.DataObject
) -> None:
    """However a line falls into the pieces that are read, its caret stands under the place."""
    path = tmp_path_factory.getbasetemp() / "shown.sched"
    path.write_bytes(text.encode())
    lines = text.split("\n")
    number = data.draw(st.integers(1, len(lines)))
    line = lines[number - 1].replace("\r", " ") + " "
    column = data.draw(st.integers(1, len(line)))
    with (
        patch("schedir.cli.terminal._PIECE", piece),
        redirect_stderr(io.StringIO()) as stderr,
    ):
        assert tell(ParseError("wrong", str(path), number, column)) == 2
    _, *shown = stderr.getvalue().split("\n")[:-1]
    if shown:
        excerpt, caret = (row.removeprefix("    ") for row in shown)
        assert len(excerpt) <= 76
        start = column - len(caret)
        assert excerpt == line[start : start + 76].rstrip()
    else:
        assert number == len(lines)


# Huge files.

MB = 1_000_000
START = b"schedir 1\nname x\nmicrobatches 9\n"
RANK = START + b"placement 0\nrank 0: "
LIMITED = """\
import resource, sys
from schedir.cli import main
address_space, cpu, *argv = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_AS, (int(address_space),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(cpu),) * 2)
sys.exit(main(argv))
"""
PEAK = """\
import re, sys
from schedir.cli import main
main(sys.argv[1:])
print(re.search(r"VmPeak:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


@attrs.frozen
class Huge:
    """A file, the message that it ends in, and where, and what its caret points at.

    `memory` is how many times its size it may take: twice for its bytes and their text, once for
    a token; as it has millions of actions, stages or ranks, what a schedule needs for these.
    """

    content: Callable[[], bytes]
    message: str
    place: str = "[0-9]+:[0-9]+"
    shown: str = ""
    memory: int = 4


def fill(piece: bytes, size: int) -> bytes:
    return piece * (size // len(piece))


def numbered(form: bytes, size: int, distinct: int = MB) -> bytes:
    """Pieces that hold the numbers from 0 on."""
    many = size // len(form % distinct)
    return b"".join(form % (number % distinct) for number in range(many))


SCHED = {
    "token": Huge(lambda: RANK + fill(b"F", 100 * MB), "is not an action", "5:9", "FFF"),
    "kind": Huge(lambda: RANK + b"0" + fill(b"F", 5 * MB), "unknown action kind", "5:9", "0FF"),
    "first word": Huge(lambda: fill(b"(", 20 * MB), "must be 'schedir 1'", "1:1", "((("),
    "NULs": Huge(lambda: fill(b"\0", 10 * MB), "no text, but binary: byte 0x00", "1:1"),
    "name": Huge(lambda: b"schedir 1\nname " + fill(b"a ", 10 * MB), "the file ends"),
    "bad name": Huge(lambda: b"schedir 1\nname " + fill(b"a", 5 * MB) + b"\1", "can't stand in"),
    "commas": Huge(lambda: START + b"placement 0" + fill(b",", 20 * MB), "not ''", "4:13", ",,,"),
    "replicas": Huge(
        lambda: START + b"placement " + numbered(b"%d,", 2 * MB) + b"0",
        "rank 0 is named twice",
        memory=24,
    ),
    "blanks": Huge(lambda: RANK + fill(b" ", 20 * MB) + b"0Q", "kind 'Q'", "5:20000009", "0Q"),
    "actions": Huge(
        lambda: RANK + fill(b"0F0 ", 5 * MB) + b"0Q", "kind 'Q'", "5:5000009", "0Q", memory=8
    ),
    "many actions": Huge(
        lambda: RANK + numbered(b"0F%d ", 2 * MB) + b"0Q", "kind 'Q'", shown="0Q", memory=24
    ),
    "open entry": Huge(
        lambda: RANK + b"(" + fill(b"0F0;", 10 * MB), "lacks its ')'", "5:9", "(0F0;"
    ),
    "nesting": Huge(lambda: RANK + fill(b"(", 10 * MB), "lacks its ')'", "5:9", "((("),
    "empty parts": Huge(
        lambda: RANK + b"(" + fill(b";", 20 * MB) + b")", "an empty part", "5:10", ";;"
    ),
    "parts": Huge(
        lambda: RANK + b"(" + fill(b"0F0;", 4 * MB) + b"0Q0)",
        "kind 'Q'",
        "5:4000010",
        "0Q0",
        memory=8,
    ),
    "many parts": Huge(
        lambda: RANK + b"(" + numbered(b"%dF0;", 2 * MB) + b"0F0)",
        "has one forward",
        "5:9",
        "(",
        memory=32,
    ),
    "a batch": Huge(
        lambda: RANK + b"(" + numbered(b"%dSEND_ACT0;", 2 * MB) + b"1SEND_ACT0)",
        "1SEND_ACT0 is in the entry 2 times",
        "5:9",
        "(",
        memory=32,
    ),
    "entries": Huge(
        lambda: RANK + numbered(b"(0F%d;1B1) ", 2 * MB) + b"0Q", "kind 'Q'", shown="0Q", memory=32
    ),
    "stages": Huge(
        lambda: START + b"placement " + fill(b"0 ", 4 * MB) + b"x", "not 'x'", shown="x", memory=12
    ),
    "many stages": Huge(
        lambda: START + b"placement " + numbered(b"%d ", 2 * MB) + b"x",
        "not 'x'",
        shown="x",
        memory=24,
    ),
    "ranks": Huge(
        lambda: START + numbered(b"rank %d:\n", 3 * MB) + b"rank 7:",
        "a second line for rank 7; the first is line 11",
        shown="rank 7:",
        memory=16,
    ),
    "values": Huge(lambda: b"schedir" + fill(b" 1", 10 * MB), "takes one value", "1:11", "1 1"),
    "lines": Huge(lambda: fill(b"\n", 10 * MB), "the file ends without", "10000001:1"),
    "CR LFs": Huge(lambda: RANK + fill(b"\r\n", 10 * MB) + b" 0Q", "'Q'", "5000005:2", "0Q"),
    "CRs": Huge(lambda: RANK + fill(b"\r", 10 * MB), r"'\r' is not an action", "5:9"),
    "comments": Huge(lambda: START + fill(b"#\n", 4 * MB) + b"x", "'x'", "2000004:1", "x"),
    "continuations": Huge(
        lambda: RANK + fill(b"\n 0F0", 5 * MB) + b"\n 0Q", "'Q'", "1000006:2", "0Q", memory=8
    ),
    "continued header": Huge(
        lambda: b"schedir" + fill(b"\n 1", 6 * MB), "takes one value", "3:2", "1"
    ),
    # One wide character makes four bytes of each.
    "bad byte": Huge(
        lambda: "\U0001f600".encode() + fill(b"a", 10 * MB) + b"\xff",
        "byte 0xff is not UTF-8",
        "1:10000002",
        "\ufffd",
        memory=12,
    ),
}
CSV = {
    "cell": Huge(lambda: fill(b"A", 100 * MB), "is not an action", "1:1", "AAA"),
    "empty cells": Huge(lambda: fill(b",", 100 * MB) + b"0Q", "'Q'", "1:100000001", "0Q"),
    "empty rows": Huge(lambda: fill(b"\n", 20 * MB), "holds no action", "1:1"),
    "idle ranks": Huge(
        lambda: b"0F0" + fill(b"\n", 2 * MB) + b"0Q", "'Q'", "2000001:1", "0Q", memory=16
    ),
    "cells": Huge(lambda: fill(b"0F0,", 5 * MB) + b"0Q", "action 'Q'", "1:5000001", "0Q", memory=8),
    "rows": Huge(lambda: fill(b"0F0\n", MB) + b"0Q", "action 'Q'", "250001:1", "0Q", memory=24),
    "many cells": Huge(
        lambda: numbered(b"%dF0,", 2 * MB) + b"0Q", "action 'Q'", shown="0Q", memory=24
    ),
    "a missing stage": Huge(
        lambda: numbered(b"%dF0,", 2 * MB) + b"999999999F0",
        "is on no rank, though stage 999999999 is on one",
        memory=24,
    ),
    "not modelled": Huge(
        lambda: numbered(b"%dUNSHARD,", 4 * MB) + b"0Q", "action 'Q'", shown="0Q", memory=8
    ),
    "only not modelled": Huge(
        lambda: numbered(b"%dRESHARD,", 4 * MB), "holds no action", "1:1", memory=8
    ),
    "nesting": Huge(lambda: fill(b"(", 100 * MB), "is not a composite action", "1:1", "((("),
    "open part": Huge(lambda: b"(" + fill(b";", 20 * MB), "not a composite", "1:1", "(;;"),
    "empty parts": Huge(
        lambda: b"(" + fill(b";", 20 * MB) + b")OVERLAP_F_B", "an empty part", "1:2", ";;"
    ),
    "parts": Huge(
        lambda: b"(" + fill(b"0F0;", 4 * MB) + b"0Q0)OVERLAP_F_B",
        "an overlapped pair has one forward (F) and one backward (B or I)",
        "1:1",
        "(0F0;0F0;",
    ),
    "pairs": Huge(
        lambda: fill(b"(0F0;0B1)OVERLAP_F_B,", 4 * MB) + b"0Q", "action 'Q'", shown="0Q", memory=16
    ),
}
CASES = {
    **{f"{case}.sched": h for case, h in SCHED.items()},
    **{f"{c}.csv": h for c, h in CSV.items()},
}


@pytest.fixture(scope="module")
def least_memory(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The address space that it takes to refuse an empty file."""
    path = tmp_path_factory.mktemp("least") / "x.sched"
    path.touch()
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "check", str(path)],
        capture_output=True,
        check=True,
        timeout=250,
    )
    return int(done.stdout) * 1024


Check = Callable[[str, bytes, int], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def check_limited(tmp_path: Path, least_memory: int) -> Check:
    """`schedir check` of a file, with so many times its size of memory, and time in proportion."""

    def run(name: str, content: bytes, memory: int) -> subprocess.CompletedProcess[str]:
        path = tmp_path / name
        path.write_bytes(content)
        address_space = least_memory + 16 * MB + memory * len(content)
        seconds = 10 + len(content) // (2 * MB)
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(address_space), str(seconds), "check", name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=250,
        )
        path.unlink()  # the directories of the last runs are kept
        return done

    return run


@sweep("name", CASES, quick=["token.sched", "many actions.sched", "pairs.csv", "cells.csv"])
def test_huge_garbage(check_limited: Check, name: str) -> None:
    case = CASES[name]
    done = check_limited(name, case.content(), case.memory)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[-1000:]
    assert len(done.stderr) < 1000
    warnings, _, shown = without_page(done.stderr)[0].partition("error: ")
    assert len(warnings.splitlines()) == name.startswith("only not modelled")
    header, *excerpt = shown.splitlines()
    assert re.match(f"{name}:{case.place}: ", header)
    assert case.message in header
    if case.shown:
        line, caret = excerpt
        assert line[caret.index("^") :].startswith(case.shown)


@sweep("between", ["\n", "# comment\n", "  \t\r\n"], quick=["# comment\n"])
def test_huge_but_right(check_limited: Check, between: str) -> None:
    text = schedir.dumps(schedir.build("1f1b", ranks=2, microbatches=2)).replace(" 0B0 ", "\n 0B0 ")
    text = text.replace("\n", "\n" + between * (3 * MB // len(between)), 6)
    done = check_limited("x.sched", text.encode(), 4)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("x.sched: clean under rank")


@long
def test_a_million_ranks_get_their_verdict(check_limited: Check) -> None:
    content = START + b"placement 0\n" + numbered(b"rank %d:\n", 13 * MB)
    done = check_limited("x.sched", content, 16)
    assert (done.returncode, done.stderr) == (1, "see: schedir docs S105\n")
    assert "S105" in done.stdout
    assert len(done.stdout) < 10_000
