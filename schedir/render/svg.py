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

from schedir.ir import COPIES
from schedir.render.axis import finite, round_step
from schedir.render.captions import bubble, captions
from schedir.render.clock import clock_of
from schedir.render.lanes import has_copies, lanes_per_rank
from schedir.render.palette import (
    FAINT_INK,
    GRID,
    IDLE_FILL,
    INK,
    PAPER,
    WORDS,
    letter,
)
from schedir.render.styled import Piece, number
from schedir.render.svg_lanes import (
    THINNEST,
    Cells,
    cells_of,
    draw_lane,
    merged,
    stage_names,
    stages_room,
)
from schedir.render.svg_legend import LINE, legend
from schedir.render.svg_memory import Curves, curves_of
from schedir.render.svg_text import LABEL, px, text_at, text_width
from schedir.render.timeline import title
from schedir.simulator import Timeline

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_MARGIN = 14.0
_NARROWEST, _WIDEST = 420.0, 1100.0
"""How wide the time axis is, in pixels, as all lengths here."""
_HIGHEST_LANE, _LOWEST_LANE, _REPLICAS_LANE = 24.0, 3.0, 18.0
_ALL_LANES = 900.0
"""Lanes get lower, as there are more of them than this holds."""
_SHORTEST = 16
"""What is as many times shorter than the longest cell gets no room for a label."""
_BETWEEN_TICKS = 56.0


@attrs.frozen
class _Panel:
    """A timeline in the picture: `scale` pixels to its unit of time.

    Its lanes lie `pitch` apart from `top` on; each is `lane` high. Below it is a lane of its copies
    of the height `engine`, and a curve of the height `curve`, 0 for none.
    """

    timeline: Timeline
    caption: str
    scale: float
    top: float
    pitch: float
    lane: float
    engine: float
    curve: float

    @property
    def bottom(self) -> float:
        """Where its last lane ends, or the curve below it."""
        last = self.lane_top(self.timeline.schedule.ranks - 1)
        return last + self.lane + self.engine + self.curve

    @property
    def end(self) -> float:
        """Where its makespan ends, from the left of its lanes."""
        return round(self.timeline.makespan * self.scale, 2)

    def lane_top(self, rank: int) -> float:
        """Where a rank's lane begins."""
        return self.top + rank * self.pitch


def svg_blocks(
    timeline: Timeline, against: Timeline | None = None, memory: bool = False
) -> Iterator[Piece]:
    """The picture, piece by piece; a second timeline is drawn below, on the same time axis.

    Cells too thin to be seen are merged, and the description says how many. With `memory` there is
    a curve under each lane, of the bytes that the rank holds, or of its live activations where
    their sizes are not known. Raises ValueError where the sizes are those of other stages.
    """
    both = [timeline] if against is None else [timeline, against]
    curves = curves_of(both) if memory else None
    clock = clock_of(*both)
    spans = [line.makespan * factor for line, factor in zip(both, clock.factors, strict=True)]
    width = _width(both, clock.factors, max(spans))
    per_unit = finite(width / (max(spans) or 1))
    headings = list(dict.fromkeys(title(line.schedule) for line in both))
    entries = list(legend(both, width, curves.what if curves else ""))
    within = max(lanes_per_rank(line.schedule) for line in both)
    copies = any(has_copies(line.schedule) for line in both)
    ranks = sum(line.schedule.ranks for line in both)
    lane, engine, curve, pitch = _heights(ranks, within, copies, memory)
    left = _MARGIN + 22 + 7 * len(str(max(line.schedule.ranks for line in both) - 1))
    left += max(stages_room(line.schedule) for line in both)
    top = _MARGIN + LINE * len(headings) + 4
    legend_top, top = top, top + LINE * (1 + entries[-1].row)
    panels = []
    for line, name, factor in zip(both, captions(timeline, against), clock.factors, strict=True):
        caption = f"makespan {clock.duration(line.makespan * factor)}, "
        caption += f"bubble {bubble(line)}"
        if against is not None or line.measured is not None:
            caption = f"{name}: {caption}"
        scale = per_unit * factor
        panels.append(_Panel(line, caption, scale, top + LINE + 6, pitch, lane, engine, curve))
        top = panels[-1].bottom
    ticks = _ticks(max(spans), per_unit)
    beside = max(curves.room if curves else _MARGIN, _reach(ticks) - width)
    size = px(left + width + beside), px(top + 44)
    yield Piece(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" role="img" font-family="{_FONT}" font-size="12">\n'
        f"<title>{escape('; '.join(headings))}</title>\n"
    )
    lanes = [
        [cells_of(p.timeline, r, p.scale) for r in range(p.timeline.schedule.ranks)] for p in panels
    ]
    yield Piece(f"<desc>{escape(_description(panels, lanes))}</desc>\n")
    yield Piece(f'<rect width="100%" height="100%" rx="4" fill="{PAPER}"/>\n')
    for turn, heading in enumerate(headings):
        yield text_at(left, _MARGIN + 12 + turn * LINE, heading, size=14, weight="bold")
    for entry in entries:
        yield from entry.draw(left, legend_top + 12)
    for turn, (panel, cells) in enumerate(zip(panels, lanes, strict=True)):
        yield from _panel(panel, left, cells, [x for _, x in ticks])
        if curves is not None:
            yield from _curves(curves, turn, panel, left, width)
    yield from _axis(ticks, clock.title, left, width, panels[-1].bottom)
    yield Piece("</svg>\n")


def _heights(
    ranks: int, within: int, copies: bool, memory: bool
) -> tuple[float, float, float, float]:
    """The height of a rank's lane, with so many `within`, those of its copies and of a curve below,
    and how far it is from lane to lane."""
    lane = min(_HIGHEST_LANE, max(_LOWEST_LANE, _ALL_LANES / ranks - 1))
    if within > 1:
        lane = within * min(_REPLICAS_LANE, max(_LOWEST_LANE, _ALL_LANES / (ranks * within) - 1))
    engine = 0.6 * lane / within if copies else 0.0
    curve = 0.8 * lane / within if memory else 0.0
    pitch = lane + engine + curve + min(8.0 if memory else 4.0, 0.2 * lane)
    return lane, engine, curve, pitch


def _curves(curves: Curves, turn: int, panel: _Panel, left: float, width: float) -> Iterator[Piece]:
    """The curves under the lanes, and beside them the most of each, as there is room."""
    for rank in range(panel.timeline.schedule.ranks):
        top = panel.lane_top(rank) + panel.lane + panel.engine + 1
        yield Piece(f'<g transform="translate({px(left)} {px(top)})">\n')
        yield from curves.draw(turn, rank, panel.scale, panel.end, panel.curve)
        yield Piece("</g>\n")
        if panel.curve >= 8:
            yield curves.label(turn, rank, left + width + 5, top + panel.curve - 2)


def _width(timelines: Sequence[Timeline], factors: Sequence[float], longest: float) -> float:
    """Wide enough for the labels of all but the shortest cells, and no wider than a page bears."""
    needs = [1.0]
    for line, factor in zip(timelines, factors, strict=True):
        columns = line.schedule.columns
        durations = (line.ends - line.starts) * factor
        least = np.fmax.reduce(durations[columns.is_kind(*WORDS)], initial=0) / _SHORTEST
        digits = "0" * len(str(columns.microbatch.max(initial=0)))
        for kind in WORDS:
            own = durations[columns.is_kind(kind) & (durations > least)]
            if len(own):
                wide = text_width(letter(kind) + digits, LABEL)
                needs.append(wide / np.quantile(own, 0.1).item())
    return min(_WIDEST, max(_NARROWEST, longest * max(needs)))


def _description(panels: Sequence[_Panel], lanes: Sequence[Sequence[Cells]]) -> str:
    """What the picture shows, for those who don't see it."""
    text = "Time goes to the right; a lane for each rank shows what it computes"
    copies = any(panel.engine for panel in panels)
    text += ", one below it what it copies to its host and back. " if copies else ". "
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
    ticks = _every(round_step(_BETWEEN_TICKS / per_unit), longest, per_unit)
    wide = max(_tick_width(text) for text, _ in ticks)
    if wide > _BETWEEN_TICKS:
        ticks = _every(round_step(wide / per_unit), longest, per_unit)
    return ticks


def _every(step: float, longest: float, per_unit: float) -> list[tuple[str, float]]:
    last = math.floor(longest / step * (1 + 1e-9))
    return [(number(turn * step), turn * step * per_unit) for turn in range(last + 1)]


def _tick_width(text: str) -> float:
    """The room that the text of a tick needs."""
    return 7.5 * len(text) + 8


def _reach(ticks: Sequence[tuple[str, float]]) -> float:
    """How far to the right the texts of the ticks go."""
    return max(x + _tick_width(text) / 2 for text, x in ticks)


def _panel(
    panel: _Panel, left: float, lanes: Sequence[Cells], ticks: Sequence[float]
) -> Iterator[Piece]:
    schedule = panel.timeline.schedule
    yield text_at(left, panel.top - 7, panel.caption, fill=FAINT_INK)
    wide = px(panel.end)
    idle = "".join(
        f"M{px(left)} {px(panel.lane_top(rank))}h{wide}v{px(panel.lane + panel.engine)}h-{wide}z"
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
        if panel.engine:
            copies = cells_of(panel.timeline, rank, panel.scale, COPIES)
            place = f"translate({px(left)} {px(panel.lane_top(rank) + panel.lane)})"
            yield Piece(f'<g class="copies" text-anchor="middle" transform="{place}">\n')
            for element in draw_lane(schedule.columns, copies, panel.engine):
                yield Piece(element + "\n")
            yield Piece("</g>\n")
    every = max(1, round(round_step(11 / panel.pitch)))
    for rank in range(0, schedule.ranks, every):
        middle = panel.lane_top(rank) + panel.lane / 2
        room = stages_room(schedule)
        yield text_at(left - 7 - room, middle + 4, str(rank), anchor="end")
        if room:
            yield from stage_names(
                schedule.stages_of(rank), left - 7, panel.lane_top(rank), panel.lane
            )
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
