"""What renderers make: blocks of text with styles, that can be written plain or with colour."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import attrs


class Piece(NamedTuple):
    """Text, line breaks included, and its style (see `palette`)."""

    text: str
    style: str = ""


@attrs.frozen
class Table:
    """Rows of text, the first of which may be the `header`; `align` is `<` or `>` per column."""

    rows: Sequence[Sequence[str]]
    align: str = ""
    header: bool = False

    @property
    def width(self) -> int:
        """The columns that it takes where nothing is folded, three between two of them."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        return sum(widths) + 3 * (len(widths) - 1)


@attrs.frozen
class Panel:
    """A frame around pieces of text, with a title in its upper edge."""

    title: str
    pieces: Sequence[Piece]


Block: TypeAlias = Piece | Table | Panel
"""Blocks follow each other without anything between them: line breaks are in the pieces."""


def plain(blocks: Iterable[Block]) -> str:
    """The blocks as text alone: as wide as it must be."""
    return "".join(map(_plain, blocks))


def _plain(block: Block) -> str:
    if isinstance(block, Table):
        return table(block.rows, block.align)
    if isinstance(block, Panel):
        return f"{block.title}\n{''.join(piece.text for piece in block.pieces)}\n"
    return block.text


def coloured(blocks: Iterable[Block]) -> str:
    """The same characters as `plain`, with ANSI escapes for 256 colours between them."""
    from rich.color import ColorSystem  # only where there is colour: a pipe starts without it
    from rich.style import Style

    return "".join(
        Style.parse(block.style).render(block.text, color_system=ColorSystem.EIGHT_BIT)
        if isinstance(block, Piece) and block.style
        else _plain(block)
        for block in blocks
    )


def number(value: float) -> str:
    """A number in as few digits as a person needs: 21.0 is 21, 0.1 + 0.2 is 0.3."""
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def count(many: int, what: str, plural: str = "s") -> str:
    """A number of things: `1 rank`, `4 ranks`."""
    return f"{many} {what}{'' if many == 1 else plural}"


def fill(text: str, width: int | None) -> str:
    """The text in lines of at most `width` columns; as it is without one."""
    return text if width is None else textwrap.fill(text, width)


def table(rows: Sequence[Sequence[str]], align: str = "") -> str:
    """The rows in aligned columns; `align` holds `>` for each column that goes to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    directions = align.ljust(len(widths), "<")
    lines = [
        "  ".join(
            f"{cell:{direction}{size}}"
            for cell, direction, size in zip(row, directions, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines) + "\n"
