"""What objects show of themselves: in Python, in a notebook that is executed, and in rich."""

from __future__ import annotations

import io
import pickle
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from rich.console import Console

import schedir
from schedir import Band, CostModel, Schedule, Timeline
from schedir.finder import Found, find
from schedir.runtime.call import CallLosses, StepResult
from tests.command_line import runner

SVG = "{http://www.w3.org/2000/svg}svg"
SHAPE = "4 ranks, 4 stages, 8 microbatches"
BAND = Band(np.array([1, 2]))
BROKEN = Schedule.of("mine", [0, 1], ["0F0 0F1 0B0 0B1", "1F0 1B1"])


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return schedir.build("1f1b", ranks=4, microbatches=8)


@pytest.fixture(scope="module")
def line(schedule: Schedule) -> Timeline:
    return schedir.simulate(schedule)


@pytest.fixture(scope="module")
def found() -> Found:
    return find(2, 4, seconds=0.1)


def result(losses: CallLosses | None, waited: list[str]) -> StepResult:
    def read(what: str, value: Any) -> Any:
        waited.append(what)
        return value

    given = None if losses is None else partial(read, "loss", losses)
    times = partial(read, "busy", 0.25), partial(read, "elapsed", 0.5)
    return StepResult(given, lambda: 1.5, None, ((0, 1),), *times)


def test_a_repr_is_one_line(schedule: Schedule, line: Timeline, found: Found) -> None:
    comparison = schedir.compare(["1f1b", "zb-h1"], ranks=4, microbatches=8)
    band = Band(np.array([3, 1, 2]))
    for value, text in (
        (schedule, f"Schedule 1f1b: {SHAPE}, 164 actions"),
        (line, f"Timeline 1f1b: {SHAPE}; predicted, makespan 33"),
        (schedir.check(schedule), "Report clean under rank and every other channel model"),
        (schedir.check(BROKEN), "Report 2 errors under rank"),
        (comparison, "Comparison 2 schedules, zb-h1 is the best"),
        (found, "Found search-2x4: makespan 13, 0.00% above the lower bound"),
        (band, "Band makespan 2 (the median of 3 runs), 1.1 to 2.9 in nine of ten"),
    ):
        assert repr(value) == f"<{text}>"


def test_str_is_what_the_command_prints(
    schedule: Schedule, line: Timeline, found: Found, capsys: pytest.CaptureFixture[str]
) -> None:
    run, shape = runner(capsys), ("--ranks", "4", "--microbatches", "8")
    shown = run("show", "1f1b", *shape)[1]
    assert f"{schedule}\n" == f"{line}\n" == shown
    assert f"{schedir.check(schedule)}\n" == run("check", "1f1b", *shape)[1]
    targets = ["1f1b", "zb-h1"]
    comparison = schedir.compare(targets, ranks=4, microbatches=8)
    assert f"{comparison}\n" == run("compare", *targets, *shape)[1]
    searched = run("search", "--ranks", "2", "--microbatches", "4", "--seconds", "0.1")[2]
    assert str(found).splitlines()[:3] == searched.splitlines()[:3]
    options: dict[str, dict[str, Any]] = {
        "": {},
        "--width 60": {"width": 60},
        "--from 5 --to 12": {"start": 5, "end": 12},
    }
    for given, arguments in options.items():
        line.show(**arguments)
        assert capsys.readouterr().out == run("show", "1f1b", *shape, *given.split())[1]


def test_what_makes_no_sense_is_shown_as_it_is() -> None:
    assert str(BROKEN) == schedir.dumps(BROKEN).rstrip()
    assert schedir.dumps(BROKEN) in BROKEN._repr_html_()
    nowhere = Schedule.of("mine", [0, 1], ["0F0 0B7", "1F0"], microbatches=1)
    wrong = Timeline(nowhere, np.zeros(3), np.ones(3))
    for text in (str(wrong), wrong._repr_html_()):
        assert "unknown stage or microbatch" in text
    assert repr(nowhere) == "<Schedule mine: 2 ranks, 2 stages, 1 microbatch, 3 actions>"
    unknown = Timeline(BROKEN, np.full(6, np.nan), np.full(6, np.nan))
    assert "makespan 0" in str(unknown)
    ElementTree.fromstring(unknown._repr_html_())


def test_equality_hashes_and_pickles_are_as_ever(line: Timeline) -> None:
    again = pickle.loads(pickle.dumps(BROKEN))
    assert again == BROKEN
    assert hash(again) == hash(BROKEN)
    assert repr(again) == repr(BROKEN)
    assert pickle.loads(pickle.dumps(BAND)) == BAND


def test_a_result_waits_for_its_loss_only_where_that_is_read() -> None:
    waited: list[str] = []
    step = result(CallLosses(2.5, 64, (2.5,)), waited)
    assert repr(step) == "<StepResult its loss is not read yet>"
    assert not waited
    assert str(step) == ("loss 2.5 over 64 samples, 0.5 s, of them 0.25 s in compute")
    assert waited == ["loss", "elapsed", "busy"]
    assert repr(step) == "<StepResult loss 2.5>"
    inferred = result(None, waited)
    assert repr(inferred) == "<StepResult without a loss>"
    assert str(inferred).startswith("inference has no loss, ")


def test_rich_draws_what_a_terminal_does(line: Timeline) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=60, height=40)
    console.print(line)
    console.print(schedir.compare(["1f1b", "zb-h1"], ranks=4, microbatches=8))
    text = screen.getvalue()
    assert text.startswith("╭─ 1f1b: 4 ranks")
    assert "bubble" in text[text.index("schedule ") :]
    assert max(map(len, text.splitlines())) <= 60


def test_nothing_in_a_page_of_html_is_taken_for_markup() -> None:
    evil = Schedule.of("<b>&'", [0], ["0F0 0B0"])
    several = (evil, schedir.simulate(evil), schedir.check(evil), schedir.compare([evil]))
    for value in several:
        page = value._repr_html_()
        assert "<b>" not in page
        assert "&lt;b&gt;&amp;" in page
    ElementTree.fromstring(schedir.simulate(evil).svg(title='</text><script>"#ff0000"'))


NOTEBOOK = """
import schedir
schedule = schedir.build("1f1b", ranks=2, microbatches=3)
line = schedir.simulate(schedule)
---
schedule
---
line
---
schedir.check(schedule)
---
comparison = schedir.compare([schedule, "zb-h1"])
comparison
---
schedir.Band([1, 2, 3])
---
line.show(width=60)
---
comparison.to_pandas()[["target", "makespan"]]
"""


def test_a_notebook_draws_them(tmp_path: Path) -> None:
    made: Any = nbformat.v4
    cells = [made.new_code_cell(code) for code in NOTEBOOK.split("---\n")]
    client = NotebookClient(
        made.new_notebook(cells=cells),
        timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    _, *outputs = (cell["outputs"] for cell in client.execute()["cells"])
    assert [len(output) for output in outputs] == [1] * 7
    drawn, line, report, comparison, band, shown, frame = (output[0] for output in outputs)
    for picture in (drawn, line):
        assert ElementTree.fromstring(picture["data"]["text/html"]).tag == SVG
        assert "1f1b: 2 ranks, 2 stages, 3 microbatches" in picture["data"]["text/plain"]
    assert "<pre>1f1b: clean under rank" in report["data"]["text/html"]
    rows = ElementTree.fromstring(comparison["data"]["text/html"]).findall("tr")
    assert [row[0].text for row in rows] == ["schedule", "zb-h1", "1f1b"]
    assert "in nine of ten" in band["data"]["text/html"]
    assert shown["text"].startswith("1f1b: 2 ranks")
    assert re.search(r"zb-h1\s+\d", frame["data"]["text/plain"])


def test_pandas_is_asked_for_where_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = schedir.compare(["1f1b"], costs=CostModel(unit="ms"))
    frame = comparison.to_pandas()
    assert frame.loc[0, "makespan"] == comparison.rows[0].makespan
    assert frame.loc[0, "unit"] == "ms"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(schedir.SchedirError, match="pip install pandas"):
        comparison.to_pandas()
