"""The legend of a picture: what its colours and marks mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from schedir.ir import KINDS, Kind
from schedir.render.palette import IDLE_FILL, MEMORY_FILL, STEP_FILL, WORDS, letter, picture_fill
from schedir.render.styled import Piece
from schedir.render.svg_text import px, text_at
from schedir.simulator import Timeline

LINE = 18.0
"""The height of a line of text, in pixels."""


@attrs.frozen
class Entry:
    """An entry of the legend: swatches and what they mean, at `x` of a `row`."""

    fills: Sequence[str]
    wide: float
    text: str
    x: float
    row: int

    def draw(self, left: float, top: float) -> Iterator[Piece]:
        """Its elements, with the first line of the legend standing on `top`."""
        x, y = left + self.x, top + self.row * LINE
        for turn, fill in enumerate(self.fills):
            yield Piece(
                f'<rect x="{px(x + turn * self.wide)}" y="{px(y - 10)}" width="{px(self.wide)}" '
                f'height="12" fill="{fill}"/>\n'
            )
        yield text_at(x + len(self.fills) * self.wide + 5, y, self.text)


def legend(timelines: Sequence[Timeline], width: float, curves: str) -> Iterator[Entry]:
    """The kinds that occur, in the shades that occur, and what the curves are; line by line."""
    kinds = {KINDS[kind] for line in timelines for kind in np.unique(line.schedule.columns.kind)}
    chunks = max(
        len(line.schedule.stages_of(r)) for line in timelines for r in range(line.schedule.ranks)
    )
    shades = min(chunks, 4)
    shown: list[tuple[list[str], float, str]] = [
        ([picture_fill(kind, turn).area for turn in range(shades)], 14.0, f"{letter(kind)} {word}")
        for kind, word in WORDS.items()
        if kind in kinds
    ]
    if Kind.OPTIM_STEP in kinds:
        shown.append(([STEP_FILL], 2.5, Kind.OPTIM_STEP.meaning.word))
    shown.append(([IDLE_FILL], 14.0, "idle"))
    if curves:
        shown.append(([MEMORY_FILL], 14.0, f"{curves}, and the most of each rank"))
    if chunks > 1:
        shown.append(([], 0, f"a shade for each of a rank's {chunks} stages"))
    x, row = 0.0, 0
    for fills, wide, text in shown:
        takes = len(fills) * wide + 5 + 6.4 * len(text) + 16
        if x and x + takes > width:
            x, row = 0.0, row + 1
        yield Entry(fills, wide, text, x, row)
        x += takes
