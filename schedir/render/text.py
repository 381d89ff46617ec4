"""Blocks of styled text, which renderers make, and how they are written to a terminal, a pipe or a
file: as plain text, with ANSI colours, or by rich. rich is imported only where a line has a width.
A character that a stream cannot encode is replaced."""

from __future__ import annotations

import codecs
import io
import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeAlias

import attrs

from schedir.display import rounded

if TYPE_CHECKING:
    from rich.console import RenderableType

_INSTEAD = {"…": "...", "→": "->", "−": "-", "–": "-", "×": "x", "µ": "u"}
_PREFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi")


def as_json(content: object) -> str:
    """Data as indented JSON."""
    import json  # other forms do not need it

    return json.dumps(content, indent=2, default=str) + "\n"


class Piece(NamedTuple):
    """Text with line breaks, and its style (see `palette`)."""

    text: str
    style: str = ""


@attrs.frozen
class Table:
    """Rows of text; the first may be the `header`. `align` has `<` or `>` for each column."""

    rows: Sequence[Sequence[str]]
    align: str = ""
    header: bool = False

    @property
    def width(self) -> int:
        """The width of the table without folding, with three blanks between columns."""
        widths = _widths(self.rows)
        return sum(widths) + 3 * (len(widths) - 1)


@attrs.frozen
class Panel:
    """A frame around pieces of text, with a title in its upper edge."""

    title: str
    pieces: Sequence[Piece]


Block: TypeAlias = Piece | Table | Panel
"""A part of the output. Nothing stands between two blocks: pieces hold their line breaks."""


def plain(blocks: Iterable[Block]) -> str:
    """The blocks as plain text, as wide as they need."""
    return "".join(map(_plain, blocks))


def _plain(block: Block) -> str:
    if isinstance(block, Table):
        return table(block.rows, block.align)
    if isinstance(block, Panel):
        return f"{block.title}\n{''.join(piece.text for piece in block.pieces)}\n"
    return block.text


def coloured(blocks: Iterable[Block]) -> str:
    """The characters of `plain`, with ANSI escapes for 256 colours between them."""
    from rich.color import ColorSystem  # imported only for colour, because a pipe needs none
    from rich.style import Style

    return "".join(
        Style.parse(block.style).render(block.text, color_system=ColorSystem.EIGHT_BIT)
        if isinstance(block, Piece) and block.style
        else _plain(block)
        for block in blocks
    )


def write_to_terminal(blocks: Iterable[Block], stream: TextIO, width: int, colour: bool) -> None:
    """Write the blocks to a terminal of `width` columns; without `colour` there are no escapes.

    The terminal wraps the lines of pieces, so that copied text has no extra line breaks.
    """
    from rich.console import Console
    from rich.text import Text

    class Own(Console):
        def on_broken_pipe(self) -> None:  # rich would end the process for it
            raise

    console = Own(
        file=stream,
        width=width,
        color_system="auto" if colour else None,
        force_terminal=True,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for each in rich_of(blocks):
        console.print(each, end="", soft_wrap=isinstance(each, Text))


def rich_of(blocks: Iterable[Block]) -> Iterator[RenderableType]:
    """The blocks as rich draws them."""
    from rich.text import Text

    for kind, group in groupby(blocks, type):
        alike: Iterator[Any] = group
        if kind is Piece:
            yield Text.assemble(*alike, end="")
        else:
            yield from map(_rich, alike)


def _rich(block: Panel | Table) -> RenderableType:
    """A frame, or a table that folds if the terminal is too narrow."""
    from rich import box
    from rich.panel import Panel as RichPanel
    from rich.table import Table as RichTable
    from rich.text import Text

    if isinstance(block, Panel):
        return RichPanel(Text.assemble(*block.pieces), title=Text(block.title), title_align="left")
    table = RichTable(
        box=box.SIMPLE_HEAD, show_header=block.header, show_edge=False, pad_edge=False
    )
    names, *rows = block.rows if block.header else ([""] * len(block.rows[0]), *block.rows)
    for name, direction in zip(names, block.align.ljust(len(names), "<"), strict=True):
        table.add_column(Text(name), justify="right" if direction == ">" else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def number(value: float) -> str:
    """A number in few digits: 21.0 is 21, 0.1 + 0.2 is 0.3."""
    return str(int(value)) if value == int(value) else rounded(value)


def count(many: int, what: str, plural: str = "s") -> str:
    """A number with its noun: `1 rank`, `4 ranks`."""
    return f"{many} {what}{'' if many == 1 else plural}"


def size(many: float) -> str:
    """A number of bytes in three digits: 1.5 GiB."""
    power = 0
    while round(many) >= 1024 and power < len(_PREFIXES) - 1:
        many /= 1024
        power += 1
    return f"{rounded(many, 3)} {_PREFIXES[power]}B"


def fill(text: str, width: int | None) -> str:
    """The text in lines of at most `width` columns; unchanged if `width` is None."""
    return text if width is None else textwrap.fill(text, width)


def table(rows: Sequence[Sequence[str]], align: str = "") -> str:
    """The rows in aligned columns; `align` has `>` for each column that is aligned right."""
    widths = _widths(rows)
    ways = align.ljust(len(widths), "<")
    forms = [f"{way}{wide}" for way, wide in zip(ways, widths, strict=True)]
    lines = ["  ".join(map(format, row, forms)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


@attrs.frozen
class Screen:
    """The columns and lines that a drawing has to fit into; None for no limit.

    Without a height, a drawing of every action is split into pages by time; with `fit` all of it
    fits into the width, with less detail.
    """

    width: int | None = None
    height: int | None = None
    fit: bool = False


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; False for a file or a pipe."""
    return stream is not None and stream.isatty()


def width_of(stream: TextIO | None) -> int | None:
    """The columns of a terminal, or of a pipe if COLUMNS is set; None if there is no limit."""
    if not is_terminal(stream) and not os.environ.get("COLUMNS", "").strip("0").isdecimal():
        return None
    return shutil.get_terminal_size().columns


def screen_of(stream: TextIO | None) -> Screen:
    """The screen of a terminal. A pipe has no height; if COLUMNS says a width, drawings fit it."""
    width = width_of(stream)
    if stream is None or width is None:
        return Screen()
    try:
        "…".encode(stream.encoding)
    except UnicodeError:
        width -= 4  # two cuts in a line become `...`
    if not is_terminal(stream):
        return Screen(width, fit=True)
    return Screen(width, shutil.get_terminal_size().lines)


def write(blocks: Iterable[Block], stream: TextIO | None) -> None:
    """Write blocks in the width of the stream; if it has none, nothing is folded or cut."""
    if stream is None:
        return
    width = width_of(stream)
    if width is not None:
        write_to_terminal(blocks, stream, width, has_colour(stream))
    else:
        stream.write(coloured(blocks) if has_colour(stream) else plain(blocks))


def has_colour(stream: TextIO) -> bool:
    """Whether a stream takes colour (no-color.org, force-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def legible(stream: TextIO | None) -> None:
    """Make a stream replace characters that its encoding lacks, instead of failing.

    The characters that schedir draws with become ASCII; any other becomes an escape, such as
    `\\xe9`.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="schedir.legible")


def _instead(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError):
        plain = _INSTEAD.get(error.object[error.start])
        if plain is not None:
            return plain, error.start + 1
        error.end = error.start + 1
    return codecs.backslashreplace_errors(error)


codecs.register_error("schedir.legible", _instead)
