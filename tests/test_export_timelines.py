"""`export` to formats that hold timelines, with a format of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

import schedir
from schedir.cli import export
from schedir.render.outputs import TIMELINES, Written
from schedir.render.text import Piece
from schedir.simulator import Timeline
from tests.command_line import Run
from tests.literals import listed


def times(timeline: Timeline, *, memory: bool = False) -> Written:
    kept = "with memory" if memory else "without"
    return Written([Piece(f"{timeline.makespan} {kept}\n")], ["a send"])


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(export, "TIMELINES", {**TIMELINES, "times": times})
    monkeypatch.setitem(export._EXTENSIONS, ".times", ("times",))
    return run


def test_a_timeline_is_simulated_and_written(run: Run) -> None:
    expected = "33 without\n"
    assert run("export", "1f1b", "--format", "times") == (0, expected, "warning: a send\n")
    assert run("export", "1f1b", "-o", "it.times") == (0, "", "warning: a send\n")
    assert Path("it.times").read_text() == expected
    _, out, _ = run("export", "1f1b", "--format", "times", "--memory")
    assert out == "33 with memory\n"


def test_what_runs_nowhere_has_no_timeline(run: Run) -> None:
    Path("bad.sched").write_text(schedir.dumps(listed(1, "0", "0B0 0F0")))
    code, out, err = run("export", "bad.sched", "-o", "it.times")
    assert (code, out) == (1, "")
    assert "error[S" in err
    assert not Path("it.times").exists()


def test_options_that_a_format_does_not_take_are_refused(run: Run) -> None:
    for argv, said in (
        ("times --compute-only", "--compute-only is for sched, torch-csv; times does"),
        ("torch-csv-comms --compute-only", "--compute-only is for sched, torch-csv; torch-csv-co"),
        ("sched --memory", "--memory is for svg, png, pdf, html, times; sched does not take it"),
        ("perfetto --memory", "--memory is for svg, png, pdf, html, times; perfetto does not"),
        ("svg --width 1cm", "a picture is at least 8cm wide, or 42 letters, not 1cm"),
    ):
        assert said in run.refuses("export", "1f1b", "--format", *argv.split())
