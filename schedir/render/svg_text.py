"""The words of a picture: numbers as short as they can be, escaped text, and how wide it is."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Lengths: TypeAlias = NDArray[Any]

LABEL, SMALL_LABEL = 11.0, 9.0
"""The height of text in cells, in pixels, as all lengths here."""
_CHARACTER = 0.6
"""The width of a digit or letter, as a part of its height: a little more than Helvetica's."""
_ROOM = 3.0


def px(length: float) -> str:
    """A length to a hundredth of a pixel, without what says nothing: 0.50 is .5."""
    text = f"{length:.2f}".rstrip("0").rstrip(".")
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def text_width(characters: int, size: float) -> float:
    """The room that a label needs in its cell."""
    return characters * size * _CHARACTER + _ROOM


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
