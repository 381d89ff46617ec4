"""Nobody's text rules the terminal, the log of a CI or a page: it is escaped wherever it is shown,
and what is no text is named and not shown."""

from __future__ import annotations

import json
import os
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedir
from schedir import CostModel
from schedir.ir import printable
from schedir.library import targets
from schedir.simulator import save_timelines
from tests.command_line import DEADLOCK, Run

EVIL = "e\x1b[31mv\x07i\u202el\n::error::no"
SOUND = schedir.dumps(schedir.build("1f1b", ranks=2, microbatches=2))
FAILS = """\
from schedir import schedule

@schedule("mine")
def mine(pipe, rank):
    raise ValueError({text!r})
    yield
"""
BINARY = b"\x89PNG\r\n\x1a\n\x00\x1b[31m\xff\xfe"


def expect_harmless(*shown: str) -> None:
    for text in shown:
        lines = text.split("\n")
        assert all(line.isprintable() for line in lines), text

    assert not [line for line in lines if re.match(r"\s*(::[^:]|##\[)", line)]


@given(st.text(), st.sampled_from(["", " ", "\t"]))
def test_printable_is_one_line_of_what_was_there(text: str, blanks: str) -> None:
    expect_harmless(printable(text))
    assert "\n" not in printable(text)
    if text.isprintable() and not re.match(r"\s*(::|##\[)", text):
        assert printable(text) == text
    assert r"\x3a:" in printable(f"{blanks}::{text}")
    assert printable(printable(text)) == printable(text)


@pytest.mark.parametrize(
    "command",
    [
        *("check F", "check F --output-format concise", "check F --output-format json"),
        *("show F", "show F --why", "show F --step 1", "compare F 1f1b", "compare F 1f1b --json"),
        *("export F --format svg", "export F --format html", "export 1f1b -o F"),
        *("export 1f1b -o no/F.svg", "search -o no/F", "show 1f1b --costs F.json"),
        *("show 1f1b --set F=1", "show 1f1b F", "explain F"),
    ],
)
def test_names_of_files_and_arguments(command: str, run: Run) -> None:
    others = ["::error::no", os.fsdecode(b"\xff\x1b"), "##[error]no"]
    files = [EVIL + end for end in (".sched", ".csv", ".json", ".py", ".py:f", ":f", "")]
    files += [name + end for name in others for end in (".sched", ".py")]
    for file in files:
        if file.endswith(".sched"):
            Path(file).write_text(DEADLOCK)
        if file.endswith(".py"):
            Path(file).write_text(FAILS.format(text=EVIL))
        if file.endswith(".json"):
            Path(file).write_text('{"\\u001b[31m": [')
        _, out, err = run(*(word.replace("F", file) for word in command.split()))
        expect_harmless(out, err)


def test_what_users_code_says(run: Run) -> None:
    Path("mine.py").write_text(FAILS.format(text=EVIL))
    for argv in (["show", "mine.py"], ["check", "mine.py"], ["compare", "mine.py", "1f1b"]):
        _, out, err = run(*argv)
        assert r"e\x1b[31mv" in out + err
        expect_harmless(out, err)


WRONG = """\
from schedir import backward, schedule

@schedule("mine")
def mine(pipe, rank):
    yield backward(rank, 0)
"""


@pytest.mark.parametrize("name", [f"{EVIL}.py", "::error::no.py", os.fsdecode(b"\xff.py")])
def test_names_of_files_whose_lines_are_wrong(name: str, run: Run) -> None:
    Path(name).write_text(WRONG)
    shape = ["--ranks", "1", "--microbatches", "1"]
    for form in ("full", "concise", "json"):
        code, out, err = run("check", name, *shape, "--output-format", form)
        assert code == 1
        expect_harmless(out, err)
    code, out, _ = run("check", name, *shape, "--output-format", "github")
    assert all(re.match("::(error|warning|notice) file=", line) for line in out.splitlines())
    Path(name).write_text(WRONG.replace("yield", "yield forward(rank, 0)\n    yield"))
    Path(name).write_text(Path(name).read_text().replace("backward, s", "backward, forward, s"))
    assert run("export", name, *shape, "-o", "a.html")[0] == 0


def test_names_of_installed_schedules(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint(EVIL, "schedir.schedules.fill_drain:fill_drain", "schedir.schedules"),
        EntryPoint("gone", f"{EVIL}:x", "schedir.schedules"),
    ]
    monkeypatch.setattr(targets, "_entry_points", lambda: entries)
    code, out, err = run("list")
    assert code == 0
    assert r"e\x1b[31mv" in out
    assert "gone" in err
    expect_harmless(out, err)


@pytest.mark.parametrize("name", ["a%0A,b:c\n::error::d.sched", "e\x1b[2J.sched"])
def test_annotations(name: str, run: Run) -> None:
    Path(name).write_text(DEADLOCK)
    code, out, _ = run("check", name, "--output-format", "github")
    (line,) = out.splitlines()
    assert code == 1
    assert line.isprintable()
    named = re.match(r"::error file=([^,:]*),title=[^,:]*::", line)
    assert named is not None
    assert unquote(named[1]) == name.replace("\x1b", r"\x1b")


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\x00b", "a\x85b", "a\u202eb", "a\ufffeb", "a\nb"])
def test_no_schedule_has_a_name_that_xml_or_a_terminal_minds(name: str) -> None:
    with pytest.raises(ValueError, match="name must be one printable line"):
        schedir.Schedule.of(name, [0], [[]], 1)


def test_names_are_text_in_pictures_and_pages(run: Run) -> None:
    name = "</title>]]><script>&amp;'\" é 🚀 {x}"
    Path("a.sched").write_text(SOUND.replace("name 1f1b", f"name {name}"), encoding="utf-8")
    for file in ("a.svg", "a.html", "a.json"):
        assert run("export", "a.sched", "-o", file)[0] == 0
    title = ElementTree.parse("a.svg").getroot().find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text is not None
    assert title.text.startswith(name)
    assert name in Path("a.json").read_text() or json.loads(Path("a.json").read_text())
    assert "]]><script>" not in Path("a.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [BINARY, b"\x00" * 10, "schedir 1\n".encode("utf-16")])
@pytest.mark.parametrize(
    "command", ["show b.sched", "check b.csv", "show b.json", "show 1f1b --costs b.json"]
)
def test_what_is_no_text_is_named_and_not_shown(content: bytes, command: str, run: Run) -> None:
    for file in ("b.sched", "b.csv", "b.json"):
        Path(file).write_bytes(content)
    err = run.refuses(*command.split())
    named = r"error: b\.(sched|csv|json):\d+:\d+: no text, but binary: byte 0x.. is .*\n"
    assert re.fullmatch(named, err)
    expect_harmless(err)


def test_a_byte_order_mark_is_no_content(run: Run) -> None:
    def mark(file: str) -> None:
        Path(file).write_bytes(b"\xef\xbb\xbf" + Path(file).read_bytes())

    Path("a.sched").write_text(SOUND)
    Path("a.csv").write_text("0F0,0B0\n")
    save_timelines([schedir.simulate(schedir.loads(SOUND))], "a.json")
    CostModel(forward=2).save("costs.json")
    argvs = [["show", "a.sched"], ["show", "a.csv"], ["show", "a.json"]]
    argvs += [["show", "1f1b", "--costs", "costs.json"]]
    plain = [run(*argv) for argv in argvs]
    for file in ("a.sched", "a.csv", "a.json", "costs.json"):
        mark(file)
    assert [run(*argv) for argv in argvs] == plain
    assert {code for code, _, _ in plain} == {0}
    Path("b.sched").write_text("schedir 2\n" + SOUND)
    code, _, before = run("show", "b.sched")
    mark("b.sched")
    assert run("show", "b.sched") == (code, "", before)  # the caret too
    assert schedir.loads("\ufeff" + SOUND) == schedir.loads(SOUND)
