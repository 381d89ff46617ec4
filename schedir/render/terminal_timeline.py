"""Timelines as text: rows are ranks, time goes to the right, a cell is as wide as its action is
long.

        0              5              10             15             20
rank 0  F0 F1 F2 F3                   B0---    B1---    B2---    B3---*
rank 1     F0 F1 F2             B0--- F3 B1---    B2---    B3---*

A whole timeline shows every action. An overview fits a screen: a part that all ranks repeat is
drawn once, and if that is still too much, cells become letters, and then letters that stand for
several actions each. A steady state is one or two periods of it, drawn from a full pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from schedir.ir import Schedule
from schedir.render.captions import (
    axis_title,
    bubble,
    captions,
    costs,
    makespan,
    readable,
    steady_figures,
    title,
    verdict,
    with_unit,
)
from schedir.render.drawing import MOST_COLUMNS, Drawing, Row, Sketch, rows_of
from schedir.render.lanes import (
    has_copies,
    has_replicas,
    labels_say_stages,
    lanes_of,
    lanes_per_rank,
)
from schedir.render.repeats import Repeat, repeats
from schedir.render.text import (
    Block,
    Panel,
    Piece,
    Table,
    as_json,
    coloured,
    count,
    fill,
    number,
    plain,
)
from schedir.simulator import Timeline, in_unit
from schedir.simulator.steady_state import SteadyState, steady_in_unit

_STATISTICS = ("rank", "busy", "idle", "span", "peak_activations", "weight_versions")
_COPIES = "copies"
_PANEL_EDGES = 4  # columns
_PROMPT_LINES = 1
_RULER_LINES = 1
_LEGEND_LINES = 4  # a blank line, and the lines of most legends
_TABLE_RULES = 1  # lines that a terminal draws below the header
_MOST_CUTS = 3  # more would take longer to read than they save


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
    return write(timeline_blocks([timeline], width))


def timeline_blocks(
    lines: Sequence[Timeline],
    width: int | None = None,
    fit: bool = False,
    window: tuple[float, float] | None = None,
) -> Iterator[Block]:
    """Timelines as blocks, one drawn below the other.

    With `fit` the whole drawing fits into `width`, with letters if labels would need more. With a
    `window` only the part between its two times is drawn.
    """
    for shape in dict.fromkeys(title(line.schedule) for line in lines):
        yield Piece(f"{fill(shape, width)}\n")
    yield Piece("\n")
    yield from _drawn(sketch_of(lines, window), axis_title(lines[0]), width, fit)
    for line, name in zip(lines, captions(lines), strict=True):
        yield Piece(f"\n{f'{name}: {costs(line)}' if name else verdict(line)}\n\n")
        yield statistics(line)


def _drawn(sketch: Sketch, axis: str, width: int | None, fit: bool) -> Iterator[Piece]:
    """The sketch with as much detail as there is room for, and its legend."""
    room = MOST_COLUMNS if width is None else max(width - len(sketch.corner), 1)
    letters = sketch.too_wide or (fit and sketch.columns > room)
    drawing = sketch.letters(columns=room) if letters else sketch.labelled()
    bounds = map(drawing.axis.column, (sketch.since, sketch.until))
    for left, end in drawing.pages(width, *bounds):
        yield Piece(f"{axis} {drawing.axis.time(left)}..{drawing.axis.time(end)}\n")
        yield from drawing.page(left, end)
        yield Piece("\n")
    yield from drawing.painted_legend(width)


def sketch_of(lines: Sequence[Timeline], window: tuple[float, float] | None = None) -> Sketch:
    """A sketch of all ranks of all timelines."""
    ranks = max(len(str(line.schedule.ranks - 1)) for line in lines)
    stages = max(len(str(line.schedule.stages - 1)) for line in lines)

    def head(rank: int, stage: int | None, copies: bool) -> str:
        named = "" if stage is None else f" stage {stage:{stages}}"
        return f"rank {rank:{ranks}}{named}{f' {_COPIES}' * copies}"

    return _sketch(lines, [range(line.schedule.ranks) for line in lines], "", head, window)


def _sketch(
    lines: Sequence[Timeline],
    ranks: Sequence[Sequence[int]],
    title: str,
    head: Callable[[int, int | None, bool], str],
    window: tuple[float, float] | None = None,
    note: str = "",
) -> Sketch:
    """A sketch of some `ranks` of each timeline, below the `title` of the heads of their rows."""
    last = max(line.makespan for line in lines)
    since, until = window or (0.0, last)
    part = (since, until) if until - since < last else ()
    rows, corner = [], title
    for line, name, shown in zip(lines, captions(lines), ranks, strict=True):
        own = list(rows_of(line, shown, head, *part))
        corner = corner.ljust(2 + max(len(row.head) for row in own))
        rows += [Row(name), *own] if name else own
    return Sketch(rows, corner, labels_say_stages(lines), last, since, until, note)


def statistics(timeline: Timeline) -> Table:
    """The table of each rank's busy time, idle time, span and peaks."""
    rows = [[number(getattr(rank, name)) for name in _STATISTICS] for rank in timeline.ranks]
    header = [name.replace("_", " ") for name in _STATISTICS]
    return Table([header, *rows], ">" * len(header), header=True)


def overview_blocks(several: Sequence[Timeline], width: int, height: int) -> Iterator[Block]:
    """The figures of one or two timelines and their drawing, one below the other, on a screen of
    `width` columns and `height` lines."""
    found = captions(several)
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
    drawing = _overview(several, width, room)
    for turn, (left, end) in enumerate(drawing.pages(width)):
        yield Piece("\n" if turn else "")
        yield from drawing.page(left, end)
    yield Piece("\n")
    yield from drawing.painted_legend(width)
    table = statistics(several[0])
    lines = _lines(drawing, width) + 1 + len(table.rows) + _TABLE_RULES
    if len(several) == 1 and lines <= room and table.width <= width:
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
    pages = len(list(drawing.pages(width))) * (_RULER_LINES + len(drawing.rows) + 1)
    return pages + len(fill(drawing.legend, width).splitlines())


def _overview(timelines: Sequence[Timeline], width: int, room: int) -> Drawing:
    """The drawing with the most detail that fits, its legend included."""
    space = room - _RULER_LINES - _LEGEND_LINES
    if len(timelines) > 1:
        space = space // len(timelines) - 1  # the name above each timeline
    replicas = any(has_replicas(line.schedule) for line in timelines)

    def head(rank: int, stage: int | None, copies: bool) -> str:
        return _COPIES if copies else f"{rank:4}" + ("" if stage is None else f"  {stage:5}")

    shown = [_ranks_shown(line.schedule, space) for line in timelines]
    title, note = "rank  stage" if replicas else "rank", "; --full draws everything"
    sketch = _sketch(timelines, shown, title, head, note=note)
    columns = max(width - len(sketch.corner), 1)
    if sketch.columns <= columns:
        return sketch.labelled()
    # A part that repeats in one of two timelines need not repeat in the other.
    found = repeats(timelines[0]) if len(timelines) == 1 else []
    longest = sorted(found, key=lambda repeat: repeat.start - repeat.end)
    repeated = sorted(longest[:_MOST_CUTS], key=lambda repeat: repeat.start)
    draws: list[Callable[[Sequence[Repeat]], Drawing]] = [partial(sketch.letters, columns=columns)]
    if not sketch.too_wide:
        draws = [sketch.labelled, sketch.letters, *draws]
    for draw in draws:
        drawing = draw(repeated)
        if _lines(drawing, width) <= room:
            return drawing
    # At that scale a repeated part may be too short to be cut out.
    return sketch.letters(columns=columns)


def _ranks_shown(schedule: Schedule, room: int) -> Sequence[int]:
    """The first and last ranks, as many as there are lines for."""
    room //= lanes_per_rank(schedule) + has_copies(schedule)
    if schedule.ranks <= max(room, 2):
        return range(schedule.ranks)
    many = max(room - 1, 2)
    last = many // 2
    return [*range(many - last), *range(schedule.ranks - last, schedule.ranks)]


def steady_blocks(
    drained: Timeline, line: Timeline, steady: SteadyState, width: int | None
) -> Iterator[Block]:
    """Two periods from the middle of a `line` that shows the steady state, or one if it has no
    more; below them the figures of the steady state and of the `drained` call.

    Cells are letters if labels need more than `width` columns.
    """
    (drained,) = readable(drained)
    if drained.unit is not None:
        line, steady = in_unit(line, drained.unit), steady_in_unit(steady, drained.unit)
    shape = f"{count(line.schedule.ranks, 'rank')}, {count(line.schedule.stages, 'stage')}"
    many = count(line.schedule.microbatches, "microbatch", "es")
    name = f"{line.schedule.name}: {shape}, once full (from the middle of {many})"
    yield Piece(f"{fill(name, width)}\n\n")
    if steady.period:
        yield from _drawn(_steady_sketch(line, steady, width), axis_title(line), width, fit=True)
        yield Piece("\n")
    yield Piece(f"{fill(_full(steady), width)}\n{fill(_drained(drained), width)}\n")


def _full(steady: SteadyState) -> str:
    each = with_unit(steady.time_per_microbatch, steady.unit)
    many = count(steady.period_microbatches, "microbatch", "es")
    again = f"; it repeats every {with_unit(steady.period, steady.unit)}, {many} later"
    again *= steady.period_microbatches > 1
    return f"once full: {each} per microbatch, bubble {steady.bubble_fraction:.1%}{again}"


def _drained(line: Timeline) -> str:
    many = line.schedule.microbatches
    each = with_unit(line.makespan / many, line.unit)
    call = count(many, "microbatch", "es")
    return f"one call of {call}, filled and drained: {each} per microbatch, {costs(line)}"


def _steady_sketch(line: Timeline, steady: SteadyState, width: int | None) -> Sketch:
    """Two periods if there is room for their labels, or else one."""
    several = steady.end - steady.start >= 3 * steady.period
    for times in (2, 1) if several else (1,):
        sketch = sketch_of([line], _bounds(line, steady, times))
        if sketch.columns <= (MOST_COLUMNS if width is None else width - len(sketch.corner)):
            break
    return sketch


def _bounds(line: Timeline, steady: SteadyState, times: int) -> tuple[float, float]:
    """The start and end of a window of some periods in the middle, which cuts as few actions as
    possible."""
    period, lanes = steady.period, lanes_of(line)
    spare = steady.end - steady.start - (times + 1) * period
    least = steady.start + max(0.0, spare) / 2
    starts, ends = np.sort(lanes.start), np.sort(lanes.end)
    tried = starts[(starts >= least) & (starts < least + period)]
    cut = np.searchsorted(starts, tried) - np.searchsorted(ends, tried, side="right")
    since = tried[cut.argmin()].item()
    return since, since + times * period
