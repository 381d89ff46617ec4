"""Blocks as rich shows them on a terminal: tables that fold, panels, colours as it has them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.panel import Panel as RichPanel
from rich.table import Table as RichTable
from rich.text import Text

from schedir.render.styled import Block, Panel, Piece, Table


def write_to_terminal(blocks: Iterable[Block], stream: TextIO, width: int, colour: bool) -> None:
    """Write the blocks to a terminal of `width` columns; without `colour` no escapes at all.

    Lines of pieces are left to the terminal to wrap, so that what is copied is what was written.
    """
    console = Console(
        file=stream,
        width=width,
        color_system="auto" if colour else None,
        force_terminal=True,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for _, group in groupby(blocks, type):
        several = list(group)
        pieces = [block for block in several if isinstance(block, Piece)]
        if pieces:
            console.print(Text.assemble(*pieces), end="", soft_wrap=True)
        for block in several:
            if not isinstance(block, Piece):
                console.print(_renderable(block))


def _renderable(block: Panel | Table) -> RenderableType:
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
