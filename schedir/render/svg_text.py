"""The pieces of SVG: lengths in as few characters as possible, paths of boxes, and text."""

from __future__ import annotations

from typing import Any, TypeAlias
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from schedir.render.palette import INK
from schedir.render.text import Piece

Lengths: TypeAlias = NDArray[Any]

LABEL, SMALL_LABEL = 11.0, 9.0
"""The height of text in cells, in pixels like all lengths here."""
_WIDE, _NARROW, _OTHER = 0.95, 0.32, 0.6
"""The widths of a W, an I, and any other letter or digit, as parts of the height: a little more
than in Helvetica."""
_ROOM = 3.0


def px(length: float) -> str:
    """A length to a hundredth of a pixel, without superfluous zeros: 0.50 is .5."""
    text = f"{length:.2f}".rstrip("0").rstrip(".")
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def text_width(text: str, size: float) -> float:
    """The width of a label."""
    widths = {"W": _WIDE, "I": _NARROW}
    return size * sum(widths.get(letter, _OTHER) for letter in text) + _ROOM


def path(left: Lengths, right: Lengths, top: Lengths, height: Lengths) -> str:
    """The boxes, as the data of a path. Edges are rounded, so that neighbours still meet."""
    left, right = np.round(left, 2), np.round(right, 2)
    return "".join(
        f"M{px(x)} {px(y)}h{px(wide)}v{px(high)}h{px(-wide)}z"
        for x, y, wide, high in zip(
            left.tolist(),
            top.tolist(),
            (right - left).tolist(),
            height.tolist(),
            strict=True,
        )
    )


def text_at(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "",
    fill: str = INK,
    size: float = 0,
    weight: str = "",
) -> Piece:
    """A line of text on the baseline `y`."""
    more = f' text-anchor="{anchor}"' if anchor else ""
    more += f' font-size="{px(size)}"' if size else ""
    more += f' font-weight="{weight}"' if weight else ""
    return Piece(f'<text x="{px(x)}" y="{px(y)}" fill="{fill}"{more}>{escape(text)}</text>\n')
