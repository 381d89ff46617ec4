"""The memory of each rank over time, and its curves under the lanes of an SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import attrs
import numpy as np

from schedir.render.palette import FAINT_INK, MEMORY_FILL, MEMORY_LINE
from schedir.render.svg_text import SMALL_LABEL, Lengths, px, text_at
from schedir.render.text import Piece, number, size
from schedir.simulator import Timeline
from schedir.simulator.values import Numbers

AXIS = 30.0
"""The least height, in pixels, of a curve with an axis of three ticks."""
_BAR = 2.0
"""The width, in pixels, of the bars of a curve that changes faster."""

Curve: TypeAlias = tuple[Numbers, Numbers]
"""The times of changes, and the amount from each time on."""


@attrs.frozen
class Kept:
    """`curves[timeline][rank]`, in bytes if `sized`, else in live activations. `most` is the
    highest value: all curves have one scale."""

    sized: bool
    curves: Sequence[Sequence[Curve]]
    most: float

    @property
    def what(self) -> str:
        """The quantity of a curve, in words."""
        return "bytes held" if self.sized else "live activations"

    def peak(self, curve: Curve) -> str:
        """The peak of a curve, in words."""
        return self._amount(most_of(curve))

    def _amount(self, many: float) -> str:
        return size(many) if self.sized else number(many)

    @property
    def _ticks(self) -> list[str]:
        """The labels on the axis of a curve, from below."""
        return [self._amount(part * self.most) for part in (0, 0.5, 1)]

    @property
    def room(self) -> float:
        """The width of the axis and the words beside the curves."""
        peaks = (f"peak {self.peak(curve)}" for ranks in self.curves for curve in ranks)
        return 16 + sum(0.6 * SMALL_LABEL * max(map(len, each)) for each in (peaks, self._ticks))

    def beside(self, curve: Curve, x: float, top: float, height: float) -> Iterator[Piece]:
        """The axis of a curve with its upper right corner at (`x`, `top`), and the peak, if there
        is room."""
        for text, y in zip(self._ticks, (height, (height + 1) / 2, 1), strict=True):
            if height >= AXIS:
                yield Piece(f'<path stroke="{MEMORY_LINE}" d="M{px(x)} {px(top + y)}h3"/>\n')
                yield text_at(x + 5, top + y + 3, text, size=SMALL_LABEL, fill=FAINT_INK)
        if height >= 8:
            peak = f"peak {self.peak(curve)}"
            x += self.room - 8 - 0.6 * SMALL_LABEL * len(peak)
            yield text_at(x, top + height / 2 + 3, peak, size=SMALL_LABEL)

    def draw(self, curve: Curve, scale: float, end: float, height: float) -> Piece:
        """A curve with its upper left corner at the origin: `scale` pixels to a unit of time, up to
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


def between(curve: Curve, since: float, until: float) -> Curve:
    """The part of a curve between two times, counted from the first."""
    times, amounts = curve
    first = int(np.searchsorted(times, since, side="right")) - 1 if since else 0
    last = int(np.searchsorted(times, until, side="right"))
    return np.maximum(times[first:last] - since, 0), amounts[first:last]


def kept_by(timelines: Sequence[Timeline]) -> Kept:
    """Curves of bytes if all timelines know their sizes, else of activations."""
    sized = all(line.sizes is not None for line in timelines)
    curves = [
        [(line.memory if sized else line.live)(rank) for rank in range(line.schedule.ranks)]
        for line in timelines
    ]
    return Kept(sized, curves, max(most_of(curve) for ranks in curves for curve in ranks))


def most_of(curve: Curve) -> float:
    """The peak of a curve, 0 if nothing is known."""
    most: float = curve[1].max(initial=0).item()
    return most


def thinned(left: Lengths, amounts: Lengths) -> Curve:
    """The curve without invisible changes: dips of no duration, and, if changes are closer than
    pixels, everything but the maximum of each bar."""
    coarse = len(left) > left.max(initial=0)
    at = np.floor(left / _BAR) * _BAR if coarse else left
    first = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
    x, after = at[first], amounts[np.append(first[1:], len(left)) - 1]
    before = np.append(0, after[:-1])
    most = np.maximum(np.maximum.reduceat(amounts, first), np.maximum(before, after))
    if coarse:
        # The amount after a bar is kept at its end, unless the next bar begins there.
        alone = np.append(x[1:] > x[:-1] + _BAR, True)
        told, ends = (np.ones_like(alone), alone), x + _BAR
    else:
        # A peak of no duration is kept, because it counts.
        told, ends = (most > np.maximum(before, after), np.ones(len(x), np.bool_)), x
    kept = np.stack(told, axis=1)
    x, amounts = np.stack([x, ends], axis=1)[kept], np.stack([most, after], axis=1)[kept]
    changes = np.append(True, amounts[1:] != amounts[:-1])
    return x[changes], amounts[changes]
