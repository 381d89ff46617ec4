"""A timeline on one screen: what it costs, then how it begins, goes on and ends.

    rank  0              5              10       … 3 × the same … 25             30
       0  F0 F1 F2 F3                   B0--- F4 … B4---    B5---    B6---    B7---*
       1     F0 F1 F2             B0--- F3 B1--- … -- F7 B5---    B6---    B7---*

What all ranks repeat is drawn once. Where that is still too much for the screen, cells become
letters, and in the end letters that stand for several actions each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Self

import attrs

from schedir.render.axis import CUT_WIDTH, Axis, Cut
from schedir.render.captions import bubble
from schedir.render.cells import (
    Cell,
    Labels,
    Row,
    coarse_cells,
    coarse_scale,
    cut_out,
    too_wide,
)
from schedir.render.clock import with_unit
from schedir.render.drawing import Drawing, Group, gap, stacked
from schedir.render.lanes import Lane, has_copies, labels_of, lanes_of, lanes_per_rank
from schedir.render.legend import legend, letters_legend, painted_legend, per_column
from schedir.render.palette import LEFT_OUT
from schedir.render.steady import Repeat, repeats
from schedir.render.styled import Block, Panel, Piece, count, fill, number
from schedir.render.timeline import names, statistics, title
from schedir.simulator import Timeline

_CORNER, _CORNER_OF_REPLICAS = "rank  ", "rank  stage  "
_RANK, _STAGE = len("rank"), len("stage")
_COPIES = "copies"
_PANEL_EDGES = 4  # columns
_PROMPT_LINES = 1
_RULER_LINES = 1
_LEGEND_LINES = 4  # a blank one, and as many as most legends take
_TABLE_RULES = 1  # that a terminal draws below the header
_MOST_CUTS = 3  # more would take longer to read than what they save
_FEWEST_COLUMNS = 6  # that a cut has to save


def overview_blocks(
    timeline: Timeline, width: int, height: int, against: Timeline | None = None
) -> Iterator[Block]:
    """The costs of a timeline and a drawing, on a screen of `width` columns and `height` lines.

    A second timeline is drawn below the first, on its axis.
    """
    several = [timeline] if against is None else [timeline, against]
    costs = [
        list(_costs(line, several, name))
        for line, name in zip(several, _names(several), strict=True)
    ]
    shapes = dict.fromkeys(title(line.schedule) for line in several)
    under = [piece for line in costs[1:] for piece in (Piece("\n"), *line)]
    yield Panel(" / ".join(shapes), [*costs[0], *under])
    texts = ["".join(piece.text for piece in line) for line in costs]
    inside = max(width, _PANEL_EDGES + 1) - _PANEL_EDGES
    panel = sum(len(fill(text, inside).splitlines()) for text in texts) + 2
    room = height - panel - _PROMPT_LINES
    drawing = _drawing(several, width, room)
    for turn, (left, end) in enumerate(drawing.pages(width)):
        yield Piece("\n" if turn else "")
        yield from drawing.page(left, end)
    yield Piece("\n")
    yield from painted_legend(fill(drawing.legend, width))
    table = statistics(timeline)
    lines = _lines(drawing, width) + 1 + len(table.rows) + _TABLE_RULES
    if against is None and lines <= room and table.width <= width:
        yield Piece("\n")
        yield table


def _names(timelines: Sequence[Timeline]) -> list[str]:
    """The names of several timelines, of one width."""
    found = names(*timelines)
    return [name and name.ljust(max(map(len, found)) + 2) for name in found]


def _costs(timeline: Timeline, several: Sequence[Timeline], name: str) -> Iterator[Piece]:
    """Makespan, bubble and peaks, the numbers set off from the words; of one of several, what sets
    it apart from the first."""
    first, makespan = several[0].makespan, with_unit(timeline.makespan, timeline.unit)
    if first and timeline.makespan != first:
        makespan += f" (× {timeline.makespan / first:.2f})"
    found = [("makespan", makespan), ("bubble", bubble(timeline))]
    if len(several) == 1 or len({_peak(line) for line in several}) > 1:
        found.append(("peak activations", str(_peak(timeline))))
    if len(several) == 1:
        versions = max(rank.weight_versions for rank in timeline.ranks)
        found.append(("weight versions", str(versions)))
        if timeline.measured is not None:
            found.append(("step", str(timeline.measured.step)))
    yield Piece(name)
    for turn, (what, value) in enumerate(found):
        yield Piece(f"{'   ' if turn else ''}{what} ")
        yield Piece(value, "bold")


def _peak(timeline: Timeline) -> int:
    return max(rank.peak_activations for rank in timeline.ranks)


def _lines(drawing: Drawing, width: int) -> int:
    """The lines of a drawing and its legend, with a blank one between them."""
    return drawing.lines(width) + 1 + len(fill(drawing.legend, width).splitlines())


def _drawing(timelines: Sequence[Timeline], width: int, room: int) -> Drawing:
    """The drawing with the most detail that fits, its legend included."""
    space = room - _RULER_LINES - _LEGEND_LINES
    if len(timelines) > 1:
        space = space // len(timelines) - 1  # the name above each
    shown = [
        _Shown.of(timeline, name, space)
        for timeline, name in zip(timelines, names(*timelines), strict=True)
    ]
    sketcher = _Sketcher(shown, labels_of(timelines))
    columns = max(width - len(sketcher.corner), 1)
    if sketcher.fits(columns):
        return sketcher.labelled(repeated=())
    # What repeats in one of two need not repeat in the other.
    found = repeats(timelines[0]) if len(timelines) == 1 else []
    longest = sorted(found, key=lambda repeat: repeat.start - repeat.end)
    repeated = sorted(longest[:_MOST_CUTS], key=lambda repeat: repeat.start)
    draws: list[Callable[[Sequence[Repeat]], Drawing]] = []
    if not sketcher.too_wide:
        draws += [sketcher.labelled, sketcher.coarse]
    draws.append(partial(sketcher.squeezed, columns=columns))
    for draw in draws:
        drawing = draw(repeated)
        if _lines(drawing, width) <= room:
            return drawing
    # What repeats may be too short, at that scale, to be cut out.
    return sketcher.squeezed((), columns)


@attrs.frozen
class _Shown:
    """The `lanes` of a timeline that are drawn; those of `hidden` ranks are left out."""

    timeline: Timeline
    name: str
    lanes: Sequence[Lane]
    hidden: int

    @property
    def rows(self) -> list[Row]:
        """What is drawn of the lanes."""
        return [lane.row for lane in self.lanes]

    @classmethod
    def of(cls, timeline: Timeline, name: str, room: int) -> Self:
        """As many ranks as there are lines for, the first and the last."""
        ranks = timeline.schedule.ranks
        shown, hidden = list(range(ranks)), 0
        room //= lanes_per_rank(timeline.schedule) + has_copies(timeline.schedule)
        if ranks > room:
            many = max(room - 1, 2)
            last = many // 2
            shown = [*range(many - last), *range(ranks - last, ranks)]
            hidden = ranks - many
        return cls(timeline, name, lanes_of(timeline, shown), hidden)

    def group(self, cells: list[list[Cell]], corner: str) -> Group:
        """Its part of a drawing, with a note where ranks are left out."""
        heads = [_head(lane).ljust(len(corner)) for lane in self.lanes]
        if self.hidden:
            ranks = [lane.rank for lane in self.lanes]
            middle = next(i for i, rank in enumerate(ranks) if i and rank > ranks[i - 1] + 1)
            head, row = gap(
                f"{LEFT_OUT:>{_RANK}}".ljust(len(corner)), f"{count(self.hidden, 'rank')} left out"
            )
            heads.insert(middle, head)
            cells.insert(middle, row)
        return Group(self.name, heads, cells)


def _head(lane: Lane) -> str:
    if lane.copies:
        return _COPIES
    return f"{lane.rank:{_RANK}}" + ("" if lane.stage is None else f"  {lane.stage:{_STAGE}}")


# Not slotted, so that what is derived can be cached beside the fields.
@attrs.frozen(slots=False)
class _Sketcher:
    """Draws the `shown` ranks of each timeline in more or less detail."""

    shown: Sequence[_Shown]
    labels: Labels

    @cached_property
    def rows(self) -> Sequence[Row]:
        """The rows of all timelines."""
        return [row for part in self.shown for row in part.rows]

    @cached_property
    def makespan(self) -> float:
        """When the last of the timelines ends."""
        return max(part.timeline.makespan for part in self.shown)

    @cached_property
    def scale(self) -> float:
        """The columns per unit of time that leave room for all labels."""
        return self.labels.scale(self.rows)

    @property
    def too_wide(self) -> bool:
        """Whether all labels are not worth their columns."""
        return too_wide(self.scale, self.rows, self.makespan)

    @property
    def corner(self) -> str:
        """What stands above the heads of the rows."""
        lanes = [lane for part in self.shown for lane in part.lanes]
        corner = _CORNER_OF_REPLICAS if any(lane.stage is not None for lane in lanes) else _CORNER
        return corner.ljust(len(_COPIES) + 2) if any(lane.copies for lane in lanes) else corner

    def fits(self, columns: int) -> bool:
        """Whether all actions with their labels do."""
        return Axis(self.scale, self.makespan).columns <= columns

    def labelled(self, repeated: Sequence[Repeat]) -> Drawing:
        """Every action with its label, but for what is `repeated`."""
        axis = self._axis(self.scale, repeated)
        cells = [self.labels.cells(row, axis) for row in self.rows]
        return self._drawing(axis, cells, legend(self.labels, self.rows, cells))

    def coarse(self, repeated: Sequence[Repeat]) -> Drawing:
        """Every action as letters, but for what is `repeated`."""
        return self._letters(self._axis(coarse_scale(self.rows), repeated), "")

    def squeezed(self, repeated: Sequence[Repeat], columns: int) -> Drawing:
        """As letters in so many columns, each for as many actions as it must be."""
        drawn = self.makespan - sum(r.end - r.start - r.period for r in repeated)
        scale = max(columns - (CUT_WIDTH + 1) * len(repeated), 1) / drawn
        return self._letters(self._axis(scale, repeated), per_column(scale))

    def _letters(self, axis: Axis, note: str) -> Drawing:
        cells = [coarse_cells(row, axis) for row in self.rows]
        words = letters_legend(self.rows, cells) + note
        return self._drawing(axis, cells, words, complete=False)

    def _axis(self, scale: float, repeated: Sequence[Repeat]) -> Axis:
        axis = Axis(scale, self.makespan)
        cuts = []
        for repeat in repeated:
            left, right = axis.column(repeat.start + repeat.period), axis.column(repeat.end)
            if right - left >= CUT_WIDTH + _FEWEST_COLUMNS:
                cuts.append(Cut(left, right, _again(repeat), _in_words(repeat)))
        return attrs.evolve(axis, cuts=tuple(cuts))

    def _drawing(
        self,
        axis: Axis,
        cells: list[list[Cell]],
        words: str,
        complete: bool = True,
    ) -> Drawing:
        if axis.cuts:
            cells = [cut_out(row, axis) for row in cells]
            words += "".join(f"; {cut.meaning}" for cut in axis.cuts)
        if any(part.hidden for part in self.shown) or axis.cuts or not complete:
            words += "; --full draws everything"
        rows = iter(cells)
        groups = [part.group([next(rows) for _ in part.lanes], self.corner) for part in self.shown]
        return stacked(self.corner, groups, axis, words)


def _again(repeat: Repeat) -> str:
    return f"{repeat.times - 1:,} × the same"


def _in_words(repeat: Repeat) -> str:
    until = repeat.start + repeat.period
    later = count(repeat.microbatches, "microbatch", "es")
    return (
        f"{_again(repeat)}: time {number(repeat.start)}..{number(until)} again, "
        f"each time {later} later"
    )
