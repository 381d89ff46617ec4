"""Pictures that are pasted into papers: PNG and PDF, a title, a width, greys, a window of time."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import schedir
from schedir import CostModel, Kind, Timeline
from schedir.render.palette import WORDS, picture_fill
from tests.command_line import Run, runner
from tests.test_cli import on_terminal
from tests.test_svg import curves, lanes
from tests.warm import commands

CM = 96 / 2.54
"""Pixels."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return runner(capsys)


@pytest.fixture(scope="module")
def line() -> Timeline:
    return schedir.simulate(schedir.build("zb-h1", ranks=4, microbatches=8))


def size_of(picture: str) -> tuple[float, float]:
    root = ElementTree.fromstring(picture)
    return float(root.attrib["width"]), float(root.attrib["height"])


def texts(picture: str) -> list[str]:
    root = ElementTree.fromstring(picture)
    return [each.text or "" for each in root.iter() if each.tag.endswith("}text")]


def test_png_and_pdf_are_the_picture_in_its_size(run: Run, line: Timeline) -> None:
    wide, high = size_of(line.svg(width="16cm"))
    assert wide == pytest.approx(16 * CM, abs=0.01)
    png = line.png(width="16cm")
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == pytest.approx((2 * wide, 2 * high), abs=1)
    box = re.findall(rb"/MediaBox ?\[([\d. ]+)\]", line.pdf(width="16cm"))
    (page,) = ([float(side) for side in each.split()] for each in box)
    assert page == pytest.approx([0, 0, wide * 0.75, high * 0.75], abs=0.5)
    shape = ("zb-h1", "--ranks", "4", "--microbatches", "8", "--width", "16cm")
    for form in ("png", "pdf"):
        assert run("export", *shape, "-o", f"x.{form}") == (0, "", "")
    assert Path("x.png").read_bytes() == png
    assert Path("x.pdf").read_bytes().startswith(b"%PDF")


def test_bytes_go_to_a_pipe_and_to_no_terminal(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    command = ["export", "1f1b", "--format", "png"]
    program = [str(commands() / "schedir"), *command]
    piped = subprocess.run(program, capture_output=True, check=True, timeout=250)
    assert piped.stdout == schedir.simulate(schedir.build("1f1b")).png()
    on_terminal(*command)
    assert b"png is not text: write it to a file, -o x.png" in capfdbinary.readouterr().err


def test_without_the_extra_a_line_says_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    code, out, err = run("export", "1f1b", "-o", "x.png")
    assert (code, out) == (2, "")
    assert err == "error: png needs vl-convert-python: pip install 'schedir[pictures]'\n"
    assert not Path("x.png").exists()


def test_a_title_of_ones_own_and_none(run: Run, line: Timeline) -> None:
    plain = line.svg()
    assert "zb-h1: 4 ranks, 4 stages, 8 microbatches" in texts(plain)
    assert texts(line.svg(title="Mine & <yours>"))[0] == "Mine & <yours>"
    bare = line.svg(title="")
    assert texts(bare)[0].startswith("F")
    assert size_of(bare)[1] < size_of(plain)[1]
    assert ">zb-h1: 4 ranks" in bare  # what is read out
    drawn, export = schedir.simulate(schedir.build("1f1b")), ("export", "1f1b", "--format", "svg")
    assert run(*export, "--title", "Mine")[1] == drawn.svg(title="Mine")
    assert run(*export, "--no-title")[1] == drawn.svg(title="")
    assert len([t for t in texts(line.svg(title="long " * 40, width="8cm")) if "long" in t]) > 3


@pytest.mark.parametrize("width", ["8cm", "16cm", 60, "120"])
@pytest.mark.parametrize("memory", [False, True])
def test_a_width_is_that_of_all(line: Timeline, width: str | int, memory: bool) -> None:
    costs = CostModel(activation_bytes=3e9, unit="ms", forward=1234)
    for drawn in (line, schedir.simulate(line.schedule, costs)):
        picture = drawn.svg(width=width, memory=memory)
        text = str(width)
        asked = float(text[:-2]) * CM if text.endswith("cm") else 7.2 * float(text)
        assert size_of(picture)[0] == pytest.approx(asked, abs=0.01)
        for each in ElementTree.fromstring(picture).iter():
            if each.tag.endswith("}text") and each.get("x") and not each.get("text-anchor"):
                about = 0.6 * float(each.get("font-size", "12")) * len(each.text or "")
                assert float(each.attrib["x"]) + 0.8 * about < asked


@pytest.mark.parametrize("width", ["7cm", "cm", "-3", "nan", "inf", "", "16 in"])
def test_what_is_no_width_is_refused(run: Run, line: Timeline, width: str) -> None:
    with pytest.raises(schedir.SchedirError, match="a picture is at least 8cm wide"):
        line.svg(width=width)
    code, out, err = run("export", "1f1b", "--format", "svg", f"--width={width}")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_greys_keep_the_kinds_apart(line: Timeline) -> None:
    colours = set(re.findall(r'"#([0-9a-f]{6})"', line.svg(greyscale=True, memory=True)))
    assert colours
    assert all(colour[:2] == colour[2:4] == colour[4:] for colour in colours)
    lightness = {}
    for kind in (*WORDS.keys() - {Kind.OFFLOAD, Kind.RELOAD},):
        red, green, blue = bytes.fromhex(picture_fill(kind).area[1:])
        lightness[kind] = round(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    assert len(lightness) == 5
    steps = sorted(lightness.values())
    assert all(lighter - light > 25 for light, lighter in pairwise(steps))
    own = [each for kind, each in lightness.items() if picture_fill(kind).area in line.svg()]
    assert len(own) == 3
    assert {3 * f"{each:02x}" for each in own} <= colours


def test_a_window_shows_what_runs_in_it(line: Timeline) -> None:
    picture = line.svg(start=5, end=15, memory=True)
    root = ElementTree.fromstring(picture)
    (idle,) = (each for each in root.iter() if each.get("class") == "idle")
    scale = float(re.findall(r"h([\d.]+)", idle.attrib["d"])[0]) / 10
    for lane, spans in zip(lanes(picture), line.spans, strict=True):
        expected = sorted(
            (max(span.start, 5) - 5, min(span.end, 15) - 5)
            for span in spans
            if span.action.kind in WORDS and span.start < 15 and span.end > 5
        )
        found = sorted((cell.left / scale, cell.right / scale) for cell in lane.cells)
        assert found == [pytest.approx(each, abs=0.01) for each in expected]
    ticks = [text for text in texts(picture) if re.fullmatch(r"\d+", text)]
    assert {"6", "14"} <= set(ticks)
    assert "makespan 27" in picture  # of all of it
    for rank, points in enumerate(curves(picture)):
        times, amounts = line.live(rank)
        for time in np.arange(5.25, 15, 0.5):
            held = amounts[np.searchsorted(times, time, side="right") - 1]
            high = [high for x, high in points if x <= (time - 5) * scale][-1]
            assert high == pytest.approx(29 * held / 4, abs=0.05)


def test_a_window_is_drawn_in_text(run: Run, line: Timeline) -> None:
    shape = ("zb-h1", "--ranks", "4", "--microbatches", "8")
    text = run("show", *shape, "--from", "5", "--to", "15")[1]
    assert "\ntime 5..15\n" in text
    for rank, row in enumerate(re.findall(r"(?m)^rank \d  (.*)$", text)):
        inside = [s for s in line.spans[rank] if s.action.kind in WORDS and 5 <= s.start < 15]
        assert re.findall(r"[FIWB]\d+", row) == [
            f"{s.action.kind.value}{s.action.microbatch}" for s in inside
        ]
    assert "makespan 27" in text


@pytest.mark.parametrize("command", [("show", "1f1b"), ("export", "1f1b", "--format", "svg")])
@pytest.mark.parametrize("window", [("--from", "33"), ("--from", "7", "--to", "7"), ("--to", "0")])
def test_a_window_without_anything_is_refused(
    run: Run, command: tuple[str, ...], window: tuple[str, ...]
) -> None:
    code, out, err = run(*command, *window)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: there is nothing to draw from \d+ to .*: .* from 0 to 33\n", err)


@pytest.mark.parametrize("start", [-1, 27, float("nan")])
def test_a_window_is_within_the_timeline(line: Timeline, start: float) -> None:
    for draw in (line.svg, line.show):
        with pytest.raises(schedir.SchedirError, match="there is nothing to draw from"):
            draw(start=start)


@pytest.mark.parametrize(
    "look", [("--title", "x"), ("--no-title",), ("--width", "9cm"), ("--greyscale",), ("--to", "3")]
)
def test_looks_are_for_pictures_alone(run: Run, look: tuple[str, ...]) -> None:
    said = run.refuses("export", "1f1b", "--format", "html", *look)
    assert "is for svg, png, pdf; html does not take it" in said


def test_a_mark_of_an_update_can_be_seen() -> None:
    for name in ("1f1b", "interleaved-1f1b"):
        picture = schedir.simulate(schedir.build(name, ranks=16, microbatches=64)).svg()
        for lane in lanes(picture):
            assert lane.steps
            assert all(box.right - box.left >= 2 for box in lane.steps)
            assert all(box.top < 0 and box.bottom > 24 for box in lane.steps)
