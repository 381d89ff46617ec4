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
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from textwrap import wrap
from xml.sax.saxutils import escape

import attrs
import numpy as np

from schedir.errors import SchedirError
from schedir.ir import COPIES, printable
from schedir.render.axis import finite, round_step
from schedir.render.captions import (
    bubble,
    captions,
    clock_of,
    makespan,
    readable,
    title,
    window_of,
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
    swatches,
)
from schedir.render.rows import has_copies, lanes_per_rank, most_stages
from schedir.render.svg_lanes import (
    THINNEST,
    Cells,
    cells_of,
    draw_lane,
    stage_names,
    stages_room,
)
from schedir.render.svg_text import LABEL, px, text_at, text_width
from schedir.render.text import Piece, number
from schedir.simulator import Timeline

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_MARGIN = 14.0
_LINE = 18.0
"""The height of a line of text, in pixels like all lengths here."""
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


@attrs.frozen
class _Panel:
    """A timeline in the picture: `scale` pixels to its unit of time.

    It is drawn from `since` to `until`, in that unit. From `top` on, its lanes are `pitch` apart
    and `lane` high. Below each are a lane of copies of height `engine`, and a curve of height
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
        return round(self.timeline.makespan * self.scale, 2)

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
    is_whole, pixels = start == 0 and end is None, _pixels(breadth)
    both = [timeline] if against is None else [timeline, against]
    schedules = [line.schedule for line in both]
    kept = kept_by(both) if memory else None
    clock = clock_of(both)
    start, end = window_of(readable(both), start, end)
    left = _MARGIN + 22 + 7 * len(str(max(each.ranks for each in schedules) - 1))
    left += max(map(stages_room, schedules))
    room = kept.room if kept else _MARGIN
    if pixels is None:
        width = _width(both, clock.factors, end - start)
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
    for line, name, factor in zip(both, captions(both), clock.factors, strict=True):
        caption = f"makespan {makespan(line, clock.duration, factor)}, bubble {bubble(line)}"
        if against is not None or line.measured is not None:
            caption = f"{name}: {caption}"
        since, until = start / factor, end / factor
        drawn = line if is_whole else _within(line, since, until)
        times = per_unit * factor, since, until
        panels.append(_Panel(drawn, caption, *times, top + _LINE + 6, *heights))
        top = panels[-1].bottom
    ticks = _ticks(start, end, per_unit)
    reach = max((x + _tick_width(text) / 2 for text, x in ticks), default=0)
    wide = px(pixels or left + width + max(room, reach - width))
    high = px(top + 44)
    yield Piece(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" role="img" font-family="{_FONT}" font-size="12">\n'
        f"<title>{escape(printable(heading or '; '.join(shapes)))}</title>\n"
    )
    lanes = [[cells_of(p.timeline, rank, p.scale) for rank in p.ranks] for p in panels]
    yield Piece(f"<desc>{escape(_description(panels, lanes))}</desc>\n")
    yield Piece(f'<rect width="100%" height="100%" rx="4" fill="{PAPER}"/>\n')
    for turn, text in enumerate(headings):
        yield text_at(left, _MARGIN + 12 + turn * _LINE, text, size=14, weight="bold")
    yield from legend
    for turn, panel in enumerate(panels):
        yield from _panel(panel, left, lanes[turn], [x for _, x in ticks])
        if kept is not None:
            yield from _curves(kept, kept.curves[turn], panel, left, width)
    yield from _axis(ticks, clock.title, left, width, panels[-1].bottom)
    yield Piece("</svg>\n")


def _within(line: Timeline, since: float, until: float) -> Timeline:
    """The cells between two times, counted from the first."""
    # A cell that ends as the window begins is outside; one without duration may lie on its edge.
    seen = (np.maximum(line.starts, np.nextafter(line.ends, 0)) >= since) & (line.starts <= until)
    starts, ends = (
        np.where(seen, np.clip(times, since, until) - since, np.nan)
        for times in (line.starts, line.ends)
    )
    return attrs.evolve(line, starts=starts, ends=ends)


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


def _width(timelines: Sequence[Timeline], factors: Sequence[float], longest: float) -> float:
    """A width with room for the labels of all but the shortest cells, within that of a page."""
    needs = [1.0]
    for line, factor in zip(timelines, factors, strict=True):
        columns = line.schedule.columns
        durations = (line.ends - line.starts) * factor
        least = np.fmax.reduce(durations[columns.is_kind(*WORDS)], initial=0) / _SHORTEST
        digits = "0" * len(str(columns.microbatch.max(initial=0)))
        for kind in WORDS:
            own = durations[columns.is_kind(kind) & (durations > least)]
            if len(own):
                wide = text_width(kind.letter + digits, LABEL)
                needs.append(wide / np.quantile(own, 0.1).item())
    return min(_WIDEST, max(_NARROWEST, longest * max(needs)))


def _description(panels: Sequence[_Panel], lanes: Sequence[Sequence[Cells]]) -> str:
    """A description of the picture, for readers who cannot see it."""
    text = "Time goes to the right; a lane for each rank shows what it computes"
    copies = any(panel.engine for panel in panels)
    text += ", and one below it what it copies to its host and back. " if copies else ". "
    text += " ".join(f"{panel.caption[0].upper()}{panel.caption[1:]}." for panel in panels)
    drawn = [cells for ranks in lanes for cells in ranks]
    thin, every = sum(int(cells.thin.sum()) for cells in drawn), sum(len(c.left) for c in drawn)
    if thin:
        text += (
            f" {thin} of {every} cells are thinner than {px(THINNEST)} pixel, and merged: each "
            "kind is as high as its share of the time there."
        )
    return text


def _ticks(start: float, end: float, per_unit: float) -> list[tuple[str, float]]:
    """The times on the axis, and their positions."""
    if not end:
        return [("0", 0)]
    ticks = _every(_BETWEEN_TICKS, start, end, per_unit)
    wide = max((_tick_width(text) for text, _ in ticks), default=0)
    return ticks if wide <= _BETWEEN_TICKS else _every(wide, start, end, per_unit)


def _every(least: float, start: float, end: float, per_unit: float) -> list[tuple[str, float]]:
    """The ticks at a round step of at least `least` pixels."""
    step = round_step(least / per_unit)
    first, last = math.ceil(start / step * (1 - 1e-9)), math.floor(end / step * (1 + 1e-9))
    return [
        (number(turn * step), max(turn * step - start, 0) * per_unit)
        for turn in range(first, last + 1)
    ]


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


def _panel(
    panel: _Panel, left: float, lanes: Sequence[Cells], ticks: Sequence[float]
) -> Iterator[Piece]:
    schedule = panel.timeline.schedule
    yield text_at(left, panel.top - 7, panel.caption, fill=FAINT_INK)
    wide = px(panel.end)
    idle = "".join(
        f"M{px(left)} {px(panel.lane_top(rank))}h{wide}v{px(panel.lane + panel.engine)}h-{wide}z"
        for rank in panel.ranks
    )
    yield Piece(f'<path class="idle" fill="{IDLE_FILL}" d="{idle}"/>\n')
    grid = "".join(f"M{px(left + x)} {px(panel.top)}V{px(panel.bottom)}" for x in ticks)
    yield Piece(f'<path class="grid" stroke="{GRID}" d="{grid}"/>\n')
    for rank, cells in enumerate(lanes):
        top = panel.lane_top(rank)
        drawn = [("lane", cells, top, panel.lane)]
        if panel.engine:
            copies = cells_of(panel.timeline, rank, panel.scale, COPIES)
            drawn.append(("copies", copies, top + panel.lane, panel.engine))
        for name, own, y, height in drawn:
            place = f"translate({px(left)} {px(y)})"
            yield Piece(f'<g class="{name}" text-anchor="middle" transform="{place}">\n')
            for element in draw_lane(schedule.columns, own, height):
                yield Piece(element + "\n")
            yield Piece("</g>\n")
    every = max(1, round(round_step(11 / panel.pitch)))
    room = stages_room(schedule)
    for rank in panel.ranks[::every]:
        top = panel.lane_top(rank)
        yield text_at(left - 7 - room, top + panel.lane / 2 + 4, str(rank), anchor="end")
        if room:
            yield from stage_names(schedule.stages_of(rank), left - 7, top, panel.lane)
    middle = (panel.top + panel.bottom) / 2
    yield Piece(
        f'<text text-anchor="middle" fill="{INK}" '
        f'transform="translate({px(_MARGIN + 6)} {px(middle)}) rotate(-90)">rank</text>\n'
    )


def _axis(
    ticks: Sequence[tuple[str, float]], name: str, left: float, width: float, bottom: float
) -> Iterator[Piece]:
    marks = "".join(f"M{px(left + x)} {px(bottom + 4)}v5" for _, x in ticks)
    line = f"M{px(left)} {px(bottom + 4)}h{px(width)}"
    yield Piece(f'<path class="axis" stroke="{INK}" fill="none" d="{line}{marks}"/>\n')
    for time, x in ticks:
        yield text_at(left + x, bottom + 21, time, anchor="middle")
    yield text_at(left + width / 2, bottom + 37, name, anchor="middle")
