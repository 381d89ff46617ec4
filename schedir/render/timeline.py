"""The timeline: rows = ranks, time to the right, a cell as wide as its action is long.

            0              5              10             15             20
    rank 0  F0 F1 F2 F3                   B0---    B1---    B2---    B3---*
    rank 1     F0 F1 F2             B0--- F3 B1---    B2---    B3---*

A cell is its label, dashes up to its end, and one blank column that sets it off from the next.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from schedir.ir import COMPUTE, Action, Kind, Schedule, starts_of
from schedir.render.text import number, paint, table
from schedir.simulator import Timeline

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "gradient of the input",
    Kind.BACKWARD_WEIGHT: "gradient of the weights",
}
# Backgrounds of the 256-colour palette that black text is legible on: a hue per kind, and a shade
# for each of a rank's stages in turn.
_SHADES = {
    Kind.FORWARD: (75, 117, 69, 153),
    Kind.BACKWARD: (114, 157, 71, 194),
    Kind.BACKWARD_INPUT: (80, 123, 37, 159),
    Kind.BACKWARD_WEIGHT: (215, 223, 173, 230),
}
_STEP, _SHORT = "*", ":"
_STEP_STYLE = "1;31"
_BETWEEN_TICKS = 8
# A cell shorter than this part of the longest one is drawn as a mark: it would stretch all others.
_SHORTEST = 1 / 16


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
    drawing = _Drawing(timeline, colour)
    schedule = timeline.schedule
    title = (
        f"{schedule.name}: {_count(schedule.ranks, 'rank')}, {_count(schedule.stages, 'stage')}, "
        f"{_count(schedule.microbatches, 'microbatch', 'es')}"
    )
    if width is not None:
        title = textwrap.fill(title, width)
    pages = drawing.pages(width)
    return "\n".join([title, "", *pages, drawing.legend(width), "", _summary(timeline)])


def _count(many: int, what: str, plural: str = "s") -> str:
    return f"{many} {what}{'' if many == 1 else plural}"


def _summary(timeline: Timeline) -> str:
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
    total = f"makespan {number(timeline.makespan)}, bubble {timeline.bubble_fraction:.1%}\n\n"
    return total + table(rows, ">>>>>>")


class _Span(NamedTuple):
    """A compute action and its time: lighter than a `Span`, and there may be millions."""

    action: Action
    start: float
    end: float


def _compute_of(timeline: Timeline) -> list[list[_Span]]:
    """What occupies each rank, in list order."""
    columns = timeline.schedule.columns
    kept = columns.where(*COMPUTE)
    compute = columns.take(kept, starts_of(columns.rank[kept], columns.ranks))
    times = iter(zip(timeline.starts[kept].tolist(), timeline.ends[kept].tolist(), strict=True))
    return [
        [_Span(action, *next(times)) for action in compute.of_rank(rank)]
        for rank in range(columns.ranks)
    ]


class _Cell(NamedTuple):
    """A piece of a row. It belongs to the page that holds its first `whole` columns."""

    left: int
    whole: int
    text: str
    style: str


class _Drawing:
    """A timeline laid out on columns, `scale` of them per unit of time."""

    def __init__(self, timeline: Timeline, colour: bool) -> None:
        self.timeline = timeline
        self.schedule: Schedule = timeline.schedule
        self.colour = colour
        # For each rank its stages, numbered.
        self.chunks = [
            {stage: chunk for chunk, stage in enumerate(self.schedule.stages_of(rank))}
            for rank in range(self.schedule.ranks)
        ]
        self.several = any(len(stages) > 1 for stages in self.chunks)
        self.digits = len(str(self.schedule.ranks - 1))
        self.prefix = len("rank ") + self.digits + 2
        self.spans = _compute_of(timeline)
        self.scale = self._scale()
        self.columns = self._column(timeline.makespan)
        self.tick = _round_step(_BETWEEN_TICKS / self.scale)
        self.rows = [
            sorted(self._cell(rank, span) for span in spans)
            for rank, spans in enumerate(self.spans)
        ]

    def pages(self, width: int | None) -> Iterator[str]:
        """The pages, each its time, a ruler and the ranks' rows."""
        if width is None or self.columns <= width - self.prefix:
            yield self._page(0, self.columns)
            return
        # The least that a page holds, be the terminal as narrow as it will.
        least = max(cell.whole for cells in self.rows for cell in cells)
        left = 0
        while left < self.columns:
            following = self._page_end(left, least, max(width - self.prefix, least))
            yield self._page(left, following)
            left = following

    def legend(self, width: int | None) -> str:
        """What the letters and marks mean, those that occur."""
        text = self._legend()
        if width is not None:
            text = textwrap.fill(text, width)
        # Painted after folding, which would count the escapes. A letter stands alone only here.
        for kind, shades in _SHADES.items():
            letter = paint(kind.value, _background(shades[0]), self.colour)
            text = re.sub(rf"\b{kind.value}\b", letter, text, count=1)
        return text.replace(_STEP, paint(_STEP, _STEP_STYLE, self.colour))

    def _legend(self) -> str:
        spans = [span for spans in self.spans for span in spans]
        kinds = {span.action.kind for span in spans}
        words = [f"{kind.value} {word}" for kind, word in _WORDS.items() if kind in kinds]
        if Kind.OPTIM_STEP in kinds:
            words.append(f"{_STEP} step of the optimiser")
        if any(cell.text == _SHORT for cells in self.rows for cell in cells):
            words.append(f"{_SHORT} too short to be named")
        example = next((span for span in spans if span.action.kind in _WORDS), None)
        if example is None:
            return ", ".join(words)
        action = example.action
        whose = f"stage {action.stage}'s" if self.several else "the"
        return (
            f"{', '.join(words)}; {self._label(example)} is {whose} {_WORDS[action.kind]} "
            f"of microbatch {action.microbatch}"
        )

    def _scale(self) -> float:
        """The fewest columns per unit of time that leave room for each label and a blank."""
        cells = [
            (span, span.end - span.start)
            for spans in self.spans
            for span in spans
            if span.action.kind in _WORDS
        ]
        longest = max((duration for _, duration in cells), default=0)
        if not longest:
            return 1
        named = [(s, d) for s, d in cells if d >= longest * _SHORTEST]
        needs = {(len(self._label(span)) + 1, duration) for span, duration in named}
        scale = max(need / duration for need, duration in needs)
        # Where times are no whole numbers of columns, rounding can take a column from a cell.
        fits = all(
            _round(span.end * scale) - _round(span.start * scale) > len(self._label(span))
            for span, _ in named
        )
        return scale if fits else max((need + 1) / duration for need, duration in needs)

    def _column(self, time: float) -> int:
        return _round(time * self.scale)

    def _time(self, column: int) -> str:
        """The time of a column; a tick, or the end, is shown as it is and not as rounded."""
        if column == self.columns:
            return number(self.timeline.makespan)
        time = column / self.scale
        tick = round(time / self.tick) * self.tick
        return number(tick if self._column(tick) == column else time)

    def _label(self, span: _Span) -> str:
        action = span.action
        if action.kind is Kind.OPTIM_STEP:
            return _STEP
        return f"{action.stage if self.several else ''}{action.kind.value}{action.microbatch}"

    def _cell(self, rank: int, span: _Span) -> _Cell:
        left, right = self._column(span.start), self._column(span.end)
        label, kind, stage = self._label(span), span.action.kind, span.action.stage
        chunk = self.chunks[rank].get(stage, 0)
        style = _STEP_STYLE
        if kind in _SHADES:
            style = _background(_SHADES[kind][chunk % len(_SHADES[kind])])
        if right - left > len(label):
            return _Cell(left, len(label) + 1, label.ljust(right - left - 1, "-"), style)
        # Without room of its own, a mark stands in the blank column behind the cell before.
        mark = _STEP if kind is Kind.OPTIM_STEP else _SHORT
        return _Cell(left if right > left else max(left - 1, 0), 1, mark, style)

    def _page_end(self, left: int, least: int, room: int) -> int:
        """Where the next page takes over from the one that starts at `left`.

        It ends at a tick of the ruler, if there is one. A cell that this would cut inside its
        label goes to the next page as a whole, which then starts with the first such cell.
        """
        end = min(left + room, self.columns)
        if end < self.columns:
            tick = self._column(math.floor(end / self.scale / self.tick) * self.tick)
            end = tick if tick - left >= least else end
        following = end
        for cells in self.rows:
            # By index, as is the row below: a slice would copy all that is behind the page.
            for index in range(bisect_left(cells, left, key=_left), len(cells)):
                cell = cells[index]
                if cell.left >= end:
                    break
                if cell.left + cell.whole > end:
                    following = min(following, cell.left)
        return following

    def _page(self, left: int, following: int) -> str:
        lines = [
            f"time {self._time(left)}..{self._time(following)}",
            self._ruler(left, following),
        ]
        for rank, cells in enumerate(self.rows):
            row = self._row(cells, left, following)
            lines.append(f"rank {rank:{self.digits}}  {row}".rstrip())
        return "\n".join(lines) + "\n"

    def _ruler(self, left: int, right: int) -> str:
        pieces = [" " * self.prefix]
        at = left  # the column behind the last piece
        turn = math.ceil(left / self.scale / self.tick)
        while (column := self._column(turn * self.tick)) < right:
            label = number(turn * self.tick)
            if left <= column <= right - len(label):
                pieces.append(" " * (column - at) + label)
                at = max(at, column) + len(label)
            turn += 1
        return "".join(pieces).rstrip()

    def _row(self, cells: list[_Cell], left: int, following: int) -> str:
        """A rank's columns from `left` up to `following`, and the labels there as a whole."""
        drawn: list[tuple[int, str, str]] = []  # the first column, text and style of each piece
        # The cell before may reach into this page.
        for index in range(max(0, bisect_left(cells, left, key=_left) - 1), len(cells)):
            cell = cells[index]
            if cell.left >= following:
                break
            last = min(cell.left + len(cell.text), max(following, cell.left + cell.whole))
            # Of a cell that belongs to a page before, only the dashes are left.
            first, text = cell.left, cell.text[: last - cell.left]
            if first < left:
                first, text = left, "-" * (last - left)
            while drawn and drawn[-1][0] >= first:  # a mark without room of its own
                drawn.pop()
            if text:
                drawn.append((first, text, cell.style))
        pieces = []
        at = left
        for first, text, style in drawn:
            pieces += [" " * (first - at), paint(text, style, self.colour)]
            at = first + len(text)
        return "".join(pieces)


def _background(shade: int) -> str:
    """The ANSI style of black text on a shade."""
    return f"38;5;16;48;5;{shade}"


def _left(cell: _Cell) -> int:
    return cell.left


def _round(value: float) -> int:
    """To the nearest whole number, halves up (`round` would take every second half down)."""
    return math.floor(value + 0.5)


def _round_step(least: float) -> float:
    """The smallest number that is 1, 2 or 5 times a power of ten, and at least `least`."""
    power: float = 10 ** math.floor(math.log10(least))
    step = next(step for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
    return step * power
