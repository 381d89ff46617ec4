"""The whole timeline: rows = ranks, time to the right, a cell as wide as its action is long.

        0              5              10             15             20
rank 0  F0 F1 F2 F3                   B0---    B1---    B2---    B3---*
rank 1     F0 F1 F2             B0--- F3 B1---    B2---    B3---*
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from schedir.ir import Schedule
from schedir.render.axis import Axis
from schedir.render.cells import Labels, rows_of
from schedir.render.drawing import Drawing
from schedir.render.legend import legend, painted_legend
from schedir.render.styled import Block, Piece, Table, coloured, count, fill, number, plain
from schedir.simulator import Timeline


def timeline_json(timeline: Timeline) -> str:
    """The numbers of a timeline: the keys are a contract."""
    ranks = [
        {
            "rank": rank.rank,
            "busy": rank.busy,
            "idle": rank.idle,
            "span": rank.span,
            "peak_activations": rank.peak_activations,
            "weight_versions": rank.weight_versions,
        }
        for rank in timeline.ranks
    ]
    summary = {
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "ranks": ranks,
    }
    return json.dumps(summary, indent=2) + "\n"


def timeline_text(timeline: Timeline, width: int | None = None, colour: bool = False) -> str:
    """The timeline drawn in text, its legend, and a summary of what it costs.

    With a `width` in columns it is split into pages by time, each with all ranks; without one,
    each rank is one line, however long. `colour` adds ANSI escapes and changes no character.
    """
    write = coloured if colour else plain
    return write(timeline_blocks(timeline, width))


def timeline_blocks(timeline: Timeline, width: int | None = None) -> Iterator[Block]:
    """The same as blocks, for whatever writes them."""
    drawing = drawing_of(timeline)
    yield Piece(f"{fill(title(timeline.schedule), width)}\n\n")
    for left, end in drawing.pages(width):
        yield Piece(f"time {drawing.axis.time(left)}..{drawing.axis.time(end)}\n")
        yield from drawing.page(left, end)
        yield Piece("\n")
    yield from painted_legend(fill(drawing.legend, width))
    makespan = number(timeline.makespan)
    yield Piece(f"\nmakespan {makespan}, bubble {timeline.bubble_fraction:.1%}\n\n")
    yield statistics(timeline)


def drawing_of(timeline: Timeline) -> Drawing:
    """All ranks with all their actions."""
    schedule = timeline.schedule
    rows = rows_of(timeline, range(schedule.ranks))
    labels = Labels.of_schedule(schedule)
    axis = Axis(labels.scale(rows), timeline.makespan)
    cells = [labels.cells(row, axis) for row in rows]
    digits = len(str(schedule.ranks - 1))
    return Drawing(
        corner=" " * (len("rank ") + digits + 2),
        heads=[f"rank {rank:{digits}}  " for rank in range(schedule.ranks)],
        rows=cells,
        axis=axis,
        legend=legend(labels, rows, cells),
    )


def title(schedule: Schedule) -> str:
    """The name of a schedule, and its shape."""
    return (
        f"{schedule.name}: {count(schedule.ranks, 'rank')}, {count(schedule.stages, 'stage')}, "
        f"{count(schedule.microbatches, 'microbatch', 'es')}"
    )


def verdict(timeline: Timeline) -> str:
    """What a schedule costs, in two numbers."""
    return f"makespan {number(timeline.makespan)}, bubble {timeline.bubble_fraction:.1%}"


def statistics(timeline: Timeline) -> Table:
    """What each rank does with its time and memory."""
    rows = [("rank", "busy", "idle", "span", "peak activations", "weight versions")]
    rows += [
        (
            str(rank.rank),
            number(rank.busy),
            number(rank.idle),
            number(rank.span),
            str(rank.peak_activations),
            str(rank.weight_versions),
        )
        for rank in timeline.ranks
    ]
    return Table(rows, ">>>>>>", header=True)
