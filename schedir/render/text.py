"""What the text outputs share: colour, aligned tables and numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def paint(text: str, style: str, colour: bool = True) -> str:
    """`text` under an ANSI style such as "1;31", or as it is where `colour` is off."""
    return f"\x1b[{style}m{text}\x1b[0m" if colour and style else text


def number(value: float) -> str:
    """A number in as few digits as a person needs: 21.0 is 21, 0.1 + 0.2 is 0.3."""
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def table(rows: Sequence[Sequence[str]], align: str = "", width: int | None = None) -> str:
    """The rows in aligned columns; `align` holds `>` for each column that goes to the right.

    The last column is folded into `width` where that leaves it some room, else written out.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    directions = align.ljust(len(widths), "<")
    indent = sum(widths[:-1]) + 2 * (len(widths) - 1)
    fold = width is not None and width - indent >= 20
    lines = []
    for row in rows:
        *cells, last = (
            f"{cell:{direction}{size}}"
            for cell, direction, size in zip(row, directions, widths, strict=True)
        )
        folded = textwrap.wrap(last, width - indent) if fold and width is not None else [last]
        lines.append("  ".join([*cells, *folded[:1]]).rstrip())
        lines += [" " * indent + more for more in folded[1:]]
    return "\n".join(lines) + "\n"
