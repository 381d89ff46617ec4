"""The HTML page of a timeline without a browser: its times, its columns, its files."""

from __future__ import annotations

import base64
import json
import re
import tomllib
import zlib
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import Schedule, Timeline
from schedir.render.html import MOST_TICKS, SCRIPTS, html_page, script, tick_for, tracks_of
from schedir.render.lanes import lanes_of
from tests.timelines import simulated

ROOT = Path(__file__).resolve().parents[1]


def line_of(*ends: float) -> Timeline:
    schedule = Schedule.of("s", [0], [[f"0F{m}" for m in range(len(ends))]])
    return Timeline(schedule, [0] * len(ends), list(ends))


@pytest.mark.parametrize(
    ("ends", "size"),
    [
        ((1, 2, 30), 1),
        ((0, 0), 1),
        ((0.5, 1.25, 3), 0.01),
        ((0.1 + 0.2, 0.7), 0.1),
        ((1e12, 3e12), 1e12),
        ((2e-6, 7e-6), 1e-6),
        ((2**31 - 1,), 1),
    ],
)
def test_times_of_few_digits_lose_none(ends: tuple[float, ...], size: float) -> None:
    tick = tick_for([line_of(*ends)])
    assert tick == pytest.approx(size, rel=1e-12)
    assert np.rint(np.array(ends) / tick) * tick == pytest.approx(np.array(ends), rel=1e-12)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1))
def test_times_keep_six_digits_of_the_longest(ends: list[float]) -> None:
    tick = tick_for([line_of(*ends)])
    told = np.rint(np.array(ends) / tick)
    assert told.max() <= (2**31 if tick == 1 else MOST_TICKS)
    assert np.abs(told * tick - ends).max() <= 5.1e-7 * max(ends)


def test_a_page_holds_the_table_of_lanes() -> None:
    line = simulated("interleaved-1f1b", 4, 8)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html_page(line))
    assert found
    data = json.loads(found[1])
    raw, at, columns = zlib.decompress(base64.b64decode(data["columns"])), 0, {}
    for name, form, length in data["timelines"][0]["columns"]:
        kind = np.dtype({"Int32Array": "<i4", "Float64Array": "<f8"}[form])
        columns[name] = np.frombuffer(raw, kind, length, at).cumsum()
        at += length * kind.itemsize
    assert at == len(raw)
    lanes = lanes_of(line, tracks_of([line]))
    assert columns["start"] * data["tick"] == pytest.approx(lanes.start)
    assert columns["length"] * data["tick"] == pytest.approx(lanes.length)
    for name in ("lane", "colour"):
        assert columns[name].tolist() == getattr(lanes, name).tolist()
    assert columns["stage"].tolist() == line.schedule.columns.stage[lanes.place].tolist()


def test_strings_of_the_script_stay_as_they_are() -> None:
    text = "".join(
        (ROOT / "schedir" / "render" / "page" / f"{name}.js").read_text() for name in SCRIPTS
    )
    served = script()
    for phrase in ('", microbatch "', "`, stage ${", " on rank ${line.rank["):
        assert (phrase in text) == (phrase in served)
    assert "//" not in served


def test_the_script_is_written_for_people() -> None:
    for name in SCRIPTS:
        text = (ROOT / "schedir" / "render" / "page" / f"{name}.js").read_text()
        assert text.startswith("// ")
        assert max(map(len, text.splitlines())) <= 100, name


def test_all_files_of_the_page_are_shipped() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["schedir.render"]
    files = sorted(path.name for path in (ROOT / "schedir" / "render" / "page").iterdir())
    assert set(files) == {f"{name}.js" for name in SCRIPTS} | {"page.css"}
    assert all(any(fnmatch(f"page/{name}", pattern) for pattern in patterns) for name in files)
