"""The whole timeline as text: rows are ranks, time goes to the right, a cell is as wide as its
action is long.

        0              5              10             15             20
rank 0  F0 F1 F2 F3                   B0---    B1---    B2---    B3---*
rank 1     F0 F1 F2             B0--- F3 B1---    B2---    B3---*
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from schedir.render.captions import clock_of, costs, names, steady_figures, title, verdict
from schedir.render.cells import MOST_COLUMNS, painted_legend, rows_of
from schedir.render.drawing import Drawing, Part, Sketch
from schedir.render.text import Block, Piece, Table, as_json, coloured, fill, number, plain
from schedir.simulator import Timeline

if TYPE_CHECKING:
    from schedir.simulator.steady_state import SteadyState

_STATISTICS = ("rank", "busy", "idle", "span", "peak_activations", "weight_versions")


def timeline_json(timeline: Timeline, steady: SteadyState | None = None) -> str:
    """The figures of a timeline as JSON, and those of its steady state if there is one. The keys
    are a contract."""
    summary: dict[str, Any] = {
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "ranks": [{name: getattr(rank, name) for name in _STATISTICS} for rank in timeline.ranks],
    }
    if timeline.channel is not None:
        summary |= {"channel": timeline.channel, "edge_makespan": timeline.edge_makespan}
    if steady is not None:
        summary["steady"] = steady_figures(steady)
    return as_json(summary)


def timeline_text(timeline: Timeline, width: int | None = None, colour: bool = False) -> str:
    """The timeline drawn in text, with its legend and its figures.

    With a `width` in columns it is split into pages by time, each with all ranks. Without one,
    each rank is one line, however long. If a step or a link takes so long that nearly everything
    would be blank, it is drawn in letters, in `width` or 10,000 columns. `colour` adds ANSI escapes
    and changes no character.
    """
    write = coloured if colour else plain
    return write(timeline_blocks(timeline, width))


def timeline_blocks(
    timeline: Timeline,
    width: int | None = None,
    against: Timeline | None = None,
    fit: bool = False,
    window: tuple[float, float] | None = None,
) -> Iterator[Block]:
    """The timeline as blocks; a second timeline is drawn below the first.

    With `fit` the whole drawing fits into `width`, with letters if labels would need more. With a
    `window` only the part between its two times is drawn.
    """
    lines = [timeline] if against is None else [timeline, against]
    drawing = drawing_of(*lines, width=width, fit=fit, window=window)
    last = None if window is None else drawing.axis.column(window[1])
    axis_title = clock_of(lines).title
    for shape in dict.fromkeys(title(line.schedule) for line in lines):
        yield Piece(f"{fill(shape, width)}\n")
    yield Piece("\n")
    for left, end in drawing.pages(width, drawing.axis.column(window[0] if window else 0), last):
        yield Piece(f"{axis_title} {drawing.axis.time(left)}..{drawing.axis.time(end)}\n")
        yield from drawing.page(left, end)
        yield Piece("\n")
    yield from painted_legend(fill(drawing.legend, width))
    for line, name in zip(lines, names(lines), strict=True):
        yield Piece(f"\n{f'{name}: {costs(line)}' if name else verdict(line)}\n\n")
        yield statistics(line)


def drawing_of(
    *timelines: Timeline,
    width: int | None = None,
    fit: bool = False,
    window: tuple[float, float] | None = None,
) -> Drawing:
    """All ranks with all their actions, one timeline below the other on one axis.

    The drawing is in letters, in at most `width` columns, if it has to `fit` and labels need more,
    or if labels need more columns than anybody reads.
    """
    sketch = sketch_of(*timelines)
    room = MOST_COLUMNS if width is None else max(width - len(sketch.corner), 1)
    since, until = (0.0, sketch.makespan) if window is None else window
    if until - since < sketch.makespan:
        sketch = sketch.between(since, until)
    if sketch.too_wide(since, until) or (fit and sketch.scale * (until - since) > room):
        return sketch.squeezed(round(room / (until - since) * sketch.makespan))
    return sketch.labelled()


def sketch_of(*timelines: Timeline) -> Sketch:
    """A sketch of all ranks of all timelines, which draws as much detail as there is room for."""
    several = [rows_of(line, range(line.schedule.ranks)) for line in timelines]
    lanes = [lane for own in several for lane in own]
    ranks = len(str(max(lane.rank for lane in lanes)))
    stages = max((len(str(lane.stage)) for lane in lanes if lane.stage is not None), default=0)
    parts = []
    for line, name, own in zip(timelines, names(timelines), several, strict=True):
        heads = [
            f"rank {lane.rank:{ranks}}"
            + ("" if lane.stage is None else f" stage {lane.stage:{stages}}")
            + " copies" * lane.copies
            for lane in own
        ]
        parts.append(Part(line, name, own, heads))
    return Sketch(parts, " " * (2 + max(len(head) for part in parts for head in part.heads)))


def statistics(timeline: Timeline) -> Table:
    """The table of each rank's busy time, idle time, span and peaks."""
    rows = [[number(getattr(rank, name)) for name in _STATISTICS] for rank in timeline.ranks]
    header = [name.replace("_", " ") for name in _STATISTICS]
    return Table([header, *rows], ">" * len(header), header=True)
