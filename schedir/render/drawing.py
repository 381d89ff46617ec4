"""Rows of cells under a ruler, in more or less detail, on as many pages as a terminal needs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from operator import attrgetter

import attrs

from schedir.render.axis import CUT_WIDTH, Axis, Cut
from schedir.render.cells import (
    NEARLY_ALL,
    Cell,
    Row,
    coarse_cells,
    coarse_scale,
    cut_out,
    label_scale,
    labelled_cells,
    labels_legend,
    letters_legend,
    per_column,
    too_wide,
)
from schedir.render.lanes import labels_say_stages
from schedir.render.palette import FAINT, LEFT_OUT
from schedir.render.repeats import Repeat
from schedir.render.text import Piece, count, number
from schedir.simulator import Timeline

_FEWEST_COLUMNS = 6  # the least that a cut has to save
_LEFT = attrgetter("left")


@attrs.frozen
class Drawing:
    """Rows of cells: `rows[i]`, ascending, stand after `heads[i]`; `corner` is before the ruler.

    The corner and the heads have one width, except for heads of rows without cells. `legend`
    explains the letters.
    """

    corner: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    axis: Axis
    legend: str

    def pages(
        self, width: int | None, left: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """The columns at which pages start and end; one page if there is no `width`."""
        columns = self.axis.columns if last is None else last
        room = columns if width is None else width - len(self.corner)
        if columns - left <= room:
            yield left, columns
            return
        # The least that a page holds, however narrow the terminal is.
        least = max((cell.whole for cells in self.rows for cell in cells), default=1)
        while left < columns:
            end = min(self._page_end(left, least, max(room, least)), columns)
            yield left, end
            left = end

    def lines(self, width: int) -> int:
        """The number of lines of the pages, with a blank one between two pages."""
        return len(list(self.pages(width))) * (len(self.rows) + 2) - 1

    def page(self, left: int, end: int) -> Iterator[Piece]:
        """The ruler and all rows, from one column to another."""
        yield Piece(f"{(self.corner + self._ruler(left, end)).rstrip()}\n")
        for head, cells in zip(self.heads, self.rows, strict=True):
            drawn = list(self._row(cells, left, end))
            yield Piece(head if drawn else head.rstrip())
            yield from drawn
            yield Piece("\n")

    def _page_end(self, left: int, least: int, room: int) -> int:
        """Where the next page takes over from the one that starts at `left`.

        It ends at a tick of the ruler, if there is one. A cell that this would cut inside its
        label goes to the next page as a whole, which then starts with the first such cell.
        """
        end = min(left + room, self.axis.columns)
        if end < self.axis.columns:
            ticks = [tick for tick, _ in self.axis.ticks(left + least, end + 1)]
            end = ticks[-1] if ticks else end
        following = end
        for cells in self.rows:
            # By index, as in the row below: a slice would copy everything after the page.
            for index in range(bisect_left(cells, left, key=_LEFT), len(cells)):
                cell = cells[index]
                if cell.left >= end:
                    break
                if cell.left + cell.whole > end:
                    following = min(following, cell.left)
        return following

    def _ruler(self, left: int, end: int) -> str:
        marks: list[tuple[int, str]] = []
        for column, note in self.axis.notes():
            if left <= column < end:
                at = max(left, min(column, end - len(note)))
                if all(other + len(text) <= at for other, text in marks):
                    marks.append((at, note))
        for column, label in self.axis.ticks(left, end):
            after = column + len(label)
            if after <= end and all(
                after < other or column > other + len(text) for other, text in marks
            ):
                marks.append((column, label))
        ruler = ""
        for column, text in sorted(marks):
            ruler = ruler.ljust(column - left) + text
        return ruler

    def _row(self, cells: Sequence[Cell], left: int, end: int) -> Iterator[Piece]:
        """The columns of a row from `left` up to `end`; labels that begin there are not cut."""
        drawn: list[tuple[int, str, str]] = []  # first column, text and style of each piece
        # The cell before may reach into this page.
        for index in range(max(0, bisect_left(cells, left, key=_LEFT) - 1), len(cells)):
            cell = cells[index]
            if cell.left >= end:
                break
            last = min(cell.left + len(cell.text), max(end, cell.left + cell.whole))
            # A cell of an earlier page shows only its rest.
            first, text = cell.left, cell.text[: last - cell.left]
            if first < left:
                first, text = left, cell.rest * (last - left)
            while drawn and drawn[-1][0] >= first:  # a mark without room
                drawn.pop()
            if text:
                drawn.append((first, text, cell.style))
        column = left
        for first, text, style in drawn:
            if first > column:
                yield Piece(" " * (first - column))
            yield Piece(text, style)
            column = first + len(text)


@attrs.frozen
class Part:
    """A timeline in a drawing: its name, its lanes, and the head of each lane.

    `hidden` ranks in the middle are left out.
    """

    timeline: Timeline
    name: str
    lanes: Sequence[Row]
    heads: Sequence[str]
    hidden: int = 0


# Not slotted, because cached properties need a __dict__.
@attrs.frozen(slots=False)
class Sketch:
    """Draws timelines on one axis, one below the other, in more or less detail.

    `corner` stands above the heads of the rows. If something is left out, or letters replace
    labels, `note` ends the legend.
    """

    parts: Sequence[Part]
    corner: str
    note: str = ""

    @cached_property
    def lanes(self) -> Sequence[Row]:
        """The lanes of all timelines."""
        return [lane for part in self.parts for lane in part.lanes]

    @cached_property
    def several(self) -> bool:
        """Whether labels name their stage."""
        return labels_say_stages(part.timeline for part in self.parts)

    @cached_property
    def makespan(self) -> float:
        """The end of the last timeline."""
        return max(part.timeline.makespan for part in self.parts)

    @cached_property
    def scale(self) -> float:
        """The columns per unit of time that leave room for all labels."""
        return label_scale(self.lanes, self.several)

    def too_wide(self, since: float, until: float) -> bool:
        """Whether the labels between two times need too many columns."""
        return too_wide(self.scale, self.lanes, until - since)

    def between(self, since: float, until: float) -> Sketch:
        """The sketch, cut to a window of time."""

        def cut(lane: Row) -> Row:
            spans = [span for span in lane.spans if span.end > since and span.start < until]
            return attrs.evolve(lane, spans=spans)

        parts = [
            attrs.evolve(part, lanes=[cut(lane) for lane in part.lanes]) for part in self.parts
        ]
        return attrs.evolve(self, parts=parts)

    def labelled(self, repeated: Sequence[Repeat] = ()) -> Drawing:
        """A drawing with labels, in which `repeated` parts are drawn once."""
        axis = self._axis(self.scale, repeated)
        cells = [labelled_cells(lane, axis, self.several) for lane in self.lanes]
        words = labels_legend(self.lanes, cells, self.several)
        return self._drawing(axis, cells, words, complete=not axis.cuts)

    def coarse(self, repeated: Sequence[Repeat] = ()) -> Drawing:
        """A drawing in letters, in which `repeated` parts are drawn once."""
        return self._letters(self._axis(coarse_scale(self.lanes), repeated))

    def squeezed(self, columns: int, repeated: Sequence[Repeat] = ()) -> Drawing:
        """A drawing in letters in `columns` columns, each for as many actions as necessary."""
        drawn = self.makespan - sum(r.end - r.start - r.period for r in repeated)
        scale = max(columns - (CUT_WIDTH + 1) * len(repeated), 1) / drawn
        alike = NEARLY_ALL * (scale < coarse_scale(self.lanes))
        return self._letters(self._axis(scale, repeated), per_column(scale), alike)

    def _letters(self, axis: Axis, about: str = "", alike: float = 0) -> Drawing:
        cells = [coarse_cells(lane, axis, alike) for lane in self.lanes]
        words = letters_legend(self.lanes, cells) + about
        return self._drawing(axis, cells, words, complete=False)

    def _axis(self, scale: float, repeated: Sequence[Repeat]) -> Axis:
        axis = Axis(scale, self.makespan)
        cuts = []
        for repeat in repeated:
            left, right = axis.column(repeat.start + repeat.period), axis.column(repeat.end)
            if right - left >= CUT_WIDTH + _FEWEST_COLUMNS:
                again = f"{repeat.times - 1:,} × the same"
                until = number(repeat.start + repeat.period)
                later = count(repeat.microbatches, "microbatch", "es")
                meaning = f"time {number(repeat.start)}..{until} again, each time {later} later"
                cuts.append(Cut(left, right, again, f"{again}: {meaning}"))
        return attrs.evolve(axis, cuts=tuple(cuts))

    def _drawing(
        self, axis: Axis, cells: Sequence[Sequence[Cell]], words: str, complete: bool
    ) -> Drawing:
        if axis.cuts:
            cells = [cut_out(row, axis) for row in cells]
            words += "".join(f"; {cut.meaning}" for cut in axis.cuts)
        if not complete or any(part.hidden for part in self.parts):
            words += self.note
        drawn, wide = iter(cells), len(self.corner)
        heads: list[str] = []
        rows: list[Sequence[Cell]] = []
        for part in self.parts:
            if len(self.parts) > 1:
                heads.append(part.name)
                rows.append(())
            heads += [head.ljust(wide) for head in part.heads]
            rows += islice(drawn, len(part.lanes))
            if part.hidden:
                ranks = [lane.rank for lane in part.lanes]
                after = next(n for n in range(1, len(ranks)) if ranks[n] > ranks[n - 1] + 1)
                note = f"{count(part.hidden, 'rank')} left out"
                heads.insert(after - len(ranks), f"{LEFT_OUT:>4}".ljust(wide))
                rows.insert(after - len(ranks), [Cell(0, len(note), note, FAINT, " ")])
        return Drawing(self.corner, heads, rows, axis, words)
