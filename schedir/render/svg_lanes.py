"""The lanes of a rank in a picture: its compute, with labels and the marks of its steps, and its
copies.

Cells are paths, one for each colour. Neighbouring cells thinner than a pixel are merged into bars
of four pixels. In a bar the kinds stand one below the other, each as high as its share of the time,
and the rest of the height is idle. So a lane of millions of cells needs no more text than one of
thousands, and its areas are exact.

    FFFFFFFFBBBBBBBBBBBBBBBB          FFFFFFFFFFFF  FF
    FFFFFFFFBBBBBBBBBBBBBBBB          BBBBBBBBBBBBFFFF
    FFFFFFFFBBBBBBBBBBBBBBBB  a cell  BBBBBBBBBBBBBBBB  thousands
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

import attrs
import numpy as np

from schedir.ir import COMPUTE, KIND_INDEX, KINDS, Bools, Columns, Ints, Kind, Schedule
from schedir.render.palette import FAINT_INK, INK, PAPER, STEP_FILL, Fill, picture_fill
from schedir.render.rows import has_replicas
from schedir.render.svg_text import LABEL, SMALL_LABEL, Lengths, path, px, text_at, text_width
from schedir.render.text import Piece
from schedir.simulator import Timeline

THINNEST = 1.0
_BAR, _LEVELS = 4.0, 50
"""The width of a bar of merged cells, and the number of different heights."""
_SEPARATED = 6.0
"""In pixels like all lengths here: cells at least this wide have a white outline."""
_STEP_WIDTH = 2.5
_TALLER, _LONE_STEP = 0.08, 40.0
"""The mark of a step extends its lane by this part; marks close together are narrower."""
_TIGHT = 0.5
"""How much narrower than its label a cell may be."""
_APART = 1.25
"""The width of a block of cells with one label, in widths of the label."""
_LOWEST_LABEL = 10.0
"""The least height of a cell with a label."""
_ROOMY = 15.0
"""The least height of a cell with a label of full size."""
_SHADES = 4
_STEP = KIND_INDEX[Kind.OPTIM_STEP]


@attrs.frozen
class Cells:
    """The compute of one rank by time; all arrays have the shape [cells].

    `top` and `height` are parts of the lane's height: an overlapped pair is two cells, one above
    the other, and each replica of a stage has a lane within its rank's. `colour` depends on the
    kind and on the number of the stage among the rank's stages.
    """

    left: Lengths
    right: Lengths
    top: Lengths
    height: Lengths
    place: Ints
    colour: Ints

    def where(self, chosen: Bools) -> Cells:
        """A part of the cells."""
        return Cells(*(array[chosen] for array in attrs.astuple(self, recurse=False)))

    @property
    def steps(self) -> Bools:
        """Whether each cell is an OPTIM_STEP."""
        steps: Bools = self.colour // _SHADES == _STEP
        return steps

    @property
    def thin(self) -> Bools:
        """Whether each cell is too thin to be drawn alone."""
        thin: Bools = (self.right - self.left < THINNEST) & ~self.steps
        return thin


def cells_of(timeline: Timeline, rank: int, scale: float, kinds: Iterable[Kind] = COMPUTE) -> Cells:
    """The cells of a rank's compute, or of its copies, with `scale` pixels to a unit of time."""
    columns = timeline.schedule.columns
    first, end = columns.starts[rank : rank + 2].tolist()
    places = first + np.flatnonzero((columns.is_kind(*kinds) & timeline.known)[first:end])
    places = places[np.argsort(timeline.starts[places], kind="stable")]
    joined = columns.joined[places]
    halved = columns.shared[places] | joined
    stages = np.array(timeline.schedule.stages_of(rank), np.int64)
    turns, within = np.searchsorted(stages, columns.stage[places]), 1
    lane = np.zeros_like(turns)
    if has_replicas(timeline.schedule) and kinds is COMPUTE:
        lane, within = turns, max(1, len(stages))
        halved &= columns.stage[places] == columns.stage[places + np.where(joined, -1, 1) * halved]
    return Cells(
        np.round(timeline.starts[places] * scale, 2),
        np.round(timeline.ends[places] * scale, 2),
        (lane + np.where(halved & joined, 0.5, 0.0)) / within,
        np.where(halved, 0.5, 1.0) / within,
        places,
        columns.kind[places] * _SHADES + turns % _SHADES,
    )


def stages_room(schedule: Schedule) -> float:
    """The width of the names of stages beside their lanes; 0 if they have none."""
    if not has_replicas(schedule):
        return 0
    return 0.6 * SMALL_LABEL * len(f"stage {schedule.stages - 1}") + 6


def stage_names(stages: Sequence[int], right: float, top: float, lane: float) -> Iterator[Piece]:
    """The names of a rank's stages, each beside its lane, if there is room."""
    high = lane / max(1, len(stages))
    for turn, stage in enumerate(stages if high >= SMALL_LABEL else ()):
        y = top + (turn + 0.5) * high + 0.36 * SMALL_LABEL
        yield text_at(right, y, f"stage {stage}", anchor="end", size=SMALL_LABEL, fill=FAINT_INK)


def draw_lane(columns: Columns, cells: Cells, height: float) -> Iterator[str]:
    """The elements of a lane, with its upper left corner at the origin."""
    steps, thin = cells.steps, cells.thin
    whole = cells.where(~thin & ~steps)
    yield from _boxes(whole, height)
    if thin.any():
        yield from _merged(cells, np.flatnonzero(thin), height)
    labelled = yield from _labels(columns, whole, height)
    yield from _block_labels(columns, whole.where(~labelled), height)
    if steps.any():
        yield _steps(cells.where(steps), cells, height)


def _boxes(cells: Cells, height: float) -> Iterator[str]:
    separated = cells.right - cells.left >= _SEPARATED
    for colour in np.unique(cells.colour).tolist():
        fill = _fill(colour).area
        for apart in (False, True):
            some = cells.where((cells.colour == colour) & (separated == apart))
            if len(some.left):
                line = f' stroke="{PAPER}" stroke-width=".8"' if apart else ""
                yield f'<path fill="{fill}"{line} d="{_outline(some, height)}"/>'


def _outline(cells: Cells, height: float) -> str:
    return path(cells.left, cells.right, cells.top * height, cells.height * height)


def _fill(colour: int) -> Fill:
    return picture_fill(KINDS[colour // _SHADES], colour % _SHADES)


def _merged(cells: Cells, thin: Ints, height: float) -> Iterator[str]:
    """The thin cells, merged into bars."""
    left, right = cells.left[thin], cells.right[thin]
    apart = (thin[1:] > thin[:-1] + 1) | (left[1:] - right[:-1] >= THINNEST)
    # A bar ends where the thin cells end.
    stretches = left[np.append(True, apart)], right[np.append(apart, True)]
    bars = np.union1d(np.concatenate(stretches), np.arange(0, right.max(), _BAR))
    # The amount of each colour up to every edge of a cell, and so in every bar.
    edges = np.stack([left, right], axis=1).ravel()
    top = np.zeros(len(bars) - 1)
    for colour in np.unique(cells.colour[thin]).tolist():
        takes = (right - left) * cells.height[thin] * (cells.colour[thin] == colour)
        so_far = np.stack([takes.cumsum() - takes, takes.cumsum()], axis=1).ravel()
        share = np.diff(np.interp(bars, edges, so_far)) / np.diff(bars)
        bottom = np.minimum(top + share, 1)
        upper, lower = (np.round(part * _LEVELS) / _LEVELS * height for part in (top, bottom))
        outline = _joined(bars[:-1], bars[1:], upper, lower)
        if outline:
            fill = _fill(colour).area
            yield f'<path class="merged" fill="{fill}" d="{outline}"/>'
        top = bottom


def _joined(left: Lengths, right: Lengths, upper: Lengths, lower: Lengths) -> str:
    """Bars side by side as a path; neighbours of one height are one box."""
    some = lower > upper
    left, right, upper, lower = left[some], right[some], upper[some], lower[some]
    if not len(left):
        return ""
    new = (left[1:] > right[:-1]) | (upper[1:] != upper[:-1]) | (lower[1:] != lower[:-1])
    first, last = np.append(True, new), np.append(new, True)
    return path(left[first], right[last], upper[first], (lower - upper)[first])


def _labels(columns: Columns, cells: Cells, height: float) -> Generator[str, None, Bools]:
    """Write labels: the kind's letter and the microbatch, the microbatch alone, or nothing, as
    there is room. Returns whether each cell has a label.

    Cells of one width have the same form of label, whatever their numbers.
    """
    labelled = np.zeros(len(cells.left), np.bool_)
    digits = "0" * len(str(columns.microbatch.max(initial=0)))
    room = cells.right - cells.left + _TIGHT
    for part in np.unique(cells.height)[::-1].tolist():
        if height * part < _LOWEST_LABEL:
            continue
        size = LABEL if part == 1 or height * part >= _ROOMY else SMALL_LABEL
        for ink, colours in _inks(cells.colour):
            chosen = (
                (cells.height == part)
                & np.isin(cells.colour, colours)
                & (room >= text_width(digits, size))
            )
            labelled |= chosen
            some = cells.where(chosen)
            texts = list(_texts(columns, some, digits, size, height))
            if texts:
                yield f'<g class="labels" fill="{ink}" font-size="{px(size)}">{"".join(texts)}</g>'
    return labelled


def _block_labels(columns: Columns, cells: Cells, height: float) -> Iterator[str]:
    """One label for several neighbouring cells that are too narrow for labels: `F3–B6` names the
    first and the last. Each kind in such a block is of one stage."""
    digits = "00" * len(str(columns.microbatch.max(initial=0)))
    room = text_width(f"F–F{digits}", SMALL_LABEL)
    for top, part in sorted(set(zip(cells.top.tolist(), cells.height.tolist(), strict=True))):
        some = cells.where((cells.top == top) & (cells.height == part))
        kinds, microbatches = some.colour // _SHADES, columns.microbatch[some.place]
        wide = some.right - some.left
        apart = some.left[1:] - some.right[:-1] > np.maximum(wide[1:], wide[:-1])
        for kind in np.unique(kinds):
            own = np.flatnonzero(kinds == kind)
            apart[own[1:][np.diff(some.colour[own]) != 0] - 1] = True
        y, texts = px((top + part / 2) * height + 0.36 * SMALL_LABEL), ""
        names = [f"{KINDS[kind].letter}{m}" for kind, m in zip(kinds, microbatches, strict=True)]
        for run in np.split(np.arange(len(wide)), np.flatnonzero(apart) + 1):
            long = some.right[run[-1]] - some.left[run[0]]
            for block in (
                np.array_split(run, max(1, long // (_APART * room))) if long >= room else ()
            ):
                first, last = block[[0, -1]]
                x, label = (
                    (some.left[first] + some.right[last]) / 2,
                    f"{names[first]}–{names[last]}",
                )
                texts += f'<text x="{px(x)}" y="{y}">{escape(label)}</text>'
        if texts and height * part >= _LOWEST_LABEL:
            yield (
                f'<g class="blocks" fill="{INK}" font-size="{px(SMALL_LABEL)}" stroke="{PAPER}" '
                f'stroke-width="2.5" paint-order="stroke">{texts}</g>'
            )


def _inks(colours: Ints) -> list[tuple[str, list[int]]]:
    inks: dict[str, list[int]] = {}
    for colour in np.unique(colours).tolist():
        inks.setdefault(_fill(colour).ink, []).append(colour)
    return sorted(inks.items())


def _texts(
    columns: Columns, cells: Cells, digits: str, size: float, height: float
) -> Iterator[str]:
    for colour in np.unique(cells.colour).tolist():
        some = cells.where(cells.colour == colour)
        name = KINDS[colour // _SHADES].letter
        # Cells of one kind get one form of label, even if some are a little shorter.
        if np.median(some.right - some.left) + _TIGHT < text_width(name + digits, size):
            name = ""
        for x, y, microbatch in zip(
            ((some.left + some.right) / 2).tolist(),
            ((some.top + some.height / 2) * height + 0.36 * size).tolist(),
            columns.microbatch[some.place].tolist(),
            strict=True,
        ):
            yield f'<text x="{px(x)}" y="{px(y)}">{escape(name)}{microbatch}</text>'


def _steps(cells: Cells, among: Cells, height: float) -> str:
    """A bar at each OPTIM_STEP, as long as the step takes, but narrow enough to show the others."""
    least = _STEP_WIDTH
    if np.diff(np.unique(cells.left)).min(initial=_LONE_STEP) < _LONE_STEP:
        least = min(least, max(0.3, float(np.median(among.right - among.left)) / 8))
    right = np.maximum(cells.right, cells.left + least)
    tall = attrs.evolve(
        cells, right=right, top=cells.top - _TALLER, height=cells.height + 2 * _TALLER
    )
    outline = _outline(tall, height)
    return f'<path class="steps" fill="{STEP_FILL}" d="{outline}"/>'
