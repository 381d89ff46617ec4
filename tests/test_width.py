"""Drawings end and stay within their width, however unequal what they draw takes."""

from __future__ import annotations

import io
import json
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedir
from schedir import CostModel, Timeline
from schedir.render import Page, outputs_of, timeline_text
from schedir.render.overview import overview_blocks
from schedir.render.terminal_timeline import timeline_blocks
from schedir.render.text import plain, write_to_terminal
from tests.command_line import runner

MOST = 10_000 + len("rank 0  ")
ONE_LONG = [
    CostModel(optim_step=1e12),
    CostModel(latency=1e9),
    CostModel(latency={(0, 1): 0, (1, 0): 1e15}, forward=1e-9),
    CostModel(forward=(1e-9, 1e9)),
    CostModel(forward=0, backward=0, optim_step=1e12),
    CostModel(forward=1e-300, backward=1e-300, latency=1e15),
    CostModel(forward=5e-324, backward=5e-324),
]


def line_of(costs: CostModel, name: str = "1f1b") -> Timeline:
    return schedir.simulate(schedir.build(name, ranks=2, microbatches=3), costs)


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def expect_all_drawn(line: Timeline, against: Timeline | None = None) -> None:
    """Every output of a timeline comes to its end, within its width, and holds numbers alone."""
    assert widest(plain(timeline_blocks(line, against=against))) <= MOST
    rows = re.findall(r"(?m)^rank \d.*", plain(timeline_blocks(line, 40, against, fit=True)))
    assert rows
    assert all(len(row) <= 40 for row in rows)
    screen = io.StringIO()
    write_to_terminal(overview_blocks(line, 80, 24, against), screen, 80, colour=False)
    assert widest(screen.getvalue()) <= 80
    page = Page(against=against)
    export = outputs_of("export")
    picture = ElementTree.fromstring(plain(export["svg"].write(line, page).blocks))
    numbers = re.findall(r"[-\d.]*(?:nan|inf|e[+-]?\d)[-\d.]*", str(picture.attrib))
    assert not numbers
    width = float(picture.attrib["width"])
    assert 0 < width < 2000
    for box in picture.iter():
        for name in ("x", "x1", "x2", "width"):
            if re.fullmatch(r"[-\d.einfa]+", box.get(name, "")):
                assert 0 <= float(box.get(name, "")) <= width + 1
    whole = plain(export["html"].write(line, page).blocks)
    assert not re.search(r"\b(?:NaN|Infinity)\b", re.sub(r"(?s)<script>.*?</script>", "", whole))


@pytest.mark.parametrize("costs", ONE_LONG)
def test_one_long_action_or_link_does_not_widen_the_drawing(costs: CostModel) -> None:
    expect_all_drawn(line_of(costs))


TIMES = st.sampled_from([0, 5e-324, 1e-300, 1e-9, 1, 3.7, 1e9, 1e15])


@settings(max_examples=60, deadline=None)
@given(*[TIMES] * 5, st.booleans())
def test_any_ratio_of_times(
    first: float, second: float, backward: float, step: float, latency: float, both: bool
) -> None:
    costs = CostModel(forward=(first, second), backward=backward, optim_step=step, latency=latency)
    expect_all_drawn(line_of(costs), line_of(CostModel(), "fill-drain") if both else None)


def test_what_labels_have_room_for_is_drawn_as_ever() -> None:
    line = line_of(CostModel(latency=30))
    whole = timeline_text(line)
    needed = max(len(row) for row in whole.splitlines() if row.startswith("rank 0"))
    assert "F0" in whole
    assert plain(timeline_blocks(line, needed + 9, fit=True)) == whole
    narrow = plain(timeline_blocks(line, needed - 9, fit=True))
    assert "F0" not in narrow
    assert re.search(r"a column is [\d.]+ of time", narrow)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_width_bounds_what_show_draws(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    run = runner(capsys)
    code, out, _ = run("show", "1f1b", "--microbatches", "50", "--width", str(width))
    assert code == 0
    assert out.count("\nrank 3") == 1  # on one page
    drawing = out[: out.index("\nrank  busy")]
    assert width - 20 < widest(drawing) <= width


def test_width_is_refused_where_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    run = runner(capsys)
    assert run("show", "1f1b", "--json", "--width", "80")[0] == 2
    assert "'39' is not a whole number >= 40" in run("show", "1f1b", "--width", "39")[2]


@pytest.mark.parametrize("costs", ONE_LONG[:1])
def test_a_trace_of_it_has_its_times(costs: CostModel) -> None:
    line = schedir.simulate(line_of(costs).schedule, CostModel(optim_step=1e12, unit="us"))
    text = plain(outputs_of("export")["perfetto"].write(line, Page()).blocks)
    events = json.loads(text)["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert math.isclose(max(ends) - min(e["ts"] for e in events if e["ph"] == "X"), line.makespan)
