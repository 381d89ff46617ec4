"""The picture of a timeline: parsed, and held against the timeline; and as it is, in files.

`pytest tests/test_svg.py --update-golden` writes the pictures in tests/golden anew: look at them
before you commit them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple
from xml.etree import ElementTree

import attrs
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import schedir
from schedir import CostModel, Kind, Timeline
from schedir.ir import COMPUTE
from schedir.render import outputs
from schedir.render.memory import thinned
from schedir.render.palette import WORDS, picture_fill
from schedir.render.text import plain
from schedir.simulator import Measured, Sizes, Unit
from tests.literals import listed
from tests.sweeps import examples
from tests.test_golden import GOLDEN, compare
from tests.timelines import lines, simulated

NAMESPACE = "{http://www.w3.org/2000/svg}"
LISTS = "0F0 0F1 (0F2;0B0) 0B1 0B2 0OPTIM_STEP", "1F0 1B0 1F1 1B1 1F2 1I2 1W2 1OPTIM_STEP"
PAIRED = listed(3, "0 1", *LISTS, name="paired")
KIND_OF = {picture_fill(kind, turn).area: (kind, turn) for kind in WORDS for turn in range(4)}


class Box(NamedTuple):
    left: float
    right: float
    top: float
    bottom: float
    fill: str


class Lane(NamedTuple):
    cells: list[Box]
    merged: list[Box]
    steps: list[Box]
    labels: list[tuple[float, str]]


def svg(line: Timeline, against: Timeline | None = None, memory: bool = False) -> str:
    return line.svg(against=against, memory=memory)


def boxes(path: ElementTree.Element) -> Iterator[Box]:
    number = r"(-?[\d.]+)"
    outline = path.attrib["d"]
    found = re.findall(rf"M{number} {number}h{number}v{number}h-{number}z", outline)
    assert "".join("M{} {}h{}v{}h-{}z".format(*box) for box in found) == outline
    for left, top, wide, high, back in found:
        assert wide == back
        x, y = float(left), float(top)
        yield Box(x, x + float(wide), y, y + float(high), path.attrib["fill"])


def lanes(picture: str) -> list[Lane]:
    found = []
    for group in ElementTree.fromstring(picture).findall(f"{NAMESPACE}g[@class='lane']"):
        lane = Lane([], [], [], [])
        for element in group.iter():
            if element.tag == f"{NAMESPACE}path":
                kind = element.get("class", "cells")
                getattr(lane, kind).extend(boxes(element))
            elif element.get("class") == "labels":
                lane.labels.extend((float(t.attrib["x"]), t.text or "") for t in element)
        found.append(lane)
    return found


def scale_of(picture: str) -> list[float]:
    """The width of each timeline's idle lanes."""
    root = ElementTree.fromstring(picture)
    panels = root.findall(f"{NAMESPACE}path[@class='idle']")
    return [float(re.findall(r"h([\d.]+)", panel.attrib["d"])[0]) for panel in panels]


def curves(picture: str) -> list[list[tuple[float, float]]]:
    """The points of each curve: from where on it is how high, in pixels; the last is its end."""
    found = []
    for path in ElementTree.fromstring(picture).iter(f"{NAMESPACE}path"):
        if path.get("class") == "memory":
            foot, *steps = re.findall(r"[MHV]([\d.]+)(?: ([\d.]+))?", path.attrib["d"])
            assert foot[0] == "0"
            numbers = [float(one) for one, _ in steps]
            found.append(
                [(x, float(foot[1]) - y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
            )
    return found


def check_apart(cells: list[Box]) -> None:
    """No two of them overlap."""
    for one in (0.25, 0.75):  # pairs stand in the upper and the lower half
        high = max((cell.bottom for cell in cells), default=1)
        there = sorted(cell for cell in cells if cell.top <= one * high <= cell.bottom)
        for before, after in pairwise(there):
            assert after.left >= before.right - 1e-9


@given(lines(6, 12))
def test_every_compute_action_is_a_cell_at_its_time(line: Timeline) -> None:
    picture = svg(line)
    (width,) = scale_of(picture)
    scale = width / line.makespan
    for rank, (lane, spans) in enumerate(zip(lanes(picture), line.spans, strict=True)):
        turns = {stage: turn for turn, stage in enumerate(line.schedule.stages_of(rank))}
        computes = [span for span in spans if span.action.kind in COMPUTE]
        expected = sorted(
            (span.start, span.end, span.action.kind, turns[span.action.stage])
            for span in computes
            if span.action.kind is not Kind.OPTIM_STEP
        )
        assert not lane.merged
        assert len(lane.cells) == len(expected)
        for cell, (start, end, kind, turn) in zip(sorted(lane.cells), expected, strict=True):
            assert (cell.left, cell.right) == pytest.approx((start * scale, end * scale), abs=0.02)
            assert KIND_OF[cell.fill] == (kind, turn % 4)
        check_apart(lane.cells)
        steps = sorted(span.start for span in computes if span.action.kind is Kind.OPTIM_STEP)
        assert sorted(box.left for box in lane.steps) == pytest.approx(
            [start * scale for start in steps], abs=0.02
        )
        for x, text in lane.labels:
            (cell,) = (cell for cell in lane.cells if cell.left < x < cell.right)
            (span,) = (s for s in computes if s.start * scale < x < s.end * scale)
            assert text.lstrip("FBIW") == str(span.action.microbatch)
            assert text[0].isdigit() or text[0] == span.action.kind
            assert KIND_OF[cell.fill][0] is span.action.kind


@examples(20)
@example(3, 782, 2, 0.78125)
@given(
    ranks=st.integers(1, 4),
    microbatches=st.integers(600, 900),
    forward=st.floats(0.05, 4),
    latency=st.floats(0, 3),
)
def test_merged_cells_have_the_area_of_what_they_stand_for(
    ranks: int, microbatches: int, forward: float, latency: float
) -> None:
    line = simulated("1f1b", ranks, microbatches, CostModel(forward=forward, latency=latency))
    picture = svg(line)
    (width,) = scale_of(picture)
    assert "are thinner than 1 pixel, and merged" in picture
    for lane, spans in zip(lanes(picture), line.spans, strict=True):
        check_apart(lane.cells)
        areas: dict[Kind, float] = defaultdict(float)
        for box in [*lane.cells, *lane.merged]:
            areas[KIND_OF[box.fill][0]] += (box.right - box.left) * (box.bottom - box.top) / 24
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            busy = sum(span.end - span.start for span in spans if span.action.kind is kind)
            # Either edge of a bar is at one of 50 heights.
            assert areas[kind] == pytest.approx(busy * width / line.makespan, abs=0.021 * width)


def test_a_picture_does_not_grow_with_what_is_merged() -> None:
    few, many = (len(svg(simulated("1f1b", 4, microbatches))) for microbatches in (2000, 8000))
    assert many < 1.2 * few < 40_000


@given(lines(4, 8), st.booleans())
def test_curves_say_what_is_held(line: Timeline, sized: bool) -> None:
    line = attrs.evolve(line, sizes=Sizes(activation=3, weight=5)) if sized else line
    ranks = line.schedule.ranks
    picture = svg(line, memory=True)
    (width,) = scale_of(picture)
    scale = width / line.makespan
    held = [(line.memory if sized else line.live)(rank) for rank in range(ranks)]
    highest = max(amounts.max() for _, amounts in held)
    assert len(curves(picture)) == ranks
    for points, (times, amounts) in zip(curves(picture), held, strict=True):
        assert points[-1] == pytest.approx((width, 0), abs=0.02)
        edges = np.unique(np.append(times * scale, width))
        for x in (edges[:-1] + edges[1:])[np.diff(edges) > 0.1] / 2:
            expected = amounts[np.searchsorted(times * scale, x, side="right") - 1]
            high = [high for left, high in points if left <= x][-1:]
            assert (high or [0])[0] == pytest.approx(expected / highest * 29, abs=0.02)
    peaks = [rank.peak_bytes if sized else rank.peak_activations for rank in line.ranks]
    beside = re.findall(r">(?:peak )?([\d.]+)( B)?</text>", picture.partition('class="memory"')[2])
    told = [peak for peak, _ in beside[3 : 4 * ranks : 4]]
    assert told == [f"{peak:g}" for peak in peaks]
    assert [tick for tick, _ in beside[:3]] == [f"{highest * part / 2:g}" for part in range(3)]
    assert {unit for _, unit in beside[: 4 * ranks]} == {" B" if sized else ""}


def test_fast_curves_keep_their_peaks_and_their_area() -> None:
    line = simulated("1f1b", 3, 3000, CostModel(backward=1.3, latency=0.4))
    picture = svg(line, memory=True)
    (width,) = scale_of(picture)
    for rank, points in enumerate(curves(picture)):
        assert len(points) < 1100
        times, amounts = line.live(rank)
        x, high = np.array(points).T
        most = 29 * line.ranks[rank].peak_activations / 3
        assert high.max() == pytest.approx(most, abs=0.02)
        area = (high[:-1] * np.diff(x)).sum()
        held = (amounts * np.diff(np.append(times, line.makespan))).sum() * width / line.makespan
        assert held * 29 / 3 <= area + width * 0.01
        assert area <= (most + 0.02) * width


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        # A dip that lasts no time, and a peak that lasts none.
        ([(0, 1), (3, 0), (3, 1), (9, 0)], [(0, 1), (9, 0)]),
        ([(0, 1), (3, 4), (3, 2), (9, 0)], [(0, 1), (3, 4), (3, 2), (9, 0)]),
        # More changes than pixels: the most of every two of them, and what goes on until the next.
        (
            [
                (0, 1),
                (0.1, 5),
                (0.2, 2),
                (0.9, 3),
                (6.1, 1),
                (6.2, 2),
                (8.1, 1),
                (8.2, 4),
                (8.3, 0),
            ],
            [(0, 5), (2, 3), (8, 4), (10, 0)],
        ),
    ],
)
def test_curves_leave_out_what_is_not_seen(
    changes: list[tuple[float, int]], seen: list[tuple[float, int]]
) -> None:
    left, amounts = (np.array(column) for column in zip(*changes, strict=True))
    assert list(zip(*(part.tolist() for part in thinned(left, amounts)), strict=True)) == seen


def test_the_parts_of_a_pair_share_a_cell() -> None:
    line = schedir.simulate(PAIRED)
    lane = lanes(svg(line))[0]
    halves = [cell for cell in lane.cells if cell.bottom - cell.top < 20]
    upper, lower = sorted(halves, key=lambda cell: cell.top)
    assert [KIND_OF[cell.fill][0] for cell in (upper, lower)] == [Kind.FORWARD, Kind.BACKWARD]
    assert upper[:2] == lower[:2]
    assert (upper.top, upper.bottom, lower.top, lower.bottom) == (0, 12, 12, 24)
    assert Counter(text for _, text in lane.labels) == Counter(["F0", "F1", "F2", "B0", "B1", "B2"])


def test_two_timelines_have_one_axis() -> None:
    line = simulated("1f1b", 4, 4, CostModel(unit="ms"))
    measured = attrs.evolve(
        line, starts=line.starts * 2e-3, ends=line.ends * 2e-3, unit="s", measured=Measured(3)
    )
    picture = svg(line, measured)
    one, other = scale_of(picture)
    assert other == pytest.approx(2 * one, abs=0.02)
    assert "predicted: makespan 21 ms, bubble 42.9%" in picture
    assert "measured, step 3: makespan 42 ms, bubble 42.9%" in picture
    assert "time (ms)" in picture
    assert len(lanes(picture)) == 8


@pytest.mark.parametrize(
    ("unit", "factor", "says"),
    [
        ("s", 1, "makespan 21 s,"),
        ("s", 1e-4, "makespan 2.1 ms,"),
        ("us", 1e-3, "makespan 0.021 µs,"),
        ("us", 1e3, "makespan 21 ms,"),
        ("ms", 1e5, "makespan 2100 s,"),
        (None, 1e-3, "makespan 0.021,"),
    ],
)
def test_times_are_in_a_unit_that_fits(unit: Unit | None, factor: float, says: str) -> None:
    line = simulated("1f1b", 4, 4)
    scaled = attrs.evolve(line, starts=line.starts * factor, ends=line.ends * factor, unit=unit)
    assert says in svg(scaled)


def test_what_is_not_known_when_is_left_out_with_a_warning() -> None:
    line = simulated("1f1b", 2, 3)
    ends = line.ends.astype(float)
    ends[[0, 2]] = np.nan
    unknown = attrs.evolve(line, ends=ends)
    written = outputs.svg(unknown)
    assert list(written.left_out) == [
        "2 of 14 actions are left out because their times are unknown: rank 0 #0 0F0 is the first"
    ]
    assert len(lanes(plain(written.blocks))[0].cells) == 4


@pytest.mark.parametrize("memory", [False, True])
def test_a_picture_of_nothing_is_one(memory: bool) -> None:
    line = simulated("1f1b", 2, 3)
    unknown = np.full(len(line.starts), np.nan)
    nothing = attrs.evolve(line, starts=unknown, ends=unknown)
    free = schedir.simulate(line.schedule, CostModel(forward=0, backward=0))
    for picture in (svg(nothing, memory=memory), svg(free, memory=memory)):
        assert "makespan 0, bubble 0.0%" in picture
        assert not re.search(r"\b(nan|inf)\b", picture)
        assert not any(cell.right > cell.left for lane in lanes(picture) for cell in lane.cells)
    assert len(lanes(svg(nothing, line, memory))) == 4


@pytest.mark.parametrize("unit", [1e-120, 1e-12, 0.37, 1, 1e8, 1e12])
def test_the_times_of_the_axis_can_be_told_apart(unit: float) -> None:
    picture = svg(simulated("1f1b", 4, 8, CostModel(forward=unit, backward=2 * unit)))
    times = re.findall(r'<text x="([\d.]*)" y="([\d.]*)"[^>]*"middle">([-+\d.e]+)</text>', picture)
    height = max(float(y) for _, y, _ in times)
    ticks = [(float(x), 6.7 * len(text)) for x, y, text in times if float(y) == height]
    assert len(ticks) >= 3
    for (x, wide), (next_x, next_wide) in pairwise(ticks):
        assert x + wide / 2 + 4 < next_x - next_wide / 2
    wide = float(re.findall(r' width="([\d.]+)" height="[\d.]+" viewBox', picture)[0])
    assert ticks[-1][0] + ticks[-1][1] / 2 <= wide


def test_it_needs_nothing_from_elsewhere() -> None:
    picture = svg(simulated("interleaved-1f1b", 4, 8))
    assert re.findall(r"https?://[^\"]*", picture) == ["http://www.w3.org/2000/svg"]
    assert ". zbv: makespan" in svg(simulated("zbv", 2, 2), simulated("1f1b", 2, 2))  # its <desc>
    assert not re.search(r"<(script|style|image|use|font|foreignObject)|href|url\(", picture)


def predicted_and_measured(memory: bool) -> str:
    line = simulated("1f1b", 2, 4, CostModel(latency=0.2, unit="ms"))
    slower = schedir.simulate(line.schedule, CostModel(forward=1.1, backward=2.3, latency=0.3))
    return svg(line, attrs.evolve(slower, unit="ms", measured=Measured(5)), memory)


SIZED = CostModel(activation_bytes=2**28, weight_bytes=2**30)
PICTURES = {
    "1f1b": lambda: svg(simulated("1f1b", 3, 4)),
    "interleaved": lambda: svg(simulated("interleaved-1f1b", 2, 4, chunks=2)),
    "pairs": lambda: svg(schedir.simulate(PAIRED)),
    "predicted_and_measured": lambda: predicted_and_measured(memory=False),
    "memory": lambda: predicted_and_measured(memory=True),
    "bytes": lambda: svg(simulated("1f1b", 2, 3, SIZED), memory=True),
    "merged": lambda: svg(simulated("1f1b", 2, 2500)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture(name: str, request: pytest.FixtureRequest) -> None:
    compare(GOLDEN / f"{name}.svg", PICTURES[name](), request)
