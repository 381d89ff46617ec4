"""Timelines in few bytes: what a page's script is told, read again by other means."""

from __future__ import annotations

import base64
import tomllib
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir import Schedule, Timeline
from schedir.render.html import SCRIPTS, script
from schedir.render.packed import MOST_TICKS, Stream, Ticks, against_last, ticks_for, varints

ROOT = Path(__file__).resolve().parents[1]
integers = st.one_of(st.integers(-(2**52), 2**52), st.integers(-200, 200))


def read(raw: bytes) -> Iterator[int]:
    """The integers, as their definition says: seven bits a byte, and the sign in the lowest."""
    rest = iter(raw)
    for byte in rest:
        group = [byte]
        while group[-1] >= 128:
            group.append(next(rest))
        value = sum((byte % 128) << 7 * at for at, byte in enumerate(group))
        yield -(value + 1) // 2 if value % 2 else value // 2


@given(st.lists(integers))
def test_integers_are_read_as_they_were_written(values: list[int]) -> None:
    assert list(read(varints(np.array(values, np.int64)))) == values


@given(st.lists(st.lists(integers)))
def test_a_stream_holds_its_columns_one_after_the_other(columns: list[list[int]]) -> None:
    stream = Stream()
    for column in columns:
        stream.put(np.array(column, np.int64))
    raw = zlib.decompress(base64.b64decode(stream.text()), -zlib.MAX_WBITS)
    assert list(read(raw)) == [value for column in columns for value in column]


@given(st.lists(st.tuples(st.integers(0, 3), integers)))
def test_each_is_compared_with_the_last_of_its_group(pairs: list[tuple[int, int]]) -> None:
    groups, values = (np.array([p[at] for p in pairs], np.int64) for at in (0, 1))
    last: dict[int, int] = {}
    for (group, value), change in zip(pairs, against_last(values, groups).tolist(), strict=True):
        assert change == value - last.get(group, 0)
        last[group] = value


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
        ((MOST_TICKS,), 1),
    ],
)
def test_times_of_few_digits_lose_none(ends: tuple[float, ...], size: float) -> None:
    ticks = ticks_for([line_of(*ends)])
    assert ticks.size == pytest.approx(size, rel=1e-12)
    assert ticks.of(np.array(ends)) * ticks.size == pytest.approx(np.array(ends), rel=1e-12)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1))
def test_times_keep_eight_digits_of_the_longest(ends: list[float]) -> None:
    ticks = ticks_for([line_of(*ends)])
    told = ticks.of(np.array(ends))
    assert told.max() <= MOST_TICKS
    assert np.abs(told * ticks.size - ends).max() <= 3e-9 * max(ends)


def test_ticks_are_whole() -> None:
    assert Ticks(0.25).of(np.array([0.0, 0.26, 1.0])).tolist() == [0, 1, 4]


def test_strings_of_the_script_stay_as_they_are() -> None:
    text = "".join(
        (ROOT / "schedir" / "render" / "page" / f"{name}.js").read_text() for name in SCRIPTS
    )
    served = script()
    for phrase in ('"idle before"', "`, microbatch ${", " on rank ${line.rank["):
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
