"""`export` to formats that hold timelines, with a format of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

import schedir
from schedir.cli import export
from schedir.render import Output, Page
from schedir.render.outputs import Written
from schedir.render.text import Piece
from schedir.simulator import Timeline
from tests.command_line import Run
from tests.literals import listed


def _write(timeline: Timeline, page: Page) -> Written:
    against = "alone" if page.against is None else f"against {page.against.makespan}"
    memory = "with memory" if page.memory else "without"
    return Written([Piece(f"{page.subject} {timeline.makespan} {against} {memory}\n")], ["a send"])


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    times = Output("export", "times", "timeline", "the makespan", _write, extension=".times")
    monkeypatch.setitem(export._FORMATS, "times", times)
    monkeypatch.setattr(export, "_EXTENSIONS", [*export._EXTENSIONS, ".times"])
    return run


def test_a_timeline_is_simulated_and_written(run: Run) -> None:
    expected = "1f1b 33 alone without\n"
    assert run("export", "1f1b", "--format", "times") == (0, expected, "warning: a send\n")
    assert run("export", "1f1b", "-o", "it.times") == (0, "", "warning: a send\n")
    assert Path("it.times").read_text() == expected
    _, out, _ = run("export", "1f1b", "--format", "times", "--memory")
    assert out == "1f1b 33 alone with memory\n"


def test_what_runs_nowhere_has_no_timeline(run: Run) -> None:
    Path("bad.sched").write_text(schedir.dumps(listed(1, "0", "0B0 0F0")))
    code, out, err = run("export", "bad.sched", "-o", "it.times")
    assert (code, out) == (1, "")
    assert "error[S" in err
    assert not Path("it.times").exists()


def test_options_of_the_other_kind_are_refused(run: Run) -> None:
    err = run.refuses("export", "1f1b", "--format", "times", "--compute-only")
    assert "--compute-only is for lists of actions; times holds a timeline" in err
    err = run.refuses("export", "1f1b", "--memory")
    assert "--memory is for timelines; sched holds a list of actions" in err
