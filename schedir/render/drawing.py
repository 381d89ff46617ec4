"""Rows of cells under a ruler, split into pages where a terminal is too narrow for all columns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import attrs

from schedir.render.axis import Axis
from schedir.render.cells import Cell
from schedir.render.palette import FAINT
from schedir.render.styled import Piece


@attrs.frozen
class Drawing:
    """`rows[i]` are the cells, ascending, after `heads[i]`; `corner` stands before the ruler.

    The heads, and the corner, are of one width, but for those of rows without cells. `legend` says
    what the letters mean.
    """

    corner: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    axis: Axis
    legend: str

    def pages(self, width: int | None) -> Iterator[tuple[int, int]]:
        """The columns at which each page starts and ends; one page where there is no `width`."""
        columns = self.axis.columns
        room = columns if width is None else width - len(self.corner)
        if columns <= room:
            yield 0, columns
            return
        # The least that a page holds, be the terminal as narrow as it will.
        least = max((cell.whole for cells in self.rows for cell in cells), default=1)
        left = 0
        while left < columns:
            end = self._page_end(left, least, max(room, least))
            yield left, end
            left = end

    def lines(self, width: int) -> int:
        """How many lines the pages take, with a blank one between two of them."""
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
            # By index, as is the row below: a slice would copy all that comes after the page.
            for index in range(bisect_left(cells, left, key=_left), len(cells)):
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
                marks.append((max(left, min(column, end - len(note))), note))
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
        """The columns of a row from `left` up to `end`, and the labels there as a whole."""
        drawn: list[tuple[int, str, str]] = []  # the first column, text and style of each piece
        # The cell before may reach into this page.
        for index in range(max(0, bisect_left(cells, left, key=_left) - 1), len(cells)):
            cell = cells[index]
            if cell.left >= end:
                break
            last = min(cell.left + len(cell.text), max(end, cell.left + cell.whole))
            # Of a cell that belongs to a page before, only the rest is left.
            first, text = cell.left, cell.text[: last - cell.left]
            if first < left:
                first, text = left, cell.rest * (last - left)
            while drawn and drawn[-1][0] >= first:  # a mark without room of its own
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
class Group:
    """The rows of one timeline after their `heads`, all of one width."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def stacked(corner: str, groups: Sequence[Group], axis: Axis, legend: str) -> Drawing:
    """One drawing of several timelines, below each other on one axis, each under its name."""
    if len(groups) == 1:
        return Drawing(corner, groups[0].heads, groups[0].rows, axis, legend)
    heads: list[str] = []
    rows: list[Sequence[Cell]] = []
    for group in groups:
        heads += [group.name, *group.heads]
        rows += [(), *group.rows]
    return Drawing(corner, heads, rows, axis, legend)


def gap(head: str, note: str) -> tuple[str, list[Cell]]:
    """A row that stands for ranks that are left out: its head, and a note for cells."""
    return head, [Cell(0, len(note), note, FAINT, " ")]


def _left(cell: Cell) -> int:
    return cell.left
