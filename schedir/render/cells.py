"""The cells of a timeline: each compute action's label, place and colour on the time axis.

A cell is its label, dashes up to its end, and one blank column that sets it off from the next. An
overlapped pair is one cell, `F1;B0--`. A coarse cell is its kind's letter, over and over: `FBBFBB`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import attrs
import numpy as np

from schedir.ir import COMPUTE, Action, Kind, Schedule, starts_of
from schedir.render.axis import CUT_WIDTH, Axis, finite, nearest
from schedir.render.palette import (
    FAINT,
    LEFT_OUT,
    PAIR,
    PAIR_STYLE,
    SHORT,
    STEP,
    STEP_STYLE,
    WORDS,
    letter,
    shade,
)
from schedir.simulator import Timeline

# A cell shorter than this part of the longest one is drawn as a mark: it would stretch all others.
_SHORTEST = 1 / 16
_BEYOND = 1e9  # columns that nobody draws
MOST_COLUMNS = 10_000
"""Of a drawing in which nearly all is idle."""
_MOSTLY_IDLE = 8  # times as long as its busiest row's work


class Cell(NamedTuple):
    """A piece of a row. It belongs to the page that holds its first `whole` columns.

    `rest` is what is drawn of it on a page that it reaches into.
    """

    left: int
    whole: int
    text: str
    style: str
    rest: str = "-"


class ComputeSpan(NamedTuple):
    """A compute action and its time: lighter than a `Span`, and there may be millions.

    `beside` is the other part of an overlapped pair.
    """

    action: Action
    start: float
    end: float
    beside: Action | None = None


@attrs.frozen
class Row:
    """What is drawn of a rank: its compute in list order, and the turn of each of its stages."""

    spans: Sequence[ComputeSpan]
    chunks: dict[int, int]


def rows_of(timeline: Timeline, ranks: Iterable[int], kinds: Iterable[Kind] = COMPUTE) -> list[Row]:
    """What occupies each of the `ranks`, or its copy engine, where it is known when."""
    columns = timeline.schedule.columns
    kept = np.flatnonzero(columns.is_kind(*kinds) & ~columns.joined)
    kept = kept[~np.isnan(timeline.starts[kept]) & ~np.isnan(timeline.ends[kept])]
    starts = starts_of(columns.rank[kept], columns.ranks)
    compute = columns.take(kept, starts)
    bounds = starts.tolist()
    rows = []
    for rank in ranks:
        places = kept[bounds[rank] : bounds[rank + 1]]
        times = zip(timeline.starts[places].tolist(), timeline.ends[places].tolist(), strict=True)
        spans = [
            ComputeSpan(action, *time)
            for action, time in zip(compute.of_rank(rank), times, strict=True)
        ]
        for turn in np.flatnonzero(columns.shared[places]).tolist():
            spans[turn] = spans[turn]._replace(beside=columns.action(places[turn] + 1))
        stages = timeline.schedule.stages_of(rank)
        rows.append(Row(spans, {stage: chunk for chunk, stage in enumerate(stages)}))
    return rows


@attrs.frozen
class Labels:
    """How actions are named; with the stage, where some rank holds `several`."""

    several: bool

    @classmethod
    def of_schedules(cls, schedules: Iterable[Schedule]) -> Self:
        """The labels of the actions of one schedule, or of several that stand together."""
        return cls(
            any(
                len(schedule.stages_of(rank)) > 1
                for schedule in schedules
                for rank in range(schedule.ranks)
            )
        )

    def of_span(self, span: ComputeSpan) -> str:
        """The label of a span's cell."""
        label = self.of(span.action)
        return label if span.beside is None else f"{label};{self.of(span.beside)}"

    def of(self, action: Action) -> str:
        """The label of an action."""
        if action.kind is Kind.OPTIM_STEP:
            return STEP
        microbatch = "" if action.microbatch is None else action.microbatch
        return f"{action.stage if self.several else ''}{letter(action.kind)}{microbatch}"

    def scale(self, rows: Sequence[Row]) -> float:
        """The fewest columns per unit of time that leave room for each label and a blank."""
        named = _long_enough(rows)
        if not named:
            return 1
        needs = {(len(self.of_span(span)) + 1, span.end - span.start) for span in named}
        scale = finite(max(need / duration for need, duration in needs))
        if scale * max(span.end for span in named) > _BEYOND:
            return scale
        # Where times are no whole numbers of columns, rounding can take a column from a cell.
        fits = all(
            nearest(span.end * scale) - nearest(span.start * scale) > len(self.of_span(span))
            for span in named
        )
        return scale if fits else finite(max((need + 1) / duration for need, duration in needs))

    def cells(self, row: Row, axis: Axis) -> list[Cell]:
        """The cells of a row, ascending, on an axis without cuts."""
        return sorted(self._cell(row, span, axis) for span in row.spans)

    def _cell(self, row: Row, span: ComputeSpan, axis: Axis) -> Cell:
        left, right = axis.column(span.start), axis.column(span.end)
        label, kind = self.of_span(span), span.action.kind
        style = _style(row, span)
        if right - left > len(label):
            return Cell(left, len(label) + 1, label.ljust(right - left - 1, "-"), style)
        # Without room of its own, a mark stands in the blank column after the cell before.
        mark = STEP if kind is Kind.OPTIM_STEP else SHORT
        return Cell(left if right > left else max(left - 1, 0), 1, mark, style)


def coarse_scale(rows: Sequence[Row]) -> float:
    """One column for the shortest action that has a cell."""
    durations = [span.end - span.start for span in _long_enough(rows)]
    return finite(1 / min(durations, default=1))


def too_wide(scale: float, rows: Sequence[Row], makespan: float) -> bool:
    """Whether next to nothing is drawn in next to all columns: a step or a link takes so long."""
    columns = scale * makespan
    if columns <= MOST_COLUMNS:
        return False
    work = (
        sum(span.end - span.start for span in row.spans if span.action.kind in WORDS)
        for row in rows
    )
    return columns > _MOSTLY_IDLE * scale * max(work)


def coarse_cells(row: Row, axis: Axis) -> list[Cell]:
    """The cells of a row as letters alone, ascending.

    What is too short for a column is not drawn, but where nothing beside it is: no work is lost.
    """
    cells: list[Cell] = []
    drawn = 0  # the column after the last cell
    idle_since = -1.0
    for span in sorted(row.spans, key=_start):
        left, right = axis.column(span.start), axis.column(span.end)
        if idle_since < span.start < span.end and drawn <= left < axis.columns:
            right = max(right, left + 1)
        left = max(left, drawn)
        if right > left:
            letter = _letter(span)
            style = _style(row, span)
            cells.append(Cell(left, 1, letter * (right - left), style, letter))
            drawn = right
        idle_since = span.end
    return cells


def cut_out(cells: Sequence[Cell], axis: Axis) -> list[Cell]:
    """The cells of a row around the cuts of its axis, a mark in place of each cut."""
    kept = []
    for first, end, moved in axis.parts():
        if moved or first:
            kept.append(Cell(first - moved - CUT_WIDTH, 1, LEFT_OUT, FAINT))
        for cell in cells:
            right = cell.left + len(cell.text)
            if cell.left >= end or right <= first:
                continue
            text = cell.text[: end - cell.left]
            left, whole = cell.left, cell.whole
            if left < first:
                left, whole, text = first, 1, cell.rest * (min(right, end) - first)
            kept.append(
                cell._replace(left=left - moved, whole=min(whole, len(text) + 1), text=text)
            )
    return kept


def _long_enough(rows: Sequence[Row]) -> list[ComputeSpan]:
    """What has a cell of its own and is not far shorter than the longest of these."""
    spans = [span for row in rows for span in row.spans if span.action.kind in WORDS]
    longest = max((span.end - span.start for span in spans), default=0)
    least = longest * _SHORTEST
    return [span for span in spans if span.end - span.start >= least] if least else []


def _start(span: ComputeSpan) -> float:
    return span.start


def _letter(span: ComputeSpan) -> str:
    if span.beside is not None:
        return PAIR
    return STEP if span.action.kind is Kind.OPTIM_STEP else letter(span.action.kind)


def _style(row: Row, span: ComputeSpan) -> str:
    action = span.action
    if span.beside is not None:
        return PAIR_STYLE
    if action.kind in WORDS:
        return shade(action.kind, row.chunks.get(action.stage, 0))
    return STEP_STYLE
