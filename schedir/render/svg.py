"""A timeline as a picture for papers and READMEs: SVG without scripts and fonts.

          1f1b: 4 ranks, 4 stages, 8 microbatches
          ▆ F forward  ▆ B backward  ▏ update of the weights
          predicted: makespan 33, bubble 27.3%
       0  ▆▆▆▆      ▆▆▆
  rank 1   ▆▆▆▆    ▆▆▆▆
       2    ▆▆▆▆  ▆▆▆▆▆
          0    5    10
                 time (ms)

The SVG is written as text, without a library: libraries for charts have no lanes.

Cells are paths, one for each colour of a lane. Neighbouring cells thinner than a pixel are merged
into bars of four pixels. In a bar the kinds stand one below the other, each as high as its share of
the time, and the rest of the height is idle. So a lane of millions of cells needs no more text than
one of thousands, and its areas are exact.

    FFFFFFFFBBBBBBBBBBBBBBBB          FFFFFFFFFFFF  FF
    FFFFFFFFBBBBBBBBBBBBBBBB          BBBBBBBBBBBBFFFF
    FFFFFFFFBBBBBBBBBBBBBBBB  a cell  BBBBBBBBBBBBBBBB  thousands
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from textwrap import wrap
from xml.sax.saxutils import escape

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.ir import KIND_INDEX, KINDS, Bools, Columns, Ints, Kind, Schedule, printable
from schedir.render.axis import finite, round_step, ticks
from schedir.render.captions import (
    axis_title,
    captions,
    named_costs,
    readable,
    title,
    window_of,
    with_unit,
)
from schedir.render.lanes import (
    SHADES,
    Lanes,
    has_copies,
    has_replicas,
    lanes_of,
    lanes_per_rank,
    most_stages,
)
from schedir.render.memory import AXIS, Curve, Kept, between, kept_by
from schedir.render.palette import (
    FAINT_INK,
    GRID,
    IDLE_FILL,
    INK,
    MEMORY_FILL,
    PAPER,
    STEP_FILL,
    WORDS,
    fill_of,
    swatches,
)
from schedir.render.svg_text import LABEL, SMALL_LABEL, Lengths, path, px, text_at, text_width
from schedir.render.text import Piece, number
from schedir.simulator import Timeline, Unit

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_MARGIN = 14.0
_LINE = 18.0
"""The height of a line of text."""
_NARROWEST, _WIDEST = 420.0, 1100.0
"""The width of the time axis."""
_HIGHEST_LANE, _LOWEST_LANE, _REPLICAS_LANE = 24.0, 3.0, 18.0
_ALL_LANES = 900.0
"""The height of all lanes; with more ranks, each lane is lower."""
_SHORTEST = 16
"""A cell that is this many times shorter than the longest one gets no room for a label."""
_BETWEEN_TICKS = 56.0
_TITLE_LETTER = 7.8
_LETTER = 7.2
"""The width of a letter in the width that a user asks for."""
_LEAST = 300
"""The least width of a picture that a user may ask for."""
_THINNEST = 1.0
_BAR, _LEVELS = 4.0, 50
"""The width of a bar of merged cells, in pixels like all lengths here; the number of heights."""
_SEPARATED = 6.0
"""Cells at least this wide have a white outline."""
_STEP_WIDTH = 2.5
_TALLER, _LONE_STEP = 0.08, 40.0
"""The mark of a step extends its lane by this part; marks close together are narrower."""
_TIGHT = 0.5
"""How much narrower than its label a cell may be."""
_LOWEST_LABEL = 10.0
"""The least height of a cell with a label."""
_ROOMY = 15.0
"""The least height of a cell with a label of full size."""


@attrs.frozen
class _Panel:
    """A timeline in the picture: its `lanes` in pixels, `scale` pixels to its unit of time.

    It is drawn from `since` to `until`, in that unit. From `top` on, the lanes of ranks are `pitch`
    apart and `lane` high. Below each are a lane of copies of height `engine`, and a curve of height
    `curve`; 0 for none.
    """

    timeline: Timeline
    caption: str
    scale: float
    since: float
    until: float
    top: float
    lane: float
    engine: float
    curve: float
    pitch: float
    lanes: Lanes = attrs.field(init=False)

    @lanes.default
    def _in_pixels(self) -> Lanes:
        lanes = lanes_of(self.timeline).between(self.since, self.until)
        start, end = (
            np.round((np.clip(times, self.since, self.until) - self.since) * self.scale, 2)
            for times in (lanes.start, lanes.end)
        )
        return attrs.evolve(lanes, start=start, end=end)

    @property
    def ranks(self) -> range:
        """The ranks, from the top."""
        return range(self.timeline.schedule.ranks)

    @property
    def bottom(self) -> float:
        """The lower end of the last lane, or of the curve below it."""
        return self.lane_top(self.ranks[-1]) + self.lane + self.engine + self.curve

    @property
    def end(self) -> float:
        """The end of the makespan, from the left of the lanes."""
        until = min(self.until, self.timeline.makespan)
        return round(max(until - self.since, 0) * self.scale, 2)

    def lane_top(self, rank: int) -> float:
        """The upper edge of a rank's lane."""
        return self.top + rank * self.pitch


def svg_blocks(
    timeline: Timeline,
    against: Timeline | None = None,
    *,
    memory: bool = False,
    heading: str | None = None,
    breadth: str | float | None = None,
    start: float = 0,
    end: float | None = None,
) -> Iterator[Piece]:
    """The picture, piece by piece. A timeline `against` is drawn below, on the same time axis.

    Cells too thin to be seen are merged, and the description counts them. With `memory` there is a
    curve under each lane: the bytes that the rank holds, or its live activations if sizes are
    unknown. `heading` and `breadth` are the title and the width of `display.Looks`. Raises
    SchedirError for a bad width and an empty window, and ValueError if the sizes do not fit the
    stages.
    """
    pixels = _pixels(breadth)
    both = readable(timeline, against)
    schedules = [line.schedule for line in both]
    kept = kept_by(both) if memory else None
    start, end = window_of(both, start, end)
    left = _MARGIN + 22 + 7 * len(str(max(each.ranks for each in schedules) - 1))
    left += max(map(_stages_room, schedules))
    room = kept.room if kept else _MARGIN
    if pixels is None:
        width = _width(both, end - start)
    else:
        width = pixels - left - max(room, _tick_width(number(end)) / 2)
    per_unit = finite(width / (end - start or 1))
    shapes = list(dict.fromkeys(map(title, schedules)))
    named = shapes if heading is None else [printable(heading)]
    headings = [line for each in named for line in wrap(each, int(width / _TITLE_LETTER))]
    top = _MARGIN + _LINE * len(headings) + 4
    legend, rows = _legend(both, width, kept, left, top + 12)
    top += _LINE * rows
    heights = _heights(both, memory)
    panels = []
    for line, name in zip(both, captions(both), strict=True):
        said = named_costs(line, name, partial(_duration, unit=line.unit))
        panels.append(_Panel(line, said, per_unit, start, end, top + _LINE + 6, *heights))
        top = panels[-1].bottom
    marks = _ticks(start, end, per_unit)
    reach = max((x + _tick_width(text) / 2 for text, x in marks), default=0)
    wide = px(pixels or left + width + max(room, reach - width))
    high = px(top + 44)
    yield Piece(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" role="img" font-family="{_FONT}" font-size="12">\n'
        f"<title>{escape(printable(heading or '; '.join(shapes)))}</title>\n"
    )
    yield Piece(f"<desc>{escape(_description(panels))}</desc>\n")
    yield Piece(f'<rect width="100%" height="100%" rx="4" fill="{PAPER}"/>\n')
    for turn, text in enumerate(headings):
        yield text_at(left, _MARGIN + 12 + turn * _LINE, text, size=14, weight="bold")
    yield from legend
    for turn, panel in enumerate(panels):
        yield from _panel(panel, left, [x for _, x in marks])
        if kept is not None:
            yield from _curves(kept, kept.curves[turn], panel, left, width)
    yield from _axis(marks, axis_title(both[0]), left, width, panels[-1].bottom)
    yield Piece("</svg>\n")


def _legend(
    timelines: Sequence[Timeline], width: float, kept: Kept | None, left: float, top: float
) -> tuple[list[Piece], int]:
    """The legend of colours and marks, with its first line on `top`; and its number of lines."""
    schedules = [line.schedule for line in timelines]
    shown = [*swatches(schedules), ([IDLE_FILL], "idle")]
    if kept is not None:
        shown.append(([MEMORY_FILL], kept.what))
    chunks = max(map(most_stages, schedules))
    if chunks > 1:
        shown.append(([], f"a shade for each of a rank's {chunks} stages"))
    pieces = []
    x, row = 0.0, 0
    for fills, text in shown:
        wide = 2.5 if fills == [STEP_FILL] else 14.0
        before = len(fills) * wide + 5
        takes = before + 6.4 * len(text) + 16
        if x and x + takes > width:
            x, row = 0.0, row + 1
        y = top + row * _LINE
        for turn, fill in enumerate(fills):
            pieces.append(
                Piece(
                    f'<rect x="{px(left + x + turn * wide)}" y="{px(y - 10)}" width="{px(wide)}" '
                    f'height="12" fill="{fill}"/>\n'
                )
            )
        pieces.append(text_at(left + x + before, y, text))
        x += takes
    return pieces, row + 1


def _heights(timelines: Sequence[Timeline], memory: bool) -> tuple[float, float, float, float]:
    """The heights of a rank's lane, of its lane of copies and of its curve, and the distance from
    lane to lane."""
    schedules = [line.schedule for line in timelines]
    ranks, within = sum(each.ranks for each in schedules), max(map(lanes_per_rank, schedules))
    lane = min(_HIGHEST_LANE, max(_LOWEST_LANE, _ALL_LANES / ranks - 1))
    if within > 1:
        lane = within * min(_REPLICAS_LANE, max(_LOWEST_LANE, _ALL_LANES / (ranks * within) - 1))
    engine = 0.6 * lane / within if any(map(has_copies, schedules)) else 0.0
    curve = max(0.8 * lane / within, min(AXIS, _ALL_LANES / ranks - lane)) if memory else 0.0
    pitch = lane + engine + curve + min(8.0 if memory else 4.0, 0.2 * lane)
    return lane, engine, curve, pitch


def _curves(
    kept: Kept, curves: Sequence[Curve], panel: _Panel, left: float, width: float
) -> Iterator[Piece]:
    """The curves under the lanes, and the peak beside each, if there is room."""
    for rank, curve in enumerate(curves):
        top = panel.lane_top(rank) + panel.lane + panel.engine + 1
        yield Piece(f'<g transform="translate({px(left)} {px(top)})">\n')
        shown = between(curve, panel.since, panel.until)
        yield kept.draw(shown, panel.scale, panel.end, panel.curve)
        yield Piece("</g>\n")
        yield from kept.beside(curve, left + width, top, panel.curve)


def _width(timelines: Sequence[Timeline], longest: float) -> float:
    """A width with room for the labels of all but the shortest cells, within that of a page."""
    needs = [1.0]
    for line in timelines:
        columns, durations = line.schedule.columns, line.ends - line.starts
        least = np.fmax.reduce(durations[columns.is_kind(*WORDS)], initial=0) / _SHORTEST
        digits = "0" * len(str(columns.microbatch.max(initial=0)))
        for kind in WORDS:
            own = durations[columns.is_kind(kind) & (durations > least)]
            if len(own):
                wide = text_width(kind.letter + digits, LABEL)
                needs.append(wide / np.quantile(own, 0.1).item())
    return min(_WIDEST, max(_NARROWEST, longest * max(needs)))


def _duration(time: float, unit: Unit | None) -> str:
    """A time with its unit, in four digits, or in whole units if these are more."""
    digits = 3 - math.floor(math.log10(time)) if time else 0
    return with_unit(round(time, max(0, digits)), unit)


def _description(panels: Sequence[_Panel]) -> str:
    """A description of the picture, for readers who cannot see it."""
    text = "Time goes to the right; a lane for each rank shows what it computes"
    copies = any(panel.engine for panel in panels)
    text += ", and one below it what it copies to its host and back." if copies else "."
    for panel in panels:
        said = panel.caption
        if not said.startswith(panel.timeline.schedule.name):
            said = f"{said[0].upper()}{said[1:]}"
        text += f" {said}."
    computes = [panel.lanes.where(panel.lanes.lane % 2 == 0) for panel in panels]
    thin, every = sum(int(_thin(cells).sum()) for cells in computes), sum(map(len, computes))
    if thin:
        text += (
            f" {thin} of {every} cells are thinner than {px(_THINNEST)} pixel, and merged: each "
            "kind is as high as its share of the time there."
        )
    return text


def _ticks(start: float, end: float, per_unit: float) -> list[tuple[str, float]]:
    """The times on the axis, and their positions."""
    if not end:
        return [("0", 0)]
    least = _BETWEEN_TICKS
    while True:
        times = ticks(start, end, round_step(least / per_unit))
        found = [(number(time), max(time - start, 0) * per_unit) for time in times]
        wide = max((_tick_width(text) for text, _ in found), default=0)
        if wide <= least:
            return found
        least = wide


def _pixels(breadth: str | float | None) -> float | None:
    """The width of a picture in pixels, from the user's words. Raises SchedirError."""
    if breadth is None:
        return None
    text = str(breadth)
    try:
        found = float(text.removesuffix("cm")) * (96 / 2.54 if text.endswith("cm") else _LETTER)
    except ValueError:
        found = 0
    if not _LEAST <= found < math.inf:
        raise SchedirError(f"a picture is at least 8cm wide, or 42 letters, not {text}")
    return found


def _tick_width(text: str) -> float:
    """The width of a tick's text."""
    return 7.5 * len(text) + 8


def _panel(panel: _Panel, left: float, marks: Sequence[float]) -> Iterator[Piece]:
    schedule = panel.timeline.schedule
    yield text_at(left, panel.top - 7, panel.caption, fill=FAINT_INK)
    wide = px(panel.end)
    idle = "".join(
        f"M{px(left)} {px(panel.lane_top(rank))}h{wide}v{px(panel.lane + panel.engine)}h-{wide}z"
        for rank in panel.ranks
    )
    yield Piece(f'<path class="idle" fill="{IDLE_FILL}" d="{idle}"/>\n')
    grid = "".join(f"M{px(left + x)} {px(panel.top)}V{px(panel.bottom)}" for x in marks)
    yield Piece(f'<path class="grid" stroke="{GRID}" d="{grid}"/>\n')
    for rank in panel.ranks:
        top = panel.lane_top(rank)
        drawn = [("lane", top, panel.lane), ("copies", top + panel.lane, panel.engine)]
        for track, (name, y, height) in enumerate(drawn if panel.engine else drawn[:1]):
            place = f"translate({px(left)} {px(y)})"
            yield Piece(f'<g class="{name}" text-anchor="middle" transform="{place}">\n')
            for element in _lane(schedule.columns, panel.lanes.of(2 * rank + track), height):
                yield Piece(element + "\n")
            yield Piece("</g>\n")
    every = max(1, round(round_step(11 / panel.pitch)))
    room = _stages_room(schedule)
    for rank in panel.ranks[::every]:
        top = panel.lane_top(rank)
        yield text_at(left - 7 - room, top + panel.lane / 2 + 4, str(rank), anchor="end")
        if room:
            yield from _stage_names(schedule.stages_of(rank), left - 7, top, panel.lane)
    middle = (panel.top + panel.bottom) / 2
    yield Piece(
        f'<text text-anchor="middle" fill="{INK}" '
        f'transform="translate({px(_MARGIN + 6)} {px(middle)}) rotate(-90)">rank</text>\n'
    )


def _axis(
    marks: Sequence[tuple[str, float]], name: str, left: float, width: float, bottom: float
) -> Iterator[Piece]:
    dashes = "".join(f"M{px(left + x)} {px(bottom + 4)}v5" for _, x in marks)
    line = f"M{px(left)} {px(bottom + 4)}h{px(width)}"
    yield Piece(f'<path class="axis" stroke="{INK}" fill="none" d="{line}{dashes}"/>\n')
    for time, x in marks:
        yield text_at(left + x, bottom + 21, time, anchor="middle")
    yield text_at(left + width / 2, bottom + 37, name, anchor="middle")


def _stages_room(schedule: Schedule) -> float:
    """The width of the names of stages beside their lanes; 0 if they have none."""
    if not has_replicas(schedule):
        return 0
    return 0.6 * SMALL_LABEL * len(f"stage {schedule.stages - 1}") + 6


def _stage_names(stages: Sequence[int], right: float, top: float, lane: float) -> Iterator[Piece]:
    """The names of a rank's stages, each beside its lane, if there is room."""
    high = lane / max(1, len(stages))
    for turn, stage in enumerate(stages if high >= SMALL_LABEL else ()):
        y = top + (turn + 0.5) * high + 0.36 * SMALL_LABEL
        yield text_at(right, y, f"stage {stage}", anchor="end", size=SMALL_LABEL, fill=FAINT_INK)


def _thin(cells: Lanes) -> Bools:
    """Whether each cell is too thin to be drawn alone."""
    return (cells.length < _THINNEST) & ~_updates(cells)


def _updates(cells: Lanes) -> Bools:
    """Whether each cell is an OPTIM_STEP."""
    steps: Bools = cells.colour // SHADES == KIND_INDEX[Kind.OPTIM_STEP]
    return steps


def _lane(columns: Columns, cells: Lanes, height: float) -> Iterator[str]:
    """The elements of a lane, with its upper left corner at the origin."""
    steps, thin = _updates(cells), _thin(cells)
    whole = cells.where(~thin & ~steps)
    yield from _boxes(whole, height)
    if thin.any():
        yield from _merged(cells, np.flatnonzero(thin), height)
    yield from _labels(columns, whole, height)
    if steps.any():
        yield _steps(cells.where(steps), cells, height)


def _boxes(cells: Lanes, height: float) -> Iterator[str]:
    separated = cells.length >= _SEPARATED
    for colour in np.unique(cells.colour).tolist():
        for apart in (False, True):
            some = cells.where((cells.colour == colour) & (separated == apart))
            if len(some):
                line = f' stroke="{PAPER}" stroke-width=".8"' if apart else ""
                yield f'<path fill="{fill_of(colour).area}"{line} d="{_outline(some, height)}"/>'


def _outline(cells: Lanes, height: float) -> str:
    return path(cells.start, cells.end, cells.top * height, cells.height * height)


def _merged(cells: Lanes, thin: Ints, height: float) -> Iterator[str]:
    """The thin cells, merged into bars."""
    left, right = cells.start[thin], cells.end[thin]
    apart = (thin[1:] > thin[:-1] + 1) | (left[1:] - right[:-1] >= _THINNEST)
    # A bar ends where the thin cells end.
    stretches = left[np.append(True, apart)], right[np.append(apart, True)]
    bars = np.union1d(np.concatenate(stretches), np.arange(0, right.max(), _BAR))
    # The amount of each colour up to every edge of a cell, and so in every bar.
    edges = np.stack([left, right], axis=1).ravel()
    top = np.zeros(len(bars) - 1)
    for colour in np.unique(cells.colour[thin]).tolist():
        takes = (right - left) * cells.height[thin] * (cells.colour[thin] == colour)
        so_far = np.stack([takes.cumsum() - takes, takes.cumsum()], axis=1).ravel()
        share = np.diff(np.interp(bars, edges, so_far)) / np.diff(bars)
        bottom = np.minimum(top + share, 1)
        upper, lower = (np.round(part * _LEVELS) / _LEVELS * height for part in (top, bottom))
        outline = _joined(bars[:-1], bars[1:], upper, lower)
        if outline:
            fill = fill_of(colour).area
            yield f'<path class="merged" fill="{fill}" d="{outline}"/>'
        top = bottom


def _joined(left: Lengths, right: Lengths, upper: Lengths, lower: Lengths) -> str:
    """Bars side by side as a path; neighbours of one height are one box."""
    some = lower > upper
    left, right, upper, lower = left[some], right[some], upper[some], lower[some]
    if not len(left):
        return ""
    new = (left[1:] > right[:-1]) | (upper[1:] != upper[:-1]) | (lower[1:] != lower[:-1])
    first, last = np.append(True, new), np.append(new, True)
    return path(left[first], right[last], upper[first], (lower - upper)[first])


def _labels(columns: Columns, cells: Lanes, height: float) -> Iterator[str]:
    """Labels: the kind's letter and the microbatch, the microbatch alone, or nothing, as there is
    room. Cells of one width have the same form of label, whatever their numbers."""
    digits = "0" * len(str(columns.microbatch.max(initial=0)))
    room = cells.length + _TIGHT
    for part in np.unique(cells.height)[::-1].tolist():
        if height * part < _LOWEST_LABEL:
            continue
        size = LABEL if part == 1 or height * part >= _ROOMY else SMALL_LABEL
        roomy = cells.where((cells.height == part) & (room >= text_width(digits, size)))
        texts: dict[str, str] = {}
        for colour in np.unique(roomy.colour).tolist():
            some, ink = roomy.where(roomy.colour == colour), fill_of(colour).ink
            texts[ink] = texts.get(ink, "") + "".join(_texts(columns, some, digits, size, height))
        for ink, text in sorted(texts.items()):
            yield f'<g class="labels" fill="{ink}" font-size="{px(size)}">{text}</g>'


def _texts(
    columns: Columns, cells: Lanes, digits: str, size: float, height: float
) -> Iterator[str]:
    """The labels of cells of one colour. They get one form, even if some are a little shorter."""
    name = KINDS[int(cells.colour[0]) // SHADES].letter
    if np.median(cells.length) + _TIGHT < text_width(name + digits, size):
        name = ""
    for x, y, microbatch in zip(
        ((cells.start + cells.end) / 2).tolist(),
        ((cells.top + cells.height / 2) * height + 0.36 * size).tolist(),
        columns.microbatch[cells.place].tolist(),
        strict=True,
    ):
        yield f'<text x="{px(x)}" y="{px(y)}">{escape(name)}{microbatch}</text>'


def _steps(cells: Lanes, among: Lanes, height: float) -> str:
    """A bar at each OPTIM_STEP, as long as the step takes, but narrow enough to show the others."""
    least = _STEP_WIDTH
    if np.diff(np.unique(cells.start)).min(initial=_LONE_STEP) < _LONE_STEP:
        least = min(least, max(0.3, float(np.median(among.length)) / 8))
    end = np.maximum(cells.end, cells.start + least)
    tall = attrs.evolve(cells, end=end, top=cells.top - _TALLER, height=cells.height + 2 * _TALLER)
    outline = _outline(tall, height)
    return f'<path class="steps" fill="{STEP_FILL}" d="{outline}"/>'
