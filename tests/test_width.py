"""Drawings end and stay within their width, however unequal what they draw takes."""

from __future__ import annotations

import io
import json
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedir import CostModel, Kind, Timeline
from schedir.render import timeline_text
from schedir.render.palette import shade
from schedir.render.terminal_timeline import overview_blocks, timeline_blocks
from schedir.render.text import Piece, plain, write_to_terminal
from tests.command_line import runner
from tests.sweeps import examples, sweep
from tests.timelines import simulated

MOST = 10_000 + len("rank 0  ")


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def expect_all_drawn(line: Timeline, against: Timeline | None = None) -> None:
    """Every output of a timeline comes to its end, within its width, and holds numbers alone."""
    both = [line] if against is None else [line, against]
    assert widest(plain(timeline_blocks(both))) <= MOST
    rows = re.findall(r"(?m)^rank \d.*", plain(timeline_blocks(both, 40, fit=True)))
    assert rows
    assert all(len(row) <= 40 for row in rows)
    screen = io.StringIO()
    write_to_terminal(overview_blocks(both, 80, 24), screen, 80, colour=False)
    assert widest(screen.getvalue()) <= 80
    picture = ElementTree.fromstring(line.svg(against=against))
    numbers = re.findall(r"[-\d.]*(?:nan|inf|e[+-]?\d)[-\d.]*", str(picture.attrib))
    assert not numbers
    width = float(picture.attrib["width"])
    assert 0 < width < 2000
    for box in picture.iter():
        for name in ("x", "x1", "x2", "width"):
            if re.fullmatch(r"[-\d.einfa]+", box.get(name, "")):
                assert 0 <= float(box.get(name, "")) <= width + 1
    whole = line.html(against)
    assert not re.search(r"\b(?:NaN|Infinity)\b", re.sub(r"(?s)<script>.*?</script>", "", whole))


TIMES = st.sampled_from([0, 5e-324, 1e-300, 1e-9, 1, 3.7, 1e9, 1e15])


@examples(60)
@example(1, 1, 2, 1e12, 0, False)
@example(0, 0, 0, 1e12, 0, False)
@example(1, 1, 2, 0, 1e9, False)
@example(1e-9, 1e9, 2, 0, 0, False)
@example(1e-300, 1e-300, 1e-300, 0, 1e15, False)
@example(5e-324, 5e-324, 5e-324, 0, 0, False)
@given(*[TIMES] * 5, st.booleans())
def test_any_ratio_of_times(
    first: float, second: float, backward: float, step: float, latency: float, both: bool
) -> None:
    costs = CostModel(forward=(first, second), backward=backward, optim_step=step, latency=latency)
    expect_all_drawn(
        simulated("1f1b", 2, 3, costs), simulated("fill-drain", 2, 3) if both else None
    )


def test_what_labels_have_room_for_is_drawn_as_ever() -> None:
    line = simulated("1f1b", 2, 3, CostModel(latency=30))
    whole = timeline_text(line)
    needed = max(len(row) for row in whole.splitlines() if row.startswith("rank 0"))
    assert "F0" in whole
    assert plain(timeline_blocks([line], needed + 9, fit=True)) == whole
    narrow = plain(timeline_blocks([line], needed - 9, fit=True))
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


def test_a_trace_of_it_has_its_times() -> None:
    line = simulated("1f1b", 2, 3, CostModel(optim_step=1e12, unit="us"))
    events = json.loads(line.perfetto())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert math.isclose(max(ends) - min(e["ts"] for e in events if e["ph"] == "X"), line.makespan)


@pytest.mark.parametrize(
    "command",
    [
        "show 1f1b --ranks 16 --microbatches 64",
        "show 1f1b --microbatches 40 --full",
        "show zb-h1 --why",
        "compare 1f1b interleaved-1f1b zbv pipedream --cost activation_bytes=1e9",
        "list",
        "explain",
    ],
)
def test_a_pipe_is_as_wide_as_columns_says(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, argv = runner(capsys), command.split()
    whole = run(*argv)[1]
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        code, narrow, err = run(*argv)
        assert (code, err) == (0, "")
        assert "\x1b" not in narrow
        assert widest(narrow) <= int(columns)
    for nothing in ("", "0", "wide"):
        monkeypatch.setenv("COLUMNS", nothing)
        assert run(*argv)[1] == whole


def test_json_in_a_pipe_is_as_ever(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner(capsys)
    argv = ("compare", "1f1b", "x" * 200, "--json")
    whole = run(*argv)
    monkeypatch.setenv("COLUMNS", "50")
    assert run(*argv) == whole
    assert json.loads(run("show", "1f1b", "--json")[1])["makespan"] == 33


@sweep("name", ["1f1b", "interleaved-1f1b", "zb-h1", "fill-drain"], quick=["1f1b", "fill-drain"])
def test_a_column_of_several_kinds_is_marked_as_such(name: str) -> None:
    line = simulated(name, 16, 64)
    text = plain(timeline_blocks([line], 80, fit=True))
    rows = re.findall(r"(?m)^rank +\d+  (.*)$", text)
    unit = float(re.findall(r"a column is\s([\d.]+)\sof\stime", text)[0])
    columns = round(line.makespan / unit)
    scale = (80 - len("rank 15  ")) / line.makespan
    assert abs(columns - 71) <= 2
    seen = set()
    for row, spans in zip(rows, line.spans, strict=True):
        for column, mark in enumerate(row):
            takes: dict[str, float] = {}
            for span in spans:
                overlap = min(span.end * scale, column + 1) - max(span.start * scale, column)
                if overlap > 0:
                    kind = span.action.kind.value
                    takes[kind] = takes.get(kind, 0) + overlap
            busy = sum(takes.values())
            if mark == " ":
                assert busy < 0.5 + 1e-6
            elif mark == "+":
                assert max(takes.values()) < 0.75 * busy + 1e-6
            else:
                assert takes[mark] >= 0.75 * busy - 1e-6
            seen.add(mark)
    assert "+" in seen or name == "fill-drain"
    assert ("+ several kinds in turn" in " ".join(text.split())) == ("+" in seen)


def test_the_mark_of_several_kinds_is_shaded_by_their_share() -> None:
    line = simulated("1f1b", 16, 64)
    pieces = [piece for piece in timeline_blocks([line], 80, fit=True) if isinstance(piece, Piece)]
    mixed = {piece.style for piece in pieces if piece.text == "+" and piece.style}
    ends = [bytes.fromhex(shade(kind)[-6:]) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    for style in mixed:
        for part, *both in zip(bytes.fromhex(style[-6:]), *ends, strict=True):
            assert min(both) <= part <= max(both)
    assert len(mixed) > 1
