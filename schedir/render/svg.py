"""A timeline as a picture, for papers and READMEs: SVG without scripts, fonts or anything else.

          1f1b: 4 ranks, 4 stages, 8 microbatches
          ▆ F forward  ▆ B backward  ▏ update of the weights
          predicted: makespan 33, bubble 27.3%
       0  ▆▆▆▆      ▆▆▆
  rank 1   ▆▆▆▆    ▆▆▆▆
       2    ▆▆▆▆  ▆▆▆▆▆
          0    5    10
                 time (ms)

The text is written by hand: a library that draws charts has no lanes, and one that writes elements
saves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

import attrs
import numpy as np

from schedir.ir import KINDS, Kind
from schedir.render.axis import round_step
from schedir.render.captions import captions
from schedir.render.clock import clock_of
from schedir.render.palette import (
    FAINT_INK,
    GRID,
    IDLE_FILL,
    INK,
    PAPER,
    STEP_FILL,
    WORDS,
    picture_fill,
)
from schedir.render.styled import Piece, number
from schedir.render.svg_lanes import THINNEST, Cells, cells_of, draw_lane, merged
from schedir.render.svg_text import LABEL, px, text_width
from schedir.render.timeline import title
from schedir.simulator import Timeline

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_MARGIN = 14.0
_NARROWEST, _WIDEST = 420.0, 1100.0
"""How wide the time axis is, in pixels, as all lengths here."""
_HIGHEST_LANE, _LOWEST_LANE = 24.0, 3.0
_ALL_LANES = 900.0
"""Lanes get lower, as there are more of them than this holds."""
_BETWEEN_TICKS = 56.0
_LINE = 18.0


@attrs.frozen
class _Panel:
    """A timeline in the picture: `scale` pixels to its unit of time, lanes from `top` on."""

    timeline: Timeline
    caption: str
    scale: float
    top: float
    pitch: float
    lane: float

    @property
    def bottom(self) -> float:
        """Where its last lane ends."""
        return self.lane_top(self.timeline.schedule.ranks - 1) + self.lane

    def lane_top(self, rank: int) -> float:
        """Where a rank's lane begins."""
        return self.top + rank * self.pitch


def svg_blocks(timeline: Timeline, against: Timeline | None = None) -> Iterator[Piece]:
    """The picture, piece by piece; a second timeline is drawn below, on the same time axis.

    Cells too thin to be seen are merged, and the description says how many.
    """
    both = [timeline] if against is None else [timeline, against]
    clock = clock_of(*both)
    spans = [line.makespan * factor for line, factor in zip(both, clock.factors, strict=True)]
    width = _width(both, clock.factors, max(spans))
    per_unit = width / (max(spans) or 1)
    headings = list(dict.fromkeys(title(line.schedule) for line in both))
    legend = list(_legend(both, width))
    ranks = sum(line.schedule.ranks for line in both)
    lane = min(_HIGHEST_LANE, max(_LOWEST_LANE, _ALL_LANES / ranks - 1))
    pitch = lane + min(4.0, 0.2 * lane)
    left = _MARGIN + 22 + 7 * len(str(max(line.schedule.ranks for line in both) - 1))
    top = _MARGIN + _LINE * len(headings) + 4
    legend_top, top = top, top + _LINE * (1 + max(entry.row for entry in legend))
    panels = []
    for line, name, factor in zip(both, captions(timeline, against), clock.factors, strict=True):
        top += _LINE + 6
        caption = f"makespan {clock.duration(line.makespan * factor)}, "
        caption += f"bubble {line.bubble_fraction:.1%}"
        if against is not None or line.measured is not None:
            caption = f"{name}: {caption}"
        panels.append(_Panel(line, caption, per_unit * factor, top, pitch, lane))
        top = panels[-1].bottom
    height = top + 44
    yield Piece(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{px(left + width + _MARGIN)}" '
        f'height="{px(height)}" viewBox="0 0 {px(left + width + _MARGIN)} {px(height)}" '
        f'role="img" font-family="{_FONT}" font-size="12">\n'
        f"<title>{escape('; '.join(headings))}</title>\n"
    )
    lanes = [
        [cells_of(p.timeline, r, p.scale) for r in range(p.timeline.schedule.ranks)] for p in panels
    ]
    yield Piece(f"<desc>{escape(_description(panels, lanes))}</desc>\n")
    yield Piece(f'<rect width="100%" height="100%" rx="4" fill="{PAPER}"/>\n')
    for turn, heading in enumerate(headings):
        yield _text(heading, left, _MARGIN + 12 + turn * _LINE, size=14, weight="bold")
    for entry in legend:
        yield from entry.draw(left, legend_top + 12)
    ticks = _ticks(max(spans), per_unit)
    for panel, cells in zip(panels, lanes, strict=True):
        yield from _panel(panel, left, cells, [x for _, x in ticks])
    yield from _axis(ticks, clock.title, left, width, panels[-1].bottom)
    yield Piece("</svg>\n")


def _width(timelines: Sequence[Timeline], factors: Sequence[float], longest: float) -> float:
    """Wide enough for the labels of all but the shortest cells, and no wider than a page bears."""
    needs = []
    for line, factor in zip(timelines, factors, strict=True):
        columns = line.schedule.columns
        named = columns.is_kind(*WORDS) & ~columns.joined
        durations = (line.ends - line.starts)[named] * factor
        durations = durations[durations > np.nanmax(durations, initial=0) / 16]
        if len(durations):
            digits = len(str(columns.microbatch.max()))
            needs.append(text_width(1 + digits, LABEL) / np.quantile(durations, 0.1).item())
    return min(_WIDEST, max(_NARROWEST, longest * max(needs, default=1)))


def _description(panels: Sequence[_Panel], lanes: Sequence[Sequence[Cells]]) -> str:
    """What the picture shows, for those who don't see it."""
    text = "Time goes to the right; a lane for each rank shows what it computes. "
    text += " ".join(f"{panel.caption[0].upper()}{panel.caption[1:]}." for panel in panels)
    drawn = [cells for ranks in lanes for cells in ranks]
    thin, every = sum(map(merged, drawn)), sum(len(cells.left) for cells in drawn)
    if thin:
        text += (
            f" {thin} of {every} cells are thinner than {px(THINNEST)} pixel, and merged: each "
            "kind is as high as its share of the time there."
        )
    return text


def _ticks(longest: float, per_unit: float) -> list[tuple[str, float]]:
    """The times that the axis names, and where they stand."""
    if not longest:
        return [("0", 0)]
    step = round_step(_BETWEEN_TICKS / per_unit)
    last = math.floor(longest / step * (1 + 1e-9))
    return [(number(turn * step), turn * step * per_unit) for turn in range(last + 1)]


def _panel(
    panel: _Panel, left: float, lanes: Sequence[Cells], ticks: Sequence[float]
) -> Iterator[Piece]:
    schedule = panel.timeline.schedule
    yield _text(panel.caption, left, panel.top - 7, fill=FAINT_INK)
    wide = px(panel.timeline.makespan * panel.scale)
    idle = "".join(
        f"M{px(left)} {px(panel.lane_top(rank))}h{wide}v{px(panel.lane)}h-{wide}z"
        for rank in range(schedule.ranks)
    )
    yield Piece(f'<path class="idle" fill="{IDLE_FILL}" d="{idle}"/>\n')
    grid = "".join(f"M{px(left + x)} {px(panel.top)}V{px(panel.bottom)}" for x in ticks)
    yield Piece(f'<path class="grid" stroke="{GRID}" d="{grid}"/>\n')
    for rank, cells in enumerate(lanes):
        place = f"translate({px(left)} {px(panel.lane_top(rank))})"
        yield Piece(f'<g class="lane" text-anchor="middle" transform="{place}">\n')
        for element in draw_lane(schedule.columns, cells, panel.lane):
            yield Piece(element + "\n")
        yield Piece("</g>\n")
    every = max(1, round(round_step(11 / panel.pitch)))
    for rank in range(0, schedule.ranks, every):
        middle = panel.lane_top(rank) + panel.lane / 2
        yield _text(str(rank), left - 7, middle + 4, anchor="end")
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
        yield _text(time, left + x, bottom + 21, anchor="middle")
    yield _text(name, left + width / 2, bottom + 37, anchor="middle")


def _text(
    text: str,
    x: float,
    y: float,
    *,
    anchor: str = "",
    fill: str = INK,
    size: float = 0,
    weight: str = "",
) -> Piece:
    more = (f' text-anchor="{anchor}"' if anchor else "") + (
        f' font-size="{px(size)}"' if size else ""
    )
    more += f' font-weight="{weight}"' if weight else ""
    return Piece(f'<text x="{px(x)}" y="{px(y)}" fill="{fill}"{more}>{escape(text)}</text>\n')


@attrs.frozen
class _Entry:
    """An entry of the legend: swatches and what they mean, at `x` of a `row`."""

    fills: Sequence[str]
    wide: float
    text: str
    x: float
    row: int

    def draw(self, left: float, top: float) -> Iterator[Piece]:
        """Its elements, with the first line of the legend standing on `top`."""
        x, y = left + self.x, top + self.row * _LINE
        for turn, fill in enumerate(self.fills):
            yield Piece(
                f'<rect x="{px(x + turn * self.wide)}" y="{px(y - 10)}" width="{px(self.wide)}" '
                f'height="12" fill="{fill}"/>\n'
            )
        yield _text(self.text, x + len(self.fills) * self.wide + 5, y)


def _legend(timelines: Sequence[Timeline], width: float) -> Iterator[_Entry]:
    """The kinds that occur, in the shades that occur, line by line."""
    kinds = {KINDS[kind] for line in timelines for kind in np.unique(line.schedule.columns.kind)}
    chunks = max(
        len(line.schedule.stages_of(r)) for line in timelines for r in range(line.schedule.ranks)
    )
    shades = min(chunks, 4)
    shown: list[tuple[list[str], float, str]] = [
        ([picture_fill(kind, turn).area for turn in range(shades)], 14.0, f"{kind.value} {word}")
        for kind, word in WORDS.items()
        if kind in kinds
    ]
    if Kind.OPTIM_STEP in kinds:
        shown.append(([STEP_FILL], 2.5, Kind.OPTIM_STEP.traits.word))
    shown.append(([IDLE_FILL], 14.0, "idle"))
    if chunks > 1:
        shown.append(([], 0, f"a shade for each of a rank's {chunks} stages"))
    x, row = 0.0, 0
    for fills, wide, text in shown:
        takes = len(fills) * wide + 5 + 6.4 * len(text) + 16
        if x and x + takes > width:
            x, row = 0.0, row + 1
        yield _Entry(fills, wide, text, x, row)
        x += takes
