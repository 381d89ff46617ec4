"""What each rank keeps over time, as every picture shows it, and its curves under the lanes of an
SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs
import numpy as np

from schedir.render.palette import MEMORY_FILL, MEMORY_LINE
from schedir.render.svg_text import SMALL_LABEL, Lengths, px
from schedir.render.text import Piece, number, size
from schedir.simulator import Timeline
from schedir.simulator.values import Numbers

_BAR = 2.0
"""How wide, in pixels, the bars are of curves that change faster."""

Curve: TypeAlias = tuple[Numbers, Numbers]
"""The times, and the amounts from then on."""


@attrs.frozen
class Kept:
    """`curves[timeline][rank]`, in bytes where `sized`, else in live activations; `most` is the
    most that any of them reaches, so that all can be drawn to one scale."""

    sized: bool
    curves: Sequence[Sequence[Curve]]
    most: float

    @property
    def what(self) -> str:
        """What is kept, in words."""
        return "bytes held" if self.sized else "live activations"

    def peak(self, curve: Curve) -> str:
        """The most that a rank keeps, in words."""
        most = most_of(curve)
        return size(most) if self.sized else number(most)

    @property
    def room(self) -> float:
        """The room that the words beside the curves need."""
        peaks = (self.peak(curve) for ranks in self.curves for curve in ranks)
        return 8 + 0.6 * SMALL_LABEL * max(map(len, peaks))

    def draw(self, curve: Curve, scale: float, end: float, height: float) -> Piece:
        """A curve whose upper left corner is the origin: `scale` pixels to a unit of time, up to
        the pixel `end`."""
        left, amounts = thinned(np.round(curve[0] * scale, 2), curve[1])
        y = height - amounts * ((height - 1) / (self.most or 1))
        steps = "".join(
            f"H{px(x)}V{px(up)}"
            for x, up in zip(np.minimum(left, end).tolist(), y.tolist(), strict=True)
        )
        return Piece(
            f'<path class="memory" fill="{MEMORY_FILL}" stroke="{MEMORY_LINE}" stroke-width=".8" '
            f'd="M0 {px(height)}{steps}H{px(end)}V{px(height)}z"/>\n'
        )


def kept_by(timelines: Sequence[Timeline]) -> Kept:
    """The curves of bytes where all timelines know their sizes, else those of activations."""
    sized = all(line.sizes is not None for line in timelines)
    curves = [
        [(line.memory if sized else line.live)(rank) for rank in range(line.schedule.ranks)]
        for line in timelines
    ]
    return Kept(sized, curves, max(most_of(curve) for ranks in curves for curve in ranks))


def most_of(curve: Curve) -> float:
    """The most that is kept, 0 where nothing is known."""
    most: float = curve[1].max(initial=0).item()
    return most


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
        told, ends = (np.ones_like(alone), alone), x + _BAR
    else:
        # A peak that lasts no time is told, since it counts.
        told, ends = (most > np.maximum(before, after), np.ones(len(x), np.bool_)), x
    kept = np.stack(told, axis=1)
    x, amounts = np.stack([x, ends], axis=1)[kept], np.stack([most, after], axis=1)[kept]
    changes = np.append(True, amounts[1:] != amounts[:-1])
    return x[changes], amounts[changes]
