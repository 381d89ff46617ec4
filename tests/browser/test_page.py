"""The HTML page of a timeline, in a real browser: what it draws, says and answers to."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import attrs
import numpy as np
import pytest
from playwright.sync_api import Browser

import schedir
from schedir import CostModel, Schedule, Timeline
from schedir.graph.compile import graph_of
from schedir.ir import COMPUTE, Kind
from schedir.passes import offload
from schedir.render.html import MOST_SCRIPT, data_before, html_page, script
from schedir.render.palette import (
    CAUSE_FILLS,
    CAUSE_WORDS,
    CRITICAL_LINE,
    IDLE_FILL,
    MEMORY_FILL,
    STEP_FILL,
    picture_fill,
)
from schedir.simulator import Measured
from tests.browser.opened import WIDTH, Opened, opened
from tests.sweeps import long

pytestmark = long

COSTS = CostModel(optim_step=0.5, latency=0.25)
PAIRS = Schedule.of(
    "pairs",
    [0, 1],
    [
        "0F0 0F1 (0SEND_ACT0;0SEND_ACT1) 0RECV_GRAD0 (0F2;0B0) 0SEND_ACT2 0RECV_GRAD1 0B1"
        " 0RECV_GRAD2 0B2",
        "(1RECV_ACT0;1RECV_ACT1) 1F0 1B0 1SEND_GRAD0 1F1 1R1 1B1 1SEND_GRAD1 1RECV_ACT2 1F2 1B2"
        " 1SEND_GRAD2",
    ],
)
UNKNOWN = np.full(len(PAIRS.columns), np.nan)


def simulated(name: str = "1f1b", costs: CostModel = COSTS, **shape: int) -> Timeline:
    return schedir.simulate(schedir.build(name, **{"ranks": 4, "microbatches": 8, **shape}), costs)


def perturbed(line: Timeline, seed: int = 0) -> Timeline:
    """As if measured: every compute action takes its own time, and some are not known."""
    columns, chance = line.schedule.columns, np.random.default_rng(seed)
    durations = {
        columns.position(place): float(chance.lognormal(0, 0.2))
        for place in columns.where(*COMPUTE).tolist()
    }
    costs = CostModel(latency=0.1, unit="ms")
    again = schedir.simulate(line.schedule, costs, durations=durations)
    starts = np.where(chance.random(len(columns)) < 0.02, np.nan, again.starts)
    return attrs.evolve(again, starts=starts, measured=Measured(step=3, clock_error=1e-5))


TIMELINES: dict[str, Callable[[], Timeline]] = {
    "whole numbers": lambda: simulated(costs=CostModel()),
    "fractions": simulated,
    "interleaved": lambda: simulated("interleaved-1f1b", chunks=3, microbatches=12),
    "versions": lambda: simulated("pipedream"),
    "measured": lambda: perturbed(simulated("interleaved-1f1b", chunks=2)),
    "pairs and batches": lambda: schedir.simulate(PAIRS, COSTS),
    "copies": lambda: schedir.simulate(
        offload(schedir.build("1f1b"), [0, 1]),
        attrs.evolve(COSTS, activation_bytes=4, host_bandwidth=4),
    ),
    "one rank": lambda: simulated(ranks=1),
    "nothing known": lambda: Timeline(PAIRS, UNKNOWN, UNKNOWN),
    "all free": lambda: simulated(costs=CostModel(forward=0, backward=0)),
}


@pytest.mark.parametrize("name", TIMELINES)
def test_the_page_reads_what_the_timeline_holds(
    name: str, browser: Browser, tmp_path: Path
) -> None:
    line = TIMELINES[name]()
    columns = line.schedule.columns
    with opened(browser, tmp_path, line) as it:
        read = it.ask(
            """(() => {
                const line = schedir.lines[0], all = [...line.start.keys()];
                return {
                    tokens: all.map((row) => token(line, row)),
                    start: [...line.start], end: [...line.end],
                    before: [...line.before], index: [...line.index],
                };
            })()"""
        )
        (rows,) = it.rows
    places = list(rows)
    assert sorted(places) == np.flatnonzero(line.known).tolist()
    assert read["tokens"] == [str(columns.action(place)) for place in places]
    assert read["index"] == [columns.position(place)[1] for place in places]
    before = data_before(line.schedule)[places].tolist()
    assert read["before"] == [rows.get(place, -1) for place in before]
    for told, times in ((read["start"], line.starts), (read["end"], line.ends)):
        assert np.array(told) == pytest.approx(times[places], rel=0, abs=5.1e-7 * line.makespan)


def test_each_replica_has_a_lane_of_its_own(browser: Browser, tmp_path: Path) -> None:
    """Both parts of an overlapped pair of two stages are drawn, named and found by the pointer."""
    line = simulated("dualpipe", costs=CostModel(), ranks=2, microbatches=6)
    schedule = line.schedule
    places = schedule.columns.where(*COMPUTE - {Kind.OPTIM_STEP}).tolist()
    fills = []
    for place in places:
        rank, action = schedule.columns.position(place)[0], schedule.columns.action(place)
        turn = schedule.stages_of(rank).index(action.stage)
        fills.append(picture_fill(action.kind, turn).area)
    with opened(browser, tmp_path, line) as it:
        spots = it.spots(0, places)
        assert len({spots[places.index(p)][1] for p in places}) == 4
        high = it.ask("boxOf(0, schedir.lines[0], 0)[1]")
        assert it.pixels([(x, y - high / 2 + 3) for x, y in spots]) == fills  # above the label
        for place, (x, y) in zip(places, spots, strict=True):
            it.page.mouse.move(x, y)
            it.settle()
            assert it.box().startswith(str(schedule.columns.action(place)))
        labels = it.ask("schedir.lines[0].several")
        assert labels is False  # the lane says of which stage


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("name", ["fractions", "interleaved", "pairs and batches"])
def test_every_action_is_drawn_where_it_is(
    name: str, ratio: float, browser: Browser, tmp_path: Path
) -> None:
    line = TIMELINES[name]()
    columns = line.schedule.columns
    chunk = {
        (rank, stage): turn
        for rank in range(line.schedule.ranks)
        for turn, stage in enumerate(line.schedule.stages_of(rank))
    }
    wanted = []
    for place in range(len(columns)):
        kind, rank = columns.action(place).kind, columns.position(place)[0]
        payload = {"ACT": Kind.FORWARD, "GRAD": Kind.BACKWARD}.get(kind.value.split("_")[-1], kind)
        fill = picture_fill(payload, chunk[rank, int(columns.stage[place])]).area
        if kind is Kind.OPTIM_STEP:
            fill = STEP_FILL
        wanted.append(fill)
    with opened(browser, tmp_path, line, ratio=ratio) as it:
        # A label stands in the middle of a cell: above it there is the colour alone.
        places = list(range(len(columns)))
        rows = [it.rows[0][place] for place in places]
        heights = it.ask("given[0].map((row) => boxOf(0, schedir.lines[0], row)[1])", rows)
        middles = zip(it.spots(0, places), heights, strict=True)
        spots = [(x, y - high / 2 + min(3, high / 2)) for (x, y), high in middles]
        assert it.pixels(spots) == wanted


def test_idle_time_is_seen_as_such_when_all_is_on_a_few_pixels(
    browser: Browser, tmp_path: Path
) -> None:
    # Rank 0 waits from 4 to 11 of 36; far more actions than pixels make no difference.
    line = simulated(microbatches=8, costs=CostModel())
    many = simulated(microbatches=3000, costs=CostModel())
    with opened(browser, tmp_path, line) as it:
        x, y = it.spot(0, line.schedule.columns.place(0, 0))
        (_, until), width = it.span, it.ask("frame.width")
        assert it.pixels([(x + 6 * width / until, y)]) == [IDLE_FILL]
    with opened(browser, tmp_path, many) as it:
        _, y = it.spot(0, 0)
        row = it.pixels([(x, y) for x in range(80, WIDTH - 20)])
        # F and B take turns, three to a pixel: what is seen is the longer one.
        assert row.count(picture_fill(Kind.BACKWARD).area) > 0.9 * len(row)


@pytest.mark.parametrize("name", ["fractions", "measured", "interleaved"])
def test_the_pointer_finds_what_is_under_it(name: str, browser: Browser, tmp_path: Path) -> None:
    line = TIMELINES[name]()
    spans, chance = line.spans, random.Random(0)
    with opened(browser, tmp_path, line) as it:
        for _zoomed in range(3):
            low, high = it.span
            margin = 3 * (high - low) / it.ask("frame.width")
            points, wanted = [], []
            for _ in range(200):
                rank, time = chance.randrange(line.schedule.ranks), chance.uniform(low, high)
                own = [s for s in spans[rank] if s.action.kind in COMPUTE and s.end == s.end]
                if not any(abs(time - edge) <= margin for s in own for edge in (s.start, s.end)):
                    points.append((rank, time))
                    wanted += [[str(s.action) for s in own if s.start < time < s.end]]
            found = it.ask(
                """given[0].map(([rank, time]) => {
                    const line = schedir.lines[0], { y } = frame.placed.bands[rank];
                    const { row } = under(schedir.lines, xOf(time), AXIS + y + 3 - view.top);
                    return row >= 0 ? [token(line, row)] : [];
                })""",
                points,
            )
            assert found == wanted
            assert sum(map(len, wanted)) > 50
            it.press("w")


def test_the_box_tells_of_an_action(browser: Browser, tmp_path: Path) -> None:
    line = simulated()
    place = graph_of(line.schedule).of(Kind.BACKWARD)[2, 3]
    rank, index = line.schedule.columns.position(int(place))
    span = next(s for s in line.spans[rank] if s.index == index)
    source = line.schedule.source_of(rank, index)
    assert source is not None
    with opened(browser, tmp_path, line) as it:
        it.ask("draw = () => schedir.drawn = true")  # which a pointer that moves need not
        it.page.mouse.move(*it.spot(0, int(place)))
        it.settle()
        assert not it.ask("schedir.drawn")
        said = it.box()
        assert said.startswith("2B3\nbackward, stage 2, microbatch 3\n")
        for words in (
            f"rank {rank} #{index}",
            f"start\t{span.start:g}\nend\t{span.end:g}\nduration\t2\n",
            f"{source.file}:{source.line}",
        ):
            assert words in said
        it.page.mouse.move(5, 5)
        it.settle()
        assert not it.box()


@pytest.mark.parametrize("name", ["fractions", "interleaved", "measured", "pairs and batches"])
def test_idle_time_says_what_it_waits_for(name: str, browser: Browser, tmp_path: Path) -> None:
    line = TIMELINES[name]()
    columns = line.schedule.columns

    def action(place: int | None) -> str:
        return "" if place is None else str(columns.action(place))

    with opened(browser, tmp_path, line, fragment="#causes=true") as it:
        low, high = it.span
        narrow = 8 * (high - low) / it.ask("frame.width")
        wide = [
            (rank, idle)
            for rank, stretches in enumerate(line.idle)
            for idle in stretches
            if idle.end - idle.start > narrow
        ]
        assert len(wide) > 3
        found = it.ask(
            """given[0].map(([rank, time]) => {
                const [x, y] = [xOf(time), AXIS + frame.placed.bands[rank].y + 3];
                const { left, top } = document.getElementById("lanes").getBoundingClientRect();
                const { idle } = under(schedir.lines, x, y);
                const rows = Object.fromEntries(aboutIdle(schedir.lines[0], idle));
                return [left + x, top + y, rows];
            })""",
            [(rank, (idle.start + idle.end) / 2) for rank, idle in wide],
        )
        for (_, idle), (_, _, rows) in zip(wide, found, strict=True):
            lasts, cause = rows[""].split(", ")
            assert cause == CAUSE_WORDS[idle.cause]
            assert float(lasts.split()[0]) == pytest.approx(idle.end - idle.start, abs=1e-4)
            assert rows.get("through", "") == action(idle.transfer)
            assert rows.get("waits for", " on").split(" on")[0] == action(idle.blamed)
        fills = it.pixels([(x, y) for x, y, _ in found])
        assert fills == [CAUSE_FILLS[idle.cause] for _, idle in wide]


@pytest.mark.parametrize("name", ["fractions", "measured"])
def test_the_critical_path_stands_out(name: str, browser: Browser, tmp_path: Path) -> None:
    line = TIMELINES[name]()
    flow, path = graph_of(line.schedule), set(line.critical_path)
    with opened(browser, tmp_path, line, fragment="#critical=true") as it:
        rows = it.rows[0]
        assert it.ask("[...schedir.lines[0].path]") == [rows[p] for p in line.critical_path]
        height = it.ask("frame.placed.parts.compute")
        places = [place for place in flow.of(Kind.BACKWARD).ravel().tolist() if place in rows]
        spots = it.spots(0, places)
        fills = it.pixels([(x, y - height / 2 + 3) for x, y in spots])
        full = {picture_fill(Kind.BACKWARD, chunk).area for chunk in range(4)}
        strong = [place in path for place in places]
        assert 0 < sum(strong) < len(strong)
        assert [fill in full for fill in fills] == strong
        lined = [xy for xy, s in zip(spots, strong, strict=True) if s]
        marked = it.pixels([(x, y + height / 2 - 2) for x, y in lined])
        assert set(marked) == {CRITICAL_LINE}


def texts_of(it: Opened) -> list[tuple[str, float, float, float]]:
    """What is written beside and above the lanes: the words, their middle or end, their height,
    and how wide they are."""
    texts: list[tuple[str, float, float, float]] = it.ask(
        """(() => {
            const pen = document.getElementById("lanes").getContext("2d"), texts = [];
            pen.fillText = (words, x, y) => texts.push([words, x, y, pen.measureText(words).width]);
            draw(document.getElementById("lanes"), schedir.lines);
            delete pen.fillText;
            return texts;
        })()"""
    )
    return texts


@pytest.mark.parametrize("unit", [1e-120, 1e-12, 0.37, 1.0, 1e8, 1e12])
def test_the_times_of_the_axis_can_be_told_apart(
    unit: float, browser: Browser, tmp_path: Path
) -> None:
    line = simulated(costs=CostModel(forward=unit, backward=2 * unit))
    with opened(browser, tmp_path, line) as it:
        for around in (1, 0.1, 0.0001):
            it.ask("goTo({ from: page.longest * (1 - given[0]), to: page.longest })", around)
            ticks = [text for text in texts_of(it) if 20 < text[2] < 38]
            assert len({float(words) for words, *_ in ticks}) == len(ticks) >= 2
            sides = [(x - wide / 2, x + wide / 2) for _, x, _, wide in ticks]
            assert all(a[1] + 4 < b[0] for a, b in pairwise(sides))
            assert sides[-1][1] <= WIDTH


def test_each_rank_is_told_the_most_that_it_keeps(browser: Browser, tmp_path: Path) -> None:
    line = simulated()
    higher = simulated("interleaved-1f1b", chunks=2)
    with opened(browser, tmp_path, line, higher, memory=True) as it:
        said = [words for words, *_ in texts_of(it) if words.endswith(" alive")]
        assert said == [f"{most} alive" for most in (4, 3, 2, 1, 11, 9, 7, 5)]
        # One scale for both.
        assert tops_of(it, 1, [10.5]) == pytest.approx([4 / 11], abs=0.1)


def test_labels_are_as_long_as_there_is_room(browser: Browser, tmp_path: Path) -> None:
    line = simulated("interleaved-1f1b", costs=CostModel(), chunks=2, microbatches=16)

    def labels(it: Opened) -> set[str]:
        return {words for words, *_ in texts_of(it) if words[-1].isdigit() and "F" in words}

    with opened(browser, tmp_path, line) as it:
        assert "0F0" not in labels(it)
        assert "F0" not in labels(it)  # nor is there room for that
        it.ask("goTo({ from: 0, to: page.longest * 0.7 })")
        assert {"F0", "F9"} <= labels(it)
        assert "0F0" not in labels(it)
        it.ask("goTo({ from: 0, to: page.longest * 0.4 })")
        assert {"0F0", "4F0"} <= labels(it)
        assert "F0" not in labels(it)


def tops_of(it: Opened, rank: int, times: list[float]) -> list[float]:
    """How high the memory curve of a rank reaches at times, as a part of the most."""
    tops: list[float] = it.ask(
        """(() => {
            const canvas = document.getElementById("lanes"), pen = canvas.getContext("2d");
            const [rank, times] = given, { parts, bands } = frame.placed;
            const base = AXIS + bands[rank].y + parts.all - parts.gap;
            return times.map((time) => {
                const x = Math.floor(xOf(time));
                const column = pen.getImageData(x, base - parts.curve, 1, parts.curve).data;
                let top = 0;
                while (top < parts.curve && column[4 * top + 3] === 0) top++;
                return (parts.curve - top) / (parts.curve - 3);
            });
        })()""",
        rank,
        times,
    )
    return tops


def test_the_most_of_a_pixel_is_seen(browser: Browser, tmp_path: Path) -> None:
    # The last rank keeps one activation or none, in turn, several times a pixel.
    line = simulated(microbatches=3000, costs=CostModel(latency=1))
    with opened(browser, tmp_path, line, memory=True) as it:
        times = [line.makespan * part / 50 for part in range(2, 48)]
        assert tops_of(it, 3, times) == pytest.approx([1 / 4] * len(times), abs=0.06)
        # And below it all is filled: no line goes down and up.
        spots = it.ask(
            """(() => {
                const { parts, bands } = frame.placed;
                const { left, top } = document.getElementById("lanes").getBoundingClientRect();
                const y = top + AXIS + bands[3].y + parts.all - parts.gap - parts.curve / 8;
                return given[0].map((time) => [left + xOf(time), y]);
            })()""",
            times,
        )
        assert set(it.pixels(spots)) == {MEMORY_FILL}


@pytest.mark.parametrize("sized", [True, False])
def test_memory_stands_under_the_lanes(sized: bool, browser: Browser, tmp_path: Path) -> None:
    some = 2**28 if sized else 0
    line = simulated(costs=CostModel(latency=0.25, activation_bytes=3 * some, weight_bytes=some))
    curves = [(line.memory if sized else line.live)(rank) for rank in range(4)]
    chance = random.Random(0)

    def kept(rank: int, time: float) -> float:
        times, amounts = curves[rank]
        return float(amounts[np.searchsorted(times, time, "right") - 1])

    with opened(browser, tmp_path, line, memory=True) as it:
        points = [(chance.randrange(4), chance.uniform(0, line.makespan)) for _ in range(60)]
        found = it.ask(
            """given[0].map(([rank, time]) => {
                const { bands, parts } = frame.placed;
                const band = bands.find((band) => band.rank === rank);
                const y = AXIS + band.y + parts.all - parts.gap - 2;
                const found = under(schedir.lines, xOf(time), y);
                return [found.rank, aboutKept(schedir.lines[0], found.rank, found.now)[0][1]];
            })""",
            points,
        )
        for (rank, time), (found_rank, said) in zip(points, found, strict=True):
            assert found_rank == rank
            amount, unit = said.split()
            scale = {"alive": 1, "GiB": 2**30, "MiB": 2**20, "B": 1}[unit]
            assert float(amount) * scale == pytest.approx(kept(rank, time), rel=1e-3)
        # The highest curve reaches up to where the others end.
        peak = max(float(amounts.max()) for _, amounts in curves)
        assert it.ask("page.kept.most") == peak
        spots = [time + 0.2 for time in curves[0][0].tolist() if time + 0.4 < line.makespan]
        assert tops_of(it, 0, spots) == pytest.approx(
            [kept(0, time) / peak for time in spots], abs=0.06
        )


def waits(it: Opened, place: int) -> list[list[str]]:
    """The tokens of the pairs of actions that lines connect, for one action."""
    pairs: list[list[str]] = it.ask(
        """(() => {
            const line = schedir.lines[0];
            const named = (pair) => pair.map((row) => token(line, row));
            return dependenciesOf(line, given[0]).map(named);
        })()""",
        it.rows[0][place],
    )
    return pairs


def test_arrows_lead_to_what_an_action_waits_for(browser: Browser, tmp_path: Path) -> None:
    line = simulated()
    flow = graph_of(line.schedule)
    with opened(browser, tmp_path, line) as it:
        tokens = waits(it, int(flow.of(Kind.FORWARD)[1, 2]))
        assert tokens == [
            ["1RECV_ACT2", "1F2"], ["0SEND_ACT2", "1RECV_ACT2"], ["0F2", "0SEND_ACT2"],
            ["1F2", "1SEND_ACT2"], ["1SEND_ACT2", "2RECV_ACT2"], ["2RECV_ACT2", "2F2"],
        ]  # fmt: skip


def test_arrows_lead_to_all_that_wait(browser: Browser, tmp_path: Path) -> None:
    split = Schedule.of("split", [0, 1], ["0F0 0B0", "1F0 1I0 1W0"])
    line = schedir.simulate(split, COSTS)
    place = int(graph_of(line.schedule).of(Kind.BACKWARD_INPUT)[1, 0])
    with opened(browser, tmp_path, line) as it:
        assert sorted(waits(it, place)) == [
            ["0RECV_GRAD0", "0B0"], ["1F0", "1I0"], ["1I0", "1SEND_GRAD0"], ["1I0", "1W0"],
            ["1SEND_GRAD0", "0RECV_GRAD0"],
        ]  # fmt: skip


def test_what_takes_no_time_can_be_pointed_at(browser: Browser, tmp_path: Path) -> None:
    line = simulated("pipedream", costs=CostModel())  # its steps stand between two cells
    place = line.schedule.columns.where(Kind.OPTIM_STEP).tolist()[5]
    with opened(browser, tmp_path, line) as it:
        x, y = it.spot(0, place)
        for off, token in ((-1.5, "OPTIM_STEP"), (1.5, "OPTIM_STEP"), (-6, "B")):
            it.page.mouse.move(x + off, y)
            it.settle()
            assert token in it.box().split("\n")[0]


def test_keys_wheel_and_mouse_zoom_and_pan(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, tmp_path, simulated()) as it:
        everything = it.span

        def width() -> float:
            start, end = it.span
            return end - start

        full = width()
        it.press("w")
        assert width() == pytest.approx(0.7 * full)
        start, end = it.span
        it.press("d")
        assert it.span == pytest.approx((start + 0.15 * width(), end + 0.15 * width()))
        it.press("a")
        assert it.span == pytest.approx((start, end))
        it.press("s")
        assert it.span == pytest.approx(everything)
        it.press("s")  # there is no more to be seen
        assert it.span == pytest.approx(everything)

        # The wheel zooms where the pointer is.
        x, y = it.spot(0, 40)
        it.page.mouse.move(x, y)
        it.page.mouse.wheel(0, -400)
        it.settle()
        assert width() < 0.5 * full
        assert it.spot(0, 40) == pytest.approx((x, y), abs=1)
        it.page.mouse.wheel(100, 0)  # two fingers on a touchpad
        it.settle()
        assert it.spot(0, 40)[0] == pytest.approx(x - 100, abs=1)
        it.page.mouse.down()
        it.page.mouse.move(x + 70, y, steps=3)
        it.page.mouse.up()
        it.settle()
        assert it.spot(0, 40)[0] == pytest.approx(x - 30, abs=1)
        it.press("f")
        assert it.span == pytest.approx(everything, rel=0.05)
        it.ask("zoom(1e-9)")  # up to a tick, which no action is shorter than
        assert width() == pytest.approx(it.ask("page.tick"))


def test_the_address_keeps_the_view(browser: Browser, tmp_path: Path) -> None:
    line = simulated("interleaved-1f1b", ranks=16, chunks=2, microbatches=32)
    with opened(browser, tmp_path, line) as it:
        assert it.ask("location.hash") == ""
        for key in "wwdeeee":
            it.press(key)
        it.press("PageDown")
        it.press("PageDown")
        it.page.locator("[data-shows=transfers]").uncheck()
        it.settle()
        low, high = it.span
        seen_there = next(
            place
            for place in line.schedule.columns.computes.tolist()
            if line.schedule.columns.rank[place] == 15 and line.starts[place] > (low + high) / 2
        )
        it.page.mouse.click(*it.spot(0, seen_there))
        it.settle()
        seen = it.ask("view")
        assert seen["row"] == it.rows[0][seen_there]
        address = it.ask("location.hash")
        words = ["from", "to", "top", "height", "row", "transfers"]
        assert [word.split("=")[0] for word in address[1:].split("&")] == words
    with opened(browser, tmp_path, line, fragment=address) as it:
        assert it.ask("view") == pytest.approx(seen, rel=1e-6)
        # The address may be changed by hand, and the history be gone through.
        it.ask("location.hash = 'from=10&to=20'")
        it.until("Math.abs(view.to - 20) < 1e-6")
        it.page.go_back()
        it.settle()
        assert it.ask("location.hash") == address
    with opened(
        browser, tmp_path, line, fragment="#from=x&top=-3&height=1e99&memory=7&at=7&row=7"
    ) as it:
        it.settle()
        assert it.ask("view.from < 0 && view.row === -1 && !view.memory")


def test_two_timelines_have_one_axis(browser: Browser, tmp_path: Path) -> None:
    measured = perturbed(simulated("interleaved-1f1b", chunks=2))
    seconds = CostModel(forward=1e-3, backward=2e-3, latency=1e-4, unit="s")
    predicted = schedir.simulate(measured.schedule, seconds)
    with opened(browser, tmp_path, measured, predicted) as it:
        labels = it.ask("frame.placed.bands.filter(b => b.text).map(b => b.text)")
        assert [label.split(":")[0] for label in labels] == ["predicted", "measured, step 3"]
        rows = it.ask("frame.placed.bands.filter(b => !b.text).map(b => [b.at, b.rank])")
        assert rows == [[at, rank] for at in (0, 1) for rank in range(4)]
        # The same action of both: as far from the left as its time says, one below the other.
        place = int(graph_of(measured.schedule).of(Kind.BACKWARD)[1, 5])
        (x0, y0), (x1, y1) = it.spot(0, place), it.spot(1, place)
        middle = (predicted.starts[place] + predicted.ends[place]) / 2 * 1e3
        theirs = (measured.starts[place] + measured.ends[place]) / 2
        # In milliseconds, as is all of the page.
        edge, scale = it.ask("[xOf(0), frame.width / (view.to - view.from)]")
        assert x0 - edge == pytest.approx(middle * scale, abs=0.1)
        assert x1 - edge == pytest.approx(theirs * scale, abs=0.1)
        assert y1 > y0
        it.page.mouse.move(x0, y0)
        it.settle()
        assert "measured, step 3\t" in it.box()
        it.page.locator("[data-shows=paired]").check()
        it.settle()
        rows = it.ask("frame.placed.bands.filter(b => !b.text).map(b => [b.at, b.rank])")
        assert rows == [[at, rank] for rank in range(4) for at in (0, 1)]


def test_the_arrow_keys_go_from_action_to_action(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, tmp_path, simulated()) as it:
        for key, token in [
            ("ArrowRight", "0F0"), ("ArrowRight", "0F1"), ("ArrowDown", "1F0"),
            ("ArrowUp", "0F1"), ("ArrowLeft", "0F0"), ("ArrowLeft", "0F0"),
        ]:  # fmt: skip
            it.press(key)
            # What a screen reader says.
            assert it.page.get_by_role("status").inner_text().startswith(f"{token}\n")
        it.press("Escape")
        assert it.ask("view.row") == -1


NASTY = """</script><script>alert(1)</script><b title='"'>&amp;{0}"""


def test_names_are_text(browser: Browser, tmp_path: Path) -> None:
    line = simulated()
    named = attrs.evolve(line, schedule=attrs.evolve(line.schedule, name=NASTY))
    other = attrs.evolve(line, schedule=attrs.evolve(line.schedule, name="<i>other"))
    with opened(browser, tmp_path, named, other) as it:
        assert it.page.locator("h1").inner_text().startswith(NASTY)
        assert it.page.title().startswith(NASTY)
        assert it.page.locator("script").count() == 2
        assert NASTY in it.ask("frame.placed.bands[0].text")


def test_nothing_is_asked_of_a_network(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, tmp_path, simulated()) as it:
        it.press("w")
        assert it.requests == [(tmp_path / "timeline.html").as_uri()]
        # And nothing could be: the page's own policy is against it.
        it.ask("fetch('https://example.org/').catch(() => 0)")
        assert any("Content Security Policy" in error for error in it.errors)
        it.errors.clear()


def test_the_script_and_the_file_are_small() -> None:
    assert len(script().encode()) <= MOST_SCRIPT
    line = simulated(ranks=64, microbatches=512)
    for each in (line, perturbed(line)):
        assert len(html_page(each).encode()) <= 1_500_000


def test_the_heading_says_what_is_shown(browser: Browser, tmp_path: Path) -> None:
    line, other = simulated(), simulated("interleaved-1f1b", ranks=2, chunks=3)
    one, two = "1f1b: 4 ranks, 4 stages", "interleaved-1f1b: 2 ranks, 6 stages"
    with opened(browser, tmp_path, line, other) as it:
        heading = it.page.locator("h1").inner_text()
        assert heading == f"{one}, 8 microbatches; {two}, 8 microbatches"
    with opened(browser, tmp_path, perturbed(line)) as it:
        assert it.page.locator("header p").inner_text().startswith("measured, step 3: makespan ")
