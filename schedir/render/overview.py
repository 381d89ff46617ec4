"""A timeline on one screen: its figures, its beginning, the repeated part once, and its end.

    rank  0              5              10       … 3 × the same … 25             30
       0  F0 F1 F2 F3                   B0--- F4 … B4---    B5---    B6---    B7---*
       1     F0 F1 F2             B0--- F3 B1--- … -- F7 B5---    B6---    B7---*

A part that all ranks repeat is drawn once. If that is still too much for the screen, cells become
letters, and then letters that stand for several actions each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from schedir.render.axis import Axis
from schedir.render.captions import bubble, makespan, names, title
from schedir.render.cells import Row, painted_legend, rows_of
from schedir.render.drawing import Drawing, Part, Sketch
from schedir.render.lanes import has_copies, lanes_per_rank
from schedir.render.repeats import Repeat, repeats
from schedir.render.terminal_timeline import statistics
from schedir.render.text import Block, Panel, Piece, fill
from schedir.simulator import Timeline

_COPIES = "copies"
_PANEL_EDGES = 4  # columns
_PROMPT_LINES = 1
_RULER_LINES = 1
_LEGEND_LINES = 4  # a blank line, and the lines of most legends
_TABLE_RULES = 1  # lines that a terminal draws below the header
_MOST_CUTS = 3  # more would take longer to read than they save


def overview_blocks(
    timeline: Timeline, width: int, height: int, against: Timeline | None = None
) -> Iterator[Block]:
    """The figures of a timeline and its drawing, on a screen of `width` columns and `height` lines.

    A second timeline is drawn below the first, on its axis.
    """
    several = [timeline] if against is None else [timeline, against]
    found = names(several)
    costs = [
        list(_costs(line, several, name and name.ljust(max(map(len, found)) + 2)))
        for line, name in zip(several, found, strict=True)
    ]
    shapes = dict.fromkeys(title(line.schedule) for line in several)
    under = [piece for line in costs[1:] for piece in (Piece("\n"), *line)]
    yield Panel(" / ".join(shapes), [*costs[0], *under])
    texts = ["".join(piece.text for piece in line) for line in costs]
    inside = max(width, _PANEL_EDGES + 1) - _PANEL_EDGES
    panel = sum(len(fill(text, inside).splitlines()) for text in texts) + 2
    room = height - panel - _PROMPT_LINES
    drawing = _drawing(several, width, room)
    for turn, (left, end) in enumerate(drawing.pages(width)):
        yield Piece("\n" if turn else "")
        yield from drawing.page(left, end)
    yield Piece("\n")
    yield from painted_legend(fill(drawing.legend, width))
    table = statistics(timeline)
    lines = _lines(drawing, width) + 1 + len(table.rows) + _TABLE_RULES
    if against is None and lines <= room and table.width <= width:
        yield Piece("\n")
        yield table


def _costs(timeline: Timeline, several: Sequence[Timeline], name: str) -> Iterator[Piece]:
    """Makespan, bubble and peaks, with the numbers in bold; the second of two timelines also shows
    its ratio to the first."""
    first, long = several[0].makespan, makespan(timeline)
    if first and timeline.makespan != first:
        long += f" (× {timeline.makespan / first:.2f})"
    found = [("makespan", long), ("bubble", bubble(timeline))]
    peaks = [max(rank.peak_activations for rank in line.ranks) for line in (timeline, *several)]
    if len(several) == 1 or len(set(peaks)) > 1:
        found.append(("peak activations", str(peaks[0])))
    if len(several) == 1:
        versions = max(rank.weight_versions for rank in timeline.ranks)
        found.append(("weight versions", str(versions)))
        if timeline.measured is not None:
            found.append(("step", str(timeline.measured.step)))
    yield Piece(name)
    for turn, (what, value) in enumerate(found):
        yield Piece(f"{'   ' if turn else ''}{what} ")
        yield Piece(value, "bold")


def _lines(drawing: Drawing, width: int) -> int:
    """The lines of a drawing and its legend, with a blank one between them."""
    return drawing.lines(width) + 1 + len(fill(drawing.legend, width).splitlines())


def _drawing(timelines: Sequence[Timeline], width: int, room: int) -> Drawing:
    """The drawing with the most detail that fits, its legend included."""
    space = room - _RULER_LINES - _LEGEND_LINES
    if len(timelines) > 1:
        space = space // len(timelines) - 1  # the name above each timeline
    parts = [_part(*each, space) for each in zip(timelines, names(timelines), strict=True)]
    lanes = [lane for part in parts for lane in part.lanes]
    corner = "rank  stage  " if any(lane.stage is not None for lane in lanes) else "rank  "
    if any(lane.copies for lane in lanes):
        corner = corner.ljust(len(_COPIES) + 2)
    sketch = Sketch(parts, corner, note="; --full draws everything")
    columns = max(width - len(corner), 1)
    if Axis(sketch.scale, sketch.makespan).columns <= columns:
        return sketch.labelled()
    # A part that repeats in one of two timelines need not repeat in the other.
    found = repeats(timelines[0]) if len(timelines) == 1 else []
    longest = sorted(found, key=lambda repeat: repeat.start - repeat.end)
    repeated = sorted(longest[:_MOST_CUTS], key=lambda repeat: repeat.start)
    draws: list[Callable[[Sequence[Repeat]], Drawing]] = [partial(sketch.squeezed, columns)]
    if not sketch.too_wide(0, sketch.makespan):
        draws = [sketch.labelled, sketch.coarse, *draws]
    for draw in draws:
        drawing = draw(repeated)
        if _lines(drawing, width) <= room:
            return drawing
    # At that scale a repeated part may be too short to be cut out.
    return sketch.squeezed(columns)


def _part(timeline: Timeline, name: str, room: int) -> Part:
    """The first and last ranks of a timeline, as many as there are lines for."""
    ranks = timeline.schedule.ranks
    shown, hidden = list(range(ranks)), 0
    room //= lanes_per_rank(timeline.schedule) + has_copies(timeline.schedule)
    if ranks > room:
        many = max(room - 1, 2)
        last = many // 2
        shown = [*range(many - last), *range(ranks - last, ranks)]
        hidden = ranks - many
    lanes = rows_of(timeline, shown)
    return Part(timeline, name, lanes, list(map(_head, lanes)), hidden)


def _head(lane: Row) -> str:
    if lane.copies:
        return _COPIES
    return f"{lane.rank:4}" + ("" if lane.stage is None else f"  {lane.stage:5}")
