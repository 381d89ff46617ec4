"""Writes blocks to a terminal, a pipe or a file: in its width, and in colour if it takes colour."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import TextIO

from schedir.render.pages import Page
from schedir.render.text import Block, coloured, plain


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; False for a file or a pipe."""
    return stream is not None and stream.isatty()


def width_of(stream: TextIO | None) -> int | None:
    """The columns of a terminal, or of a pipe if COLUMNS is set; None if there is no limit."""
    if not is_terminal(stream) and not os.environ.get("COLUMNS", "").strip("0").isdecimal():
        return None
    return shutil.get_terminal_size().columns


def page_for(stream: TextIO | None, subject: str = "") -> Page:
    """The options of a writer for the stream that it writes to."""
    width = width_of(stream)
    if stream is None or width is None:
        return Page(subject)
    screen = is_terminal(stream)
    lines = shutil.get_terminal_size().lines
    return Page(subject, width - _widened(stream), lines, fit=not screen, screen=screen)


def _widened(stream: TextIO) -> int:
    """The columns that a line may gain if the stream's encoding turns `…` into `...`."""
    try:
        "…".encode(stream.encoding)
    except UnicodeError:
        return 4  # two cuts in a line
    return 0


def write(blocks: Iterable[Block], stream: TextIO | None) -> None:
    """Write blocks in the width of the stream; if it has none, nothing is folded or cut."""
    if stream is None:
        return
    width = width_of(stream)
    if width is not None:
        from schedir.render.text import (
            write_to_terminal,
        )  # it imports rich, which a pipe does not need

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
