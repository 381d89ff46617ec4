"""Timelines as rows of cells under a ruler, with labels, or in letters where there is less room.

        0              5              10       … 3 × the same … 25             30
rank 0  F0 F1 F2 F3                   B0--- F4 … B4---    B5---    B6---    B7---*
rank 1     F0 F1 F2             B0--- F3 B1--- … -- F7 B5---    B6---    B7---*

A cell is a label, dashes up to its end, and one blank column before the next cell. An overlapped
pair is one cell, `F1;B0--`. In letters, a cell repeats the letter of its kind: `FBBFBB`. The legend
explains letters and marks.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import attrs

from schedir.ir import Action, Kind
from schedir.render.axis import finite, nearest, round_step, ticks
from schedir.render.lanes import SHADES, Lanes, has_replicas, lanes_of
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
from schedir.render.repeats import Repeat
from schedir.render.text import Piece, count, fill, number
from schedir.simulator import Timeline

MOST_COLUMNS = 10_000
"""The columns of a drawing at most, where no width is given."""
# A cell shorter than this part of the longest cell is a mark; a label would stretch all others.
_SHORTEST = 1 / 16
_BEYOND = 1e9  # more columns than anybody draws
_NEARLY_ALL = 0.75  # the part of a column's work that a kind needs for its letter to stand there
_MOSTLY_IDLE = 8  # times as long as its busiest lane's work
_BETWEEN_TICKS = 8
_LEFT = attrgetter("left")
_CUT_WIDTH, _FEWEST_COLUMNS = 2, 6  # the columns that mark a cut, and the least that it has to save


class Span(NamedTuple):
    """An action, its time and its colour as in `Lanes`. `beside` is the other part of an overlapped
    pair that is one cell."""

    action: Action
    start: float
    end: float
    colour: int
    beside: Action | None = None

    @property
    def style(self) -> str:
        """The style of its cell."""
        if self.beside is not None:
            return PAIR_STYLE
        kind = self.action.kind
        return shade(kind, self.colour % SHADES) if kind in WORDS else STEP_STYLE


@attrs.frozen
class Row:
    """A row of a drawing: its head, and the spans of a rank's compute, of its replica of a stage,
    or of its copies to the host and back; or a `note` in place of spans."""

    head: str
    spans: Sequence[Span] = ()
    note: str = ""


def rows_of(
    timeline: Timeline,
    ranks: Sequence[int],
    head: Callable[[int, int | None, bool], str],
    since: float = -math.inf,
    until: float = math.inf,
) -> Iterator[Row]:
    """The rows of the `ranks`, from the top, with what runs between two times; and a note on the
    ranks left out between two of them.

    `head` makes the head of a row from its rank, its stage if each has a row of its own, and
    whether it shows copies.
    """
    schedule, lanes = timeline.schedule, lanes_of(timeline)
    # The second part of a pair is in the cell of the first.
    lanes = lanes.where(~(lanes.paired & schedule.columns.joined[lanes.place]))
    replicas, action = has_replicas(schedule), schedule.columns.action

    def spans(own: Lanes) -> list[Span]:
        own = own.where((own.end > since) & (own.start < until))
        columns = (own.place, own.start, own.end, own.colour, own.paired)
        return [
            Span(action(place), start, end, colour, action(place + 1) if paired else None)
            for place, start, end, colour, paired in zip(
                *(each.tolist() for each in columns), strict=True
            )
        ]

    for before, rank in zip((ranks[0] - 1, *ranks), ranks, strict=False):
        if rank > before + 1:
            hidden = count(rank - before - 1, "rank")
            yield Row(f"{LEFT_OUT:>4}", note=f"{hidden} left out")
        computes, copies = spans(lanes.of(2 * rank)), lanes.of(2 * rank + 1)
        for stage in (schedule.stages_of(rank) if replicas else ()) or (None,):
            own = [span for span in computes if stage in (None, span.action.stage)]
            yield Row(head(rank, stage, False), own)
        if len(copies):
            yield Row(head(rank, None, True), spans(copies))


class Cell(NamedTuple):
    """A piece of a row. It belongs to the page that holds its first `whole` columns; in the next
    page it goes on in dashes."""

    left: int
    whole: int
    text: str
    style: str

    def between(self, left: int, end: int) -> Cell:
        """The part of the cell from one column to another, with no text if there is none."""
        if self.left >= left:
            return self._replace(text=self.text[: end - self.left])
        return self._replace(left=left, whole=1, text="-" * (min(self._right, end) - left))

    @property
    def _right(self) -> int:
        return self.left + len(self.text)


class Cut(NamedTuple):
    """Columns `left` to `right` (exclusive), counted before any cut, that are not drawn.

    `note` stands on the ruler in their place, and `meaning` in the legend.
    """

    left: int
    right: int
    note: str
    meaning: str


# Not slotted, because cached properties need a __dict__.
@attrs.frozen(slots=False)
class Axis:
    """An axis of `scale` columns per unit of time up to `makespan`; `cuts` ascend."""

    scale: float = attrs.field(converter=finite)
    makespan: float
    cuts: Sequence[Cut] = ()

    def column(self, time: float) -> int:
        """The column of a time, before any cut."""
        return nearest(time * self.scale)

    @cached_property
    def parts(self) -> list[tuple[int, int, int]]:
        """The columns between the cuts: first, end, and how far they move to the left."""
        found, first, moved = [], 0, 0
        for cut in self.cuts:
            found.append((first, cut.left, moved))
            first, moved = cut.right, moved + cut.right - cut.left - _CUT_WIDTH
        return [*found, (first, self.column(self.makespan), moved)]

    @property
    def columns(self) -> int:
        """The number of drawn columns."""
        _, end, moved = self.parts[-1]
        return end - moved

    @cached_property
    def _tick(self) -> float:
        """The time between two ticks: 1, 2 or 5 times a power of ten."""
        return round_step(_BETWEEN_TICKS / self.scale)

    def time(self, column: int) -> str:
        """The time of a column; ticks and the end of the axis keep their exact time."""
        if column == self.column(self.makespan):
            return number(self.makespan)
        time = column / self.scale
        tick = round(time / self._tick) * self._tick
        return number(tick if self.column(tick) == column else time)

    def ticks(self, left: int, right: int) -> Iterator[tuple[int, str]]:
        """The ticks on the drawn columns `left` to `right` (exclusive), with their times."""
        for first, end, moved in self.parts:
            first, end = max(first, left + moved), min(end, right + moved)
            for time in ticks(first / self.scale, end / self.scale, self._tick):
                if first <= self.column(time) < end:
                    yield self.column(time) - moved, number(time)

    def ruler(self, left: int, end: int) -> str:
        """The notes of the cuts, and the ticks that there is room for."""
        marks: list[tuple[int, str]] = []
        for (_, column, moved), cut in zip(self.parts, self.cuts, strict=False):
            note = f"{LEFT_OUT} {cut.note} {LEFT_OUT}"
            at = max(left, min(column - moved, end - len(note)))
            free = all(other + len(text) <= at for other, text in marks)
            marks += [(at, note)] * (free and left <= column - moved < end)
        for at, text in self.ticks(left, end):
            after = at + len(text)
            if after <= end and all(after < o or at > o + len(other) for o, other in marks):
                marks.append((at, text))
        ruler = ""
        for column, text in sorted(marks):
            ruler = ruler.ljust(column - left) + text
        return ruler

    def around_cuts(self, cells: Sequence[Cell]) -> Iterator[Cell]:
        """The cells of a row around the cuts, with a mark in place of each cut."""
        if not self.cuts:
            yield from cells
            return
        for first, end, moved in self.parts:
            if first:
                yield Cell(first - moved - _CUT_WIDTH, 1, LEFT_OUT, FAINT)
            for cell in cells:
                part = cell.between(first, end)
                if part.text and cell.left < end:
                    whole = min(part.whole, len(part.text) + 1)
                    yield part._replace(left=part.left - moved, whole=whole)


@attrs.frozen
class Drawing:
    """Rows of cells: `rows[i]`, ascending, stand after `heads[i]`; `corner` is before the ruler.

    `legend` explains the letters.
    """

    corner: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    axis: Axis
    legend: str

    def pages(
        self, width: int | None, left: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """The columns at which pages start and end; one page if there is no `width`.

        A page ends at a tick of the ruler, if there is one. A cell that this would cut inside its
        label goes to the next page as a whole, which then starts with the first such cell.
        """
        last = self.axis.columns if last is None else last
        # The least that a page holds, however narrow the terminal is.
        least = max((cell.whole for cells in self.rows for cell in cells), default=1)
        room = last if width is None else max(width - len(self.corner), least)
        while last - left > room:
            end = left + room
            end = max((tick for tick, _ in self.axis.ticks(left + least, end + 1)), default=end)
            cut = [c.left for r in self.rows for c in _from(r, left, end) if c.left + c.whole > end]
            end = min((column for column in cut if column >= left), default=end)
            yield left, end
            left = end
        yield left, last

    def page(self, left: int, end: int) -> Iterator[Piece]:
        """The ruler and all rows, from one column to another."""
        yield Piece(f"{(self.corner + self.axis.ruler(left, end)).rstrip()}\n")
        for head, cells in zip(self.heads, self.rows, strict=True):
            drawn = list(self._row(cells, left, end))
            yield Piece(head.ljust(len(self.corner)) if drawn else head)
            yield from drawn
            yield Piece("\n")

    def painted_legend(self, width: int | None) -> Iterator[Piece]:
        """The legend, with each letter in the style of the drawing where it first stands alone."""
        styles = {kind.letter: shade(kind) for kind in WORDS} | {STEP: STEP_STYLE, PAIR: PAIR_STYLE}
        letters = "|".join(map(re.escape, styles))
        for part in re.split(rf"((?<!\w)(?:{letters})(?!\w))", fill(self.legend, width)):
            yield Piece(part, styles.pop(part, ""))
        yield Piece("\n")

    def _row(self, cells: Sequence[Cell], left: int, end: int) -> Iterator[Piece]:
        """The columns of a row from `left` up to `end`; labels that begin there are not cut."""
        drawn: list[Cell] = []
        for cell in _from(cells, left, end):
            part = cell.between(left, max(end, cell.left + cell.whole))
            while drawn and drawn[-1].left >= part.left:  # a mark without room
                drawn.pop()
            drawn += [part] * bool(part.text)
        column = left
        for first, _, text, style in drawn:
            if first > column:
                yield Piece(" " * (first - column))
            yield Piece(text, style)
            column = first + len(text)


def _from(cells: Sequence[Cell], left: int, end: int) -> Sequence[Cell]:
    """The cells that begin between two columns, and the one before, which may reach into them."""
    first, last = (bisect_left(cells, column, key=_LEFT) for column in (left, end))
    return cells[max(0, first - 1) : last]


# Not slotted, because cached properties need a __dict__.
@attrs.frozen(slots=False)
class Sketch:
    """Draws rows on one axis up to `makespan`, in more or less detail, from `since` to `until`.

    `corner` stands above the heads of the rows. Labels name their stage if they are `staged`. If
    something is left out, or letters replace labels, `note` ends the legend.
    """

    rows: Sequence[Row]
    corner: str
    staged: bool
    makespan: float
    since: float
    until: float
    note: str = ""

    @cached_property
    def _named(self) -> Sequence[Span]:
        """The spans that have a cell."""
        return [span for row in self.rows for span in row.spans if span.action.kind in WORDS]

    @cached_property
    def _long_enough(self) -> Sequence[Span]:
        """The spans that have a cell and are not far shorter than the longest one."""
        least = max((span.end - span.start for span in self._named), default=0) * _SHORTEST
        return [span for span in self._named if span.end - span.start >= least] if least else []

    @cached_property
    def scale(self) -> float:
        """The fewest columns per unit of time that leave room for each label and a blank."""
        needs = {(len(self._label(s)) + 1, s.end - s.start) for s in self._long_enough}
        if not needs:
            return 1
        scale = finite(max(need / duration for need, duration in needs))
        if scale * max(span.end for span in self._long_enough) > _BEYOND:
            return scale
        # If times are not whole numbers of columns, rounding can take a column from a cell.
        fits = all(
            nearest(span.end * scale) - nearest(span.start * scale) > len(self._label(span))
            for span in self._long_enough
        )
        return scale if fits else finite(max((need + 1) / duration for need, duration in needs))

    @cached_property
    def _letter_scale(self) -> float:
        """One column for the shortest action that has a cell."""
        return finite(1 / min((span.end - span.start for span in self._long_enough), default=1))

    @cached_property
    def columns(self) -> int:
        """The columns that labels need."""
        return nearest(self.until * self.scale) - nearest(self.since * self.scale)

    @cached_property
    def too_wide(self) -> bool:
        """Whether almost all columns would be blank, because a step or a link takes very long."""
        if self.columns <= MOST_COLUMNS:
            return False
        work = (
            sum(s.end - s.start for s in row.spans if s.action.kind in WORDS) for row in self.rows
        )
        return self.until - self.since > _MOSTLY_IDLE * max(work)

    def labelled(self, repeated: Sequence[Repeat] = ()) -> Drawing:
        """A drawing with labels, in which `repeated` parts are drawn once."""
        axis = self._axis(self.scale, repeated)
        cells = [self._labelled_cells(row, axis) for row in self.rows]
        marks = self._kinds()
        if any(span.beside is not None for row in self.rows for span in row.spans):
            marks[";"] = "between two that run as one"
        if any(cell.text == SHORT for row in cells for cell in row):
            marks[SHORT] = "too short to be named"
        words = _in_words(marks)
        example = next((s.action for s in self._named if s.action.microbatch is not None), None)
        if example is not None:
            whose = f"stage {example.stage}'s" if self.staged else "the"
            words += (
                f"; {self._name(example)} is {whose} {WORDS[example.kind]} "
                f"of microbatch {example.microbatch}"
            )
        return self._drawing(axis, cells, words, complete=not axis.cuts)

    def letters(self, repeated: Sequence[Repeat] = (), columns: int | None = None) -> Drawing:
        """A drawing in letters, in which `repeated` parts are drawn once. In so many `columns`,
        each stands for as many actions as necessary; by default the shortest action has one."""
        scale, about = self._letter_scale, ""
        if columns is not None:
            drawn = self.until - self.since - sum(r.end - r.start - r.period for r in repeated)
            scale = max(columns - (_CUT_WIDTH + 1) * len(repeated), 1) / drawn
            about = f"; a column is {number(float(f'{1 / scale:.2g}'))} of time"
        axis = self._axis(scale, repeated)
        alike = _NEARLY_ALL * (scale < self._letter_scale)
        cells = [_letter_cells(row, axis, alike) for row in self.rows]
        drawn_letters = {cell.text[0] for row in cells for cell in row}
        words = self._kinds() | {
            PAIR: "a forward and a backward as one",
            MIX: "several kinds in turn",
        }
        if MIX in drawn_letters:
            drawn_letters |= {kind.letter for kind in WORDS}
        words = {mark: word for mark, word in words.items() if mark in drawn_letters}
        return self._drawing(axis, cells, _in_words(words) + about, complete=False)

    def _axis(self, scale: float, repeated: Sequence[Repeat]) -> Axis:
        axis = Axis(scale, self.makespan)
        cuts = []
        for repeat in repeated:
            left, right = axis.column(repeat.start + repeat.period), axis.column(repeat.end)
            if right - left >= _CUT_WIDTH + _FEWEST_COLUMNS:
                again = f"{repeat.times - 1:,} × the same"
                until = number(repeat.start + repeat.period)
                later = count(repeat.microbatches, "microbatch", "es")
                meaning = f"time {number(repeat.start)}..{until} again, each time {later} later"
                cuts.append(Cut(left, right, again, f"{again}: {meaning}"))
        return attrs.evolve(axis, cuts=cuts)

    def _drawing(
        self, axis: Axis, cells: Sequence[Sequence[Cell]], words: str, complete: bool
    ) -> Drawing:
        words += "".join(f"; {cut.meaning}" for cut in axis.cuts)
        if not complete or any(row.note for row in self.rows):
            words += self.note
        rows = [
            [Cell(0, len(row.note), row.note, FAINT)] if row.note else list(axis.around_cuts(own))
            for row, own in zip(self.rows, cells, strict=True)
        ]
        return Drawing(self.corner, [row.head for row in self.rows], rows, axis, words)

    def _label(self, span: Span) -> str:
        """The label of a span's cell."""
        label = self._name(span.action)
        return label if span.beside is None else f"{label};{self._name(span.beside)}"

    def _name(self, action: Action) -> str:
        if action.kind is Kind.OPTIM_STEP:
            return STEP
        microbatch = "" if action.microbatch is None else action.microbatch
        return f"{action.stage if self.staged else ''}{action.kind.letter}{microbatch}"

    def _kinds(self) -> dict[str, str]:
        """The letter and the meaning of each kind that occurs."""
        spans = [span for row in self.rows for span in row.spans]
        kinds = {action.kind for span in spans for action in (span.action, span.beside) if action}
        words = {kind.letter: word for kind, word in WORDS.items() if kind in kinds}
        return words | ({STEP: "step of the optimiser"} if Kind.OPTIM_STEP in kinds else {})

    def _labelled_cells(self, row: Row, axis: Axis) -> list[Cell]:
        """The cells of a row with their labels, ascending."""
        cells = []
        for span in row.spans:
            left, right, label = axis.column(span.start), axis.column(span.end), self._label(span)
            if right - left > len(label):
                text = label.ljust(right - left - 1, "-")
                cells.append(Cell(left, len(label) + 1, text, span.style))
            else:
                # A mark without room stands in the blank column after the cell before.
                mark = STEP if span.action.kind is Kind.OPTIM_STEP else SHORT
                cells.append(Cell(left if right > left else max(left - 1, 0), 1, mark, span.style))
        return sorted(cells)


def _in_words(marks: Mapping[str, str]) -> str:
    return ", ".join(f"{mark} {word}" for mark, word in marks.items())


def _letter_cells(row: Row, axis: Axis, alike: float) -> list[Cell]:
    """The cells of a row as letters, ascending. A column has the letter of the kind that takes most
    of its work. If that is less than a part `alike` of the work, it has a mark in the mix of the
    colours.

    An action of less than half a column is drawn only if nothing else is drawn there, so every
    stretch of work leaves a letter.
    """
    last = axis.column(axis.makespan)
    takes: list[dict[tuple[str, str], float]] = [defaultdict(float) for _ in range(last)]
    for span in row.spans:
        kind = span.style, PAIR if span.beside is not None else span.action.kind.letter
        start, end = span.start * axis.scale, span.end * axis.scale
        for column in range(int(start), min(math.ceil(end), last)):
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
            cells.append(Cell(column, 1, mark, style))
    return cells
