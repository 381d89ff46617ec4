"""One or two periods of the steady state, drawn from a full pipeline.

        27             30             33
rank 0  B5---*F9 B6---*F10
rank 1  --*F8 B6---*F9 B7-
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from schedir.render.captions import clock_of, costs, with_unit
from schedir.render.cells import MOST_COLUMNS, Row, painted_legend
from schedir.render.drawing import Drawing
from schedir.render.terminal_timeline import sketch_of
from schedir.render.text import Block, Piece, count, fill
from schedir.simulator import Timeline, in_unit
from schedir.simulator.steady_state import SteadyState, steady_in_unit


def steady_blocks(
    drained: Timeline, line: Timeline, steady: SteadyState, width: int | None
) -> Iterator[Block]:
    """Two periods from the middle of a `line` that shows the steady state, or one if it has no
    more; below them the figures of the steady state and of the `drained` call.

    Cells are letters if labels need more than `width` columns.
    """
    clock = clock_of([drained])
    if clock.unit is not None:
        drained, line = in_unit(drained, clock.unit), in_unit(line, clock.unit)
        steady = steady_in_unit(steady, clock.unit)
    yield Piece(f"{fill(_title(line), width)}\n\n")
    if steady.period:
        drawing, left, end = _window(line, steady, width)
        yield Piece(f"{clock.title} {drawing.axis.time(left)}..{drawing.axis.time(end)}\n")
        yield from drawing.page(left, end)
        yield Piece("\n")
        yield from painted_legend(fill(drawing.legend, width))
        yield Piece("\n")
    yield Piece(f"{fill(_full(steady), width)}\n{fill(_drained(drained), width)}\n")


def _title(line: Timeline) -> str:
    schedule = line.schedule
    shape = f"{count(schedule.ranks, 'rank')}, {count(schedule.stages, 'stage')}"
    many = count(schedule.microbatches, "microbatch", "es")
    return f"{schedule.name}: {shape}, once full (from the middle of {many})"


def _full(steady: SteadyState) -> str:
    each = with_unit(steady.time_per_microbatch, steady.unit)
    again = "" if steady.period_microbatches == 1 else _again(steady)
    return f"once full: {each} per microbatch, bubble {steady.bubble_fraction:.1%}{again}"


def _again(steady: SteadyState) -> str:
    many = count(steady.period_microbatches, "microbatch", "es")
    return f"; it repeats every {with_unit(steady.period, steady.unit)}, {many} later"


def _drained(line: Timeline) -> str:
    many = line.schedule.microbatches
    each = with_unit(line.makespan / many, line.unit)
    call = count(many, "microbatch", "es")
    return f"one call of {call}, filled and drained: {each} per microbatch, {costs(line)}"


def _window(line: Timeline, steady: SteadyState, width: int | None) -> tuple[Drawing, int, int]:
    """A drawing of the line, and the columns of its window: two periods with labels if there is
    room, or else one, in letters if it must be."""
    whole = sketch_of(line)
    room = MOST_COLUMNS if width is None else max(width - len(whole.corner), 1)
    several = steady.end - steady.start >= 3 * steady.period
    for times in (2, 1) if several else (1,):
        since, until = _bounds(whole.lanes, steady, times)
        sketch = whole.between(since, until)
        columns = sketch.scale * (until - since)
        if columns <= room:
            break
    squeezed = int(room / (until - since) * sketch.makespan)
    drawing = sketch.labelled() if columns <= room else sketch.squeezed(squeezed)
    return drawing, drawing.axis.column(since), drawing.axis.column(until)


def _bounds(lanes: Sequence[Row], steady: SteadyState, times: int) -> tuple[float, float]:
    """The start and end of a window of some periods in the middle, which cuts as few actions as
    possible."""
    period = steady.period
    spare = steady.end - steady.start - (times + 1) * period
    least = steady.start + max(0.0, spare) / 2
    spans = [span for lane in lanes for span in lane.spans]
    starts = np.sort([span.start for span in spans])
    ends = np.sort([span.end for span in spans])
    tried = starts[(starts >= least) & (starts < least + period)]
    cut = np.searchsorted(starts, tried) - np.searchsorted(ends, tried, side="right")
    since = tried[cut.argmin()].item()
    return since, since + times * period
