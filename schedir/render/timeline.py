"""The whole timeline: rows = ranks, time to the right, a cell as wide as its action is long.

        0              5              10             15             20
rank 0  F0 F1 F2 F3                   B0---    B1---    B2---    B3---*
rank 1     F0 F1 F2             B0--- F3 B1---    B2---    B3---*
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from schedir.ir import Schedule
from schedir.render.axis import Axis
from schedir.render.captions import bubble, caption
from schedir.render.cells import MOST_COLUMNS, coarse_cells, too_wide
from schedir.render.clock import clock_of, with_unit
from schedir.render.drawing import Drawing, Group, stacked
from schedir.render.lanes import Lane, labels_of, lanes_of
from schedir.render.legend import legend, letters_legend, painted_legend, per_column
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
    each rank is one line, however long. Where a step or a link takes so long that nearly all of
    that would be blank, it is drawn in letters, in the `width` or 10,000 columns. `colour` adds
    ANSI escapes and changes no character.
    """
    write = coloured if colour else plain
    return write(timeline_blocks(timeline, width))


def timeline_blocks(
    timeline: Timeline,
    width: int | None = None,
    against: Timeline | None = None,
    fit: bool = False,
) -> Iterator[Block]:
    """The same as blocks, for whatever writes them; a second timeline is drawn below the first.

    With `fit` the `width` has room for the whole drawing, its cells being letters where labels
    would take more.
    """
    lines = [timeline] if against is None else [timeline, against]
    drawing = drawing_of(*lines, width=width, fit=fit)
    axis_title = clock_of(*lines).title
    for shape in dict.fromkeys(title(line.schedule) for line in lines):
        yield Piece(f"{fill(shape, width)}\n")
    yield Piece("\n")
    for left, end in drawing.pages(width):
        yield Piece(f"{axis_title} {drawing.axis.time(left)}..{drawing.axis.time(end)}\n")
        yield from drawing.page(left, end)
        yield Piece("\n")
    yield from painted_legend(fill(drawing.legend, width))
    for line, name in zip(lines, names(*lines), strict=True):
        yield Piece(f"\n{f'{name}: {_costs(line)}' if name else verdict(line)}\n\n")
        yield statistics(line)


def names(*timelines: Timeline) -> list[str]:
    """What sets several timelines apart; nothing for a single one."""
    if len(timelines) == 1:
        return [""]
    if any(line.measured for line in timelines):
        found = [caption(line) for line in timelines]
    else:
        found = [line.schedule.name for line in timelines]
    if len(set(found)) < len(found):
        found = [f"{name} ({turn})" for turn, name in enumerate(found, 1)]
    return found


def drawing_of(*timelines: Timeline, width: int | None = None, fit: bool = False) -> Drawing:
    """All ranks with all their actions, one timeline below the other on one axis.

    They are in letters that take at most `width` columns where labels would `fit` into no fewer
    than these, or into too many for anyone.
    """
    several = [lanes_of(line, range(line.schedule.ranks)) for line in timelines]
    rows = [lane.row for part in several for lane in part]
    labels, heads = labels_of(timelines), _heads(several)
    corner = " " * len(heads[0][0])
    makespan = max(line.makespan for line in timelines)
    room = MOST_COLUMNS if width is None else max(width - len(corner), 1)
    scale = labels.scale(rows)
    if (fit and scale * makespan > room) or too_wide(scale, rows, makespan):
        axis = Axis(room / makespan, makespan)
        cells = [coarse_cells(row, axis) for row in rows]
        words = letters_legend(rows, cells) + per_column(axis.scale)
    else:
        axis = Axis(scale, makespan)
        cells = [labels.cells(row, axis) for row in rows]
        words = legend(labels, rows, cells)
    drawn = iter(cells)
    groups = [
        Group(name, own, [next(drawn) for _ in part])
        for name, own, part in zip(names(*timelines), heads, several, strict=True)
    ]
    return stacked(corner, groups, axis, words)


def _heads(several: Sequence[Sequence[Lane]]) -> list[list[str]]:
    """What stands before each of the lanes, all of one width."""
    lanes = [lane for part in several for lane in part]
    ranks = len(str(max(lane.rank for lane in lanes)))
    stages = max((len(str(lane.stage)) for lane in lanes if lane.stage is not None), default=0)
    heads = [
        [
            f"rank {lane.rank:{ranks}}"
            + ("" if lane.stage is None else f" stage {lane.stage:{stages}}")
            + " copies" * lane.copies
            for lane in part
        ]
        for part in several
    ]
    width = max(len(head) for part in heads for head in part)
    return [[f"{head:{width}}  " for head in part] for part in heads]


def title(schedule: Schedule) -> str:
    """The name of a schedule, and its shape."""
    return (
        f"{schedule.name}: {count(schedule.ranks, 'rank')}, {count(schedule.stages, 'stage')}, "
        f"{count(schedule.microbatches, 'microbatch', 'es')}"
    )


def verdict(timeline: Timeline) -> str:
    """What a schedule costs, in two numbers, and at which step where that was measured."""
    measured = timeline.measured
    return _costs(timeline) + (f", measured at step {measured.step}" if measured else "")


def _costs(timeline: Timeline) -> str:
    makespan = with_unit(timeline.makespan, timeline.unit)
    return f"makespan {makespan}, bubble {bubble(timeline)}"


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
