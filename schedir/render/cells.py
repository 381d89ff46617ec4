"""The cells of a timeline: each compute action's label, place and colour on the time axis.

A cell is a label, dashes up to its end, and one blank column before the next cell. An overlapped
pair is one cell, `F1;B0--`. A coarse cell repeats the letter of its kind: `FBBFBB`. The legend
explains letters and marks.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import attrs

from schedir.ir import Action, Kind
from schedir.render.axis import CUT_WIDTH, Axis, finite, nearest
from schedir.render.lanes import SHADES, has_replicas, lanes_of
from schedir.render.palette import (
    FAINT,
    LEFT_OUT,
    MIX,
    PAIR,
    PAIR_STYLE,
    SHORT,
    STEP,
    STEP_STYLE,
    WORDS,
    blended,
    shade,
)
from schedir.render.text import Piece, number
from schedir.simulator import Timeline

# A cell shorter than this part of the longest cell is a mark; a label would stretch all others.
_SHORTEST = 1 / 16
_BEYOND = 1e9  # more columns than anybody draws
MOST_COLUMNS = 10_000
"""The columns of a drawing at most, where no width is given."""
NEARLY_ALL = 0.75
"""The part of a column's work that one kind needs for its letter to stand in the column."""
_MOSTLY_IDLE = 8  # times as long as its busiest lane's work


class Span(NamedTuple):
    """An action, its time and its colour as in `Lanes`. `beside` is the other part of an overlapped
    pair that is one cell."""

    action: Action
    start: float
    end: float
    colour: int
    beside: Action | None = None


@attrs.frozen
class Row:
    """A row of a drawing by time: the compute of a rank, or of its replica of a `stage`, or its
    `copies` to the host and back."""

    rank: int
    spans: Sequence[Span]
    stage: int | None = None
    copies: bool = False


def rows_of(timeline: Timeline, ranks: Iterable[int]) -> list[Row]:
    """The rows of the `ranks`, from the top."""
    schedule, lanes = timeline.schedule, lanes_of(timeline)
    # The second part of a pair is in the cell of the first.
    lanes = lanes.where(~(lanes.paired & schedule.columns.joined[lanes.place]))
    replicas = has_replicas(schedule)
    rows = []
    for rank in ranks:
        computes, copies = ([], [])
        for spans, track in ((computes, 0), (copies, 1)):
            own = lanes.of(2 * rank + track)
            action = schedule.columns.action
            for place, *rest, paired in zip(
                *(c.tolist() for c in (own.place, own.start, own.end, own.colour, own.paired)),
                strict=True,
            ):
                spans.append(Span(action(place), *rest, action(place + 1) if paired else None))
        for stage in schedule.stages_of(rank) if replicas else ():
            rows.append(Row(rank, [s for s in computes if s.action.stage == stage], stage))
        if not replicas or not schedule.stages_of(rank):
            rows.append(Row(rank, computes))
        if copies:
            rows.append(Row(rank, copies, copies=True))
    return rows


class Cell(NamedTuple):
    """A piece of a row. It belongs to the page that holds its first `whole` columns.

    If it reaches into the next page, `rest` is drawn there.
    """

    left: int
    whole: int
    text: str
    style: str
    rest: str = "-"


def label_of(span: Span, several: bool) -> str:
    """The label of a span's cell; with the stage, if some rank holds `several`."""
    label = _name(span.action, several)
    return label if span.beside is None else f"{label};{_name(span.beside, several)}"


def _name(action: Action, several: bool) -> str:
    if action.kind is Kind.OPTIM_STEP:
        return STEP
    microbatch = "" if action.microbatch is None else action.microbatch
    return f"{action.stage if several else ''}{action.kind.letter}{microbatch}"


def label_scale(lanes: Sequence[Row], several: bool) -> float:
    """The fewest columns per unit of time that leave room for each label and a blank."""
    named = _long_enough(lanes)
    if not named:
        return 1
    needs = {(len(label_of(span, several)) + 1, span.end - span.start) for span in named}
    scale = finite(max(need / duration for need, duration in needs))
    if scale * max(span.end for span in named) > _BEYOND:
        return scale
    # If times are not whole numbers of columns, rounding can take a column from a cell.
    fits = all(
        nearest(span.end * scale) - nearest(span.start * scale) > len(label_of(span, several))
        for span in named
    )
    return scale if fits else finite(max((need + 1) / duration for need, duration in needs))


def coarse_scale(lanes: Sequence[Row]) -> float:
    """One column for the shortest action that has a cell."""
    return finite(1 / min((span.end - span.start for span in _long_enough(lanes)), default=1))


def too_wide(scale: float, lanes: Sequence[Row], makespan: float) -> bool:
    """Whether almost all columns are blank, because a step or a link takes very long."""
    if scale * makespan <= MOST_COLUMNS:
        return False
    work = (sum(span.end - span.start for span in _named([lane])) for lane in lanes)
    return makespan > _MOSTLY_IDLE * max(work)


def labelled_cells(lane: Row, axis: Axis, several: bool) -> list[Cell]:
    """The cells of a lane with their labels, ascending, on an axis without cuts."""
    cells = []
    for span in lane.spans:
        left, right = axis.column(span.start), axis.column(span.end)
        label, style = label_of(span, several), _style(span)
        if right - left > len(label):
            cells.append(Cell(left, len(label) + 1, label.ljust(right - left - 1, "-"), style))
        else:
            # A mark without room stands in the blank column after the cell before.
            mark = STEP if span.action.kind is Kind.OPTIM_STEP else SHORT
            cells.append(Cell(left if right > left else max(left - 1, 0), 1, mark, style))
    return sorted(cells)


def coarse_cells(lane: Row, axis: Axis, alike: float = 0) -> list[Cell]:
    """The cells of a lane as letters, ascending. A column has the letter of the kind that takes
    most of its work. If that is less than a part `alike` of the work, it has a mark in the mix of
    the colours.

    An action of less than half a column is drawn only if nothing else is drawn there, so every
    stretch of work leaves a letter.
    """
    takes: list[dict[tuple[str, str], float]] = [defaultdict(float) for _ in range(axis.end)]
    for span in lane.spans:
        kind = _style(span), _mark(span)
        start, end = span.start * axis.scale, span.end * axis.scale
        for column in range(int(start), min(math.ceil(end), axis.end)):
            takes[column][kind] += min(end, column + 1) - max(start, column)
    busy = [0.0, *(sum(part.values()) for part in takes), 0.0]
    cells = []
    for column, part in enumerate(takes):
        before, own, after = busy[column : column + 3]
        if own >= 0.5 or (before < own >= after and max(before, after) < 0.5):
            (style, mark) = max(part, key=part.__getitem__)
            if sum(share for kind, share in part.items() if kind[1] == mark) < alike * own:
                mark = MIX
                style = blended({style: share / own for (style, _), share in part.items()})
            cells.append(Cell(column, 1, mark, style, mark))
    return cells


def cut_out(cells: Sequence[Cell], axis: Axis) -> list[Cell]:
    """The cells of a row around the cuts of its axis, with a mark in place of each cut."""
    kept = []
    for first, end, moved in axis.parts():
        if moved or first:
            kept.append(Cell(first - moved - CUT_WIDTH, 1, LEFT_OUT, FAINT))
        for cell in cells:
            right = cell.left + len(cell.text)
            if cell.left >= end or right <= first:
                continue
            left, whole, text = cell.left, cell.whole, cell.text[: end - cell.left]
            if left < first:
                left, whole, text = first, 1, cell.rest * (min(right, end) - first)
            whole = min(whole, len(text) + 1)
            kept.append(cell._replace(left=left - moved, whole=whole, text=text))
    return kept


def _named(lanes: Sequence[Row]) -> list[Span]:
    """The spans that have a cell."""
    return [span for lane in lanes for span in lane.spans if span.action.kind in WORDS]


def _long_enough(lanes: Sequence[Row]) -> list[Span]:
    """The spans that have a cell and are not far shorter than the longest one."""
    spans = _named(lanes)
    least = max((span.end - span.start for span in spans), default=0) * _SHORTEST
    return [span for span in spans if span.end - span.start >= least] if least else []


def _mark(span: Span) -> str:
    if span.beside is not None:
        return PAIR
    return span.action.kind.letter


def _style(span: Span) -> str:
    if span.beside is not None:
        return PAIR_STYLE
    if span.action.kind in WORDS:
        return shade(span.action.kind, span.colour % SHADES)
    return STEP_STYLE


def labels_legend(lanes: Sequence[Row], cells: Sequence[Sequence[Cell]], several: bool) -> str:
    """The letters and marks that occur, and an example of a label."""
    words = _kinds_in_words(lanes)
    if any(span.beside is not None for lane in lanes for span in lane.spans):
        words.append("; between two that run as one")
    if any(cell.text == SHORT for row in cells for cell in row):
        words.append(f"{SHORT} too short to be named")
    text = ", ".join(words)
    example = next((s.action for s in _named(lanes) if s.action.microbatch is not None), None)
    if example is None:
        return text
    whose = f"stage {example.stage}'s" if several else "the"
    return (
        f"{text}; {_name(example, several)} is {whose} {WORDS[example.kind]} "
        f"of microbatch {example.microbatch}"
    )


def letters_legend(lanes: Sequence[Row], cells: Sequence[Sequence[Cell]]) -> str:
    """The meanings of the letters that coarse cells show."""
    drawn = {cell.text[0] for row in cells for cell in row}
    words = [*_kinds_in_words(lanes), f"{PAIR} a forward and a backward as one"]
    words.append(f"{MIX} several kinds in turn")
    if MIX in drawn:
        drawn |= {kind.letter for kind in WORDS}
    return ", ".join(word for word in words if word[0] in drawn)


def per_column(scale: float) -> str:
    """The time that a column stands for; it follows a legend of letters."""
    return f"; a column is {number(float(f'{1 / scale:.2g}'))} of time"


def _kinds_in_words(lanes: Sequence[Row]) -> list[str]:
    """The letter and the meaning of each kind that occurs."""
    spans = [span for lane in lanes for span in lane.spans]
    kinds = {action.kind for span in spans for action in (span.action, span.beside) if action}
    words = [f"{kind.letter} {word}" for kind, word in WORDS.items() if kind in kinds]
    return words + [f"{STEP} step of the optimiser"] * (Kind.OPTIM_STEP in kinds)


def painted_legend(text: str) -> Iterator[Piece]:
    """A legend, with each letter in the style of the drawing where it first stands alone."""
    styles = {kind.letter: shade(kind) for kind in WORDS} | {STEP: STEP_STYLE, PAIR: PAIR_STYLE}
    letters = "|".join(map(re.escape, styles))
    for part in re.split(rf"((?<!\w)(?:{letters})(?!\w))", text):
        yield Piece(part, styles.pop(part, ""))
    yield Piece("\n")
