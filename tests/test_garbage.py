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
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import ParseError, Schedule
from schedir.cli.terminal import tell
from schedir.ir import dumps_torch_csv, loads_torch_csv
from schedir.passes import strip_communication
from tests.built_in import NAMES
from tests.command_line import Run, without_page
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
ODD = [*"\0\x0b\x0c\x1c\x85\xa0\u2028\u3000\ufeff\ud800\u0660\xb2"]
TOKENS = ["0F0", "0F1@0", "1B0", "2I0", "0W0", "0REDUCE_GRAD", "0OPTIM_STEP", "1RECV_ACT0", "F"]
TOKENS += ["0F999999999", "0SEND_F0", "1RECV_B0", "0UNSHARD", "0RESHARD1", ")OVERLAP_F_B"]
TOKENS += ["(0F0;0B0)OVERLAP_F_B", "(0F1;0B0)", "(0SEND_ACT0;0RECV_GRAD0)"]
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
        cut, insert, replace = head + two + tail, head + new + one + two + tail, head + new + tail
        duplicate, transpose = head + one + one + two + tail, head + two + one + tail
        accidents = [cut, head, insert, replace, duplicate, transpose]
        content = draw(st.sampled_from(accidents))
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
        (SOUND.replace("placement 0", "placement 0,"), 4, 13, "an empty part"),
        (SOUND.replace("placement 0", "placement \u0660"), 4, 11, "not '\u0660'"),
        (SOUND.replace("placement 0", "placement 0\nplacement 0"), 5, 1, "the first is line 4"),
        (SOUND.replace("placement 0", "placement 0 0,2"), 4, 13, "names rank 2, but there are 1"),
        (SOUND.replace("0B0\n", "0B0\n\n\n  0Q0"), 8, 3, "unknown action kind 'Q'"),
        (SOUND.replace("rank 0:", "rank 1:"), 6, 1, "ends without a 'rank 0:' line"),
        (SOUND + "rank 0:", 6, 1, "a second 'rank 0:' line; the first is line 5"),
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
        ("0OPTIM_STEP", 1, 1, "unknown action kind 'OPTIM_STEP'"),
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
        ("0F0,(0F1; 0Q1 )OVERLAP_F_B", 1, 11, "unknown action kind 'Q'"),
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
    said = "left out what schedir.shard lists anew: 9 UNSHARD, 9 RESHARD (0UNSHARD 0RESHARD "
    assert said in caplog.text
    assert caplog.messages[0].endswith(" 3UNSHARD 3RESHARD and others)")


# What is no file, and what is shown of one.


@pytest.mark.parametrize("suffix", [".sched", ".csv"])
def test_what_is_no_file(run: Run, suffix: str) -> None:
    for name in ("dir", "fifo", "zero"):
        path = Path(f"{name}{suffix}")
        if name == "dir":
            path.mkdir()
        elif name == "fifo":
            os.mkfifo(path)  # nobody writes to it
        else:
            path.symlink_to("/dev/zero")
        assert run("check", str(path))[2] == f"error: {path}: not a regular file\n"
    assert "no such file" in run.refuses("check", f"none{suffix}")


def test_more_than_memory_holds_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(content: bytes, file: str) -> Schedule:
        raise MemoryError

    monkeypatch.setattr("schedir.library.targets.loads", too_much)
    Path("a.sched").write_text(SOUND)
    said = "error: a.sched: too large for the memory of this machine\n"
    assert run.refuses("check", "a.sched") == said


@given(
    st.lists(st.sampled_from(["a", "é", "\n", "\r", "a" * 60]), max_size=12).map("".join),
    st.data(),
)
def test_the_line_that_is_shown(
    tmp_path_factory: pytest.TempPathFactory, text: str, data: st.DataObject
) -> None:
    """Whatever the line holds, its caret stands under the place."""
    path = tmp_path_factory.getbasetemp() / "shown.sched"
    path.write_bytes(text.encode())
    lines = text.split("\n")
    number = data.draw(st.integers(1, len(lines)))
    line = lines[number - 1].replace("\r", " ") + " "
    column = data.draw(st.integers(1, len(line)))
    with redirect_stderr(io.StringIO()) as stderr:
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
NAME = b"schedir 1\nname "
STAGES = START + b"placement "
RANK = START + b"placement 0\nrank 0: "
ANY = "[0-9]+:[0-9]+"
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


def repeated(piece: bytes, megabytes: int) -> bytes:
    """A piece over and over; with numbers from 0 on, where it has a place for them."""
    size = megabytes * MB
    if b"%d" not in piece:
        return piece * (size // len(piece))
    return b"".join(piece % (number % MB) for number in range(size // len(piece % MB)))


# A file: its name, how it begins, the piece that is repeated, to how many megabytes, how it ends;
# the message that it ends in, where, and what its caret points at; how many times its size it may
# take: twice for its bytes and their text, once for a token, and, as it has millions of actions,
# stages or ranks, what a schedule needs for these.
CASES: dict[str, list[Any]] = {
    name: case
    for name, *case in (
        ("token.sched", RANK, b"F", 100, b"", "is not an action", "5:9", "FFF", 4),
        ("kind.sched", RANK + b"0", b"F", 5, b"", "unknown action kind", "5:9", "0FF", 4),
        ("first word.sched", b"", b"(", 20, b"", "must be 'schedir 1'", "1:1", "(((", 4),
        ("NULs.sched", b"", b"\0", 10, b"", "no text, but binary: byte 0x00", "1:1", "", 4),
        ("name.sched", NAME, b"a ", 10, b"", "the file ends", ANY, "", 4),
        ("bad name.sched", NAME, b"a", 5, b"\1", "can't stand in", ANY, "", 4),
        ("commas.sched", STAGES + b"0", b",", 20, b"", "an empty part", "4:13", ",,,", 4),
        ("replicas.sched", STAGES, b"%d,", 2, b"0", "rank 0 is named twice", ANY, "", 24),
        ("blanks.sched", RANK, b" ", 20, b"0Q", "kind 'Q'", "5:20000009", "0Q", 4),
        ("actions.sched", RANK, b"0F0 ", 5, b"0Q", "kind 'Q'", "5:5000009", "0Q", 8),
        ("many actions.sched", RANK, b"0F%d ", 2, b"0Q", "kind 'Q'", ANY, "0Q", 24),
        ("open entry.sched", RANK + b"(", b"0F0;", 10, b"", "lacks its ')'", "5:9", "(0F0;", 4),
        ("nesting.sched", RANK, b"(", 10, b"", "lacks its ')'", "5:9", "(((", 4),
        ("empty parts.sched", RANK + b"(", b";", 20, b")", "an empty part", "5:10", ";;", 4),
        ("parts.sched", RANK + b"(", b"0F0;", 4, b"0Q0)", "kind 'Q'", "5:4000010", "0Q0", 8),
        ("many parts.sched", RANK + b"(", b"%dF0;", 2, b"0F0)", "has one forward", "5:9", "(", 32),
        (
            *("a batch.sched", RANK + b"(", b"%dSEND_ACT0;", 2, b"1SEND_ACT0)"),
            *("1SEND_ACT0 is in the entry 2 times", "5:9", "(", 32),
        ),
        ("entries.sched", RANK, b"(0F%d;1B1) ", 2, b"0Q", "kind 'Q'", ANY, "0Q", 32),
        ("stages.sched", STAGES, b"0 ", 4, b"x", "not 'x'", ANY, "x", 12),
        ("many stages.sched", STAGES, b"%d ", 2, b"x", "not 'x'", ANY, "x", 24),
        (
            *("ranks.sched", START, b"rank %d:\n", 3, b"rank 7:"),
            *("a second 'rank 7:' line; the first is line 11", ANY, "rank 7:", 16),
        ),
        ("values.sched", b"schedir", b" 1", 10, b"", "takes one value", "1:11", "1 1", 4),
        ("lines.sched", b"", b"\n", 10, b"", "the file ends without", "10000001:1", "", 4),
        ("CR LFs.sched", RANK, b"\r\n", 10, b" 0Q", "'Q'", "5000005:2", "0Q", 4),
        ("CRs.sched", RANK, b"\r", 10, b"", r"'\r' is not an action", "5:9", "", 4),
        ("comments.sched", START, b"#\n", 4, b"x", "'x'", "2000004:1", "x", 4),
        ("continuations.sched", RANK, b"\n 0F0", 5, b"\n 0Q", "'Q'", "1000006:2", "0Q", 8),
        ("continued header.sched", b"schedir", b"\n 1", 6, b"", "takes one value", "3:2", "1", 4),
        (  # one wide character makes four bytes of each
            *("bad byte.sched", "\U0001f600".encode(), b"a", 10, b"\xff"),
            *("byte 0xff is not UTF-8", "1:10000002", "\ufffd", 12),
        ),
        ("cell.csv", b"", b"A", 100, b"", "is not an action", "1:1", "AAA", 4),
        ("empty cells.csv", b"", b",", 100, b"0Q", "'Q'", "1:100000001", "0Q", 4),
        ("empty rows.csv", b"", b"\n", 20, b"", "holds no action", "1:1", "", 4),
        ("idle ranks.csv", b"0F0", b"\n", 2, b"0Q", "'Q'", "2000001:1", "0Q", 16),
        ("cells.csv", b"", b"0F0,", 5, b"0Q", "action kind 'Q'", "1:5000001", "0Q", 8),
        ("rows.csv", b"", b"0F0\n", 1, b"0Q", "action kind 'Q'", "250001:1", "0Q", 24),
        ("many cells.csv", b"", b"%dF0,", 2, b"0Q", "action kind 'Q'", ANY, "0Q", 24),
        (
            *("a missing stage.csv", b"", b"%dF0,", 2, b"999999999F0"),
            *("is on no rank, though stage 999999999 is on one", ANY, "", 24),
        ),
        ("not modelled.csv", b"", b"%dUNSHARD,", 4, b"0Q", "action kind 'Q'", ANY, "0Q", 8),
        ("only not modelled.csv", b"", b"%dRESHARD,", 4, b"", "holds no action", "1:1", "", 8),
        ("nesting.csv", b"", b"(", 100, b"", "is not a composite action", "1:1", "(((", 4),
        ("open part.csv", b"(", b";", 20, b"", "not a composite", "1:1", "(;;", 4),
        ("empty parts.csv", b"(", b";", 20, b")OVERLAP_F_B", "an empty part", "1:2", ";;", 4),
        (
            *("parts.csv", b"(", b"0F0;", 4, b"0Q0)OVERLAP_F_B"),
            *("an overlapped pair has one forward (F) and one backward (B or I)", "1:1"),
            *("(0F0;0F0;", 4),
        ),
        ("pairs.csv", b"", b"(0F0;0B1)OVERLAP_F_B,", 4, b"0Q", "action kind 'Q'", ANY, "0Q", 16),
    )
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


@sweep("name", CASES, quick=["many actions.sched", "pairs.csv"])
def test_huge_garbage(check_limited: Check, name: str) -> None:
    start, piece, megabytes, end, message, place, pointed_at, memory = CASES[name]
    done = check_limited(name, start + repeated(piece, megabytes) + end, memory)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[-1000:]
    assert len(done.stderr) < 1000
    warnings, _, shown = without_page(done.stderr)[0].partition("error: ")
    assert len(warnings.splitlines()) == name.startswith("only not modelled")
    header, *excerpt = shown.splitlines()
    assert re.match(f"{name}:{place}: ", header)
    assert message in header
    if pointed_at:
        line, caret = excerpt
        assert line[caret.index("^") :].startswith(pointed_at)


@sweep("between", ["\n", "# comment\n", "  \t\r\n"], quick=["# comment\n"])
def test_huge_but_right(check_limited: Check, between: str) -> None:
    text = schedir.dumps(schedir.build("1f1b", ranks=2, microbatches=2)).replace(" 0B0 ", "\n 0B0 ")
    text = text.replace("\n", "\n" + between * (3 * MB // len(between)), 6)
    done = check_limited("x.sched", text.encode(), 4)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("x.sched: clean under rank")


@long
def test_a_million_ranks_get_their_verdict(check_limited: Check) -> None:
    content = STAGES + b"0\n" + repeated(b"rank %d:\n", 13)
    done = check_limited("x.sched", content, 16)
    assert (done.returncode, done.stderr) == (1, "see: schedir docs S105\n")
    assert "S105" in done.stdout
    assert len(done.stdout) < 10_000
