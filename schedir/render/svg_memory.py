"""What each rank holds over time, as curves under the lanes of a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np

from schedir.render.comparison import size
from schedir.render.kept import Curve, Kept, kept_by, most_of
from schedir.render.palette import FAINT_INK, MEMORY_FILL, MEMORY_LINE
from schedir.render.styled import Piece, number
from schedir.render.svg_text import SMALL_LABEL, Lengths, px, text_at
from schedir.simulator import Timeline

_BAR = 2.0
"""How wide, in pixels, the bars are of curves that change faster."""


@attrs.frozen
class Curves:
    """The curves of several timelines, all of one scale: `what` says of what, `amount` puts one
    into words."""

    what: str
    kept: Kept
    amount: Callable[[float], str]

    @property
    def room(self) -> float:
        """The room that the words beside the curves need."""
        peaks = {self.amount(most_of(curve)) for ranks in self.kept.curves for curve in ranks}
        return 8 + 0.6 * SMALL_LABEL * max(map(len, peaks))

    def draw(
        self, turn: int, rank: int, scale: float, end: float, height: float
    ) -> Iterator[Piece]:
        """The curve of a rank of the `turn`-th timeline, whose upper left corner is the origin:
        `scale` pixels to a unit of time, up to the pixel `end`."""
        curve = self.kept.curves[turn][rank]
        left, amounts = thinned(np.round(curve[0] * scale, 2), curve[1])
        y = height - amounts * ((height - 1) / (self.kept.most or 1))
        steps = "".join(
            f"H{px(x)}V{px(up)}"
            for x, up in zip(np.minimum(left, end).tolist(), y.tolist(), strict=True)
        )
        yield Piece(
            f'<path class="memory" fill="{MEMORY_FILL}" stroke="{MEMORY_LINE}" stroke-width=".8" '
            f'd="M0 {px(height)}{steps}H{px(end)}V{px(height)}z"/>\n'
        )

    def label(self, turn: int, rank: int, x: float, y: float) -> Piece:
        """The most that a rank holds."""
        peak = self.amount(most_of(self.kept.curves[turn][rank]))
        return text_at(x, y, peak, size=SMALL_LABEL, fill=FAINT_INK)


def curves_of(timelines: Sequence[Timeline]) -> Curves:
    """The curves of bytes where all timelines know them, else those of activations."""
    kept = kept_by(timelines)
    if kept.sized:
        return Curves("bytes held", kept, size)
    return Curves("live activations", kept, number)


def thinned(left: Lengths, amounts: Lengths) -> Curve:
    """The curve without what can't be seen: dips that last no time, and, where changes are closer
    than pixels, all but the most of each bar."""
    coarse = len(left) > left.max(initial=0)
    at = np.floor(left / _BAR) * _BAR if coarse else left
    first = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
    x, after = at[first], amounts[np.append(first[1:], len(left)) - 1]
    before = np.append(0, after[:-1])
    most = np.maximum(np.maximum.reduceat(amounts, first), np.maximum(before, after))
    if coarse:
        # What is left after a bar is told at its end, unless the next one begins there.
        alone = np.append(x[1:] > x[:-1] + _BAR, True)
        told = np.stack([np.ones_like(alone), alone], axis=1)
        ends = x + _BAR
    else:
        # A peak that lasts no time is told, since it counts.
        told = np.stack([most > np.maximum(before, after), np.ones(len(x), np.bool_)], axis=1)
        ends = x
    x, amounts = np.stack([x, ends], axis=1)[told], np.stack([most, after], axis=1)[told]
    changes = np.append(True, amounts[1:] != amounts[:-1])
    return x[changes], amounts[changes]
