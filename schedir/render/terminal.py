"""How blocks are written to a terminal, a pipe or a file: as wide as it is, with colours or not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import TextIO

from schedir.render.pages import Page
from schedir.render.text import Block, coloured, plain


def is_terminal(stream: TextIO | None) -> bool:
    """True where a person looks at a stream, False for a file or a pipe."""
    return stream is not None and stream.isatty()


def width_of(stream: TextIO | None) -> int | None:
    """How many columns a stream has: those of a terminal, or of a pipe where COLUMNS says so."""
    if not is_terminal(stream) and not os.environ.get("COLUMNS", "").strip("0").isdecimal():
        return None
    return shutil.get_terminal_size().columns


def page_for(stream: TextIO | None, subject: str = "") -> Page:
    """What a writer has to know of the stream that it writes to."""
    width = width_of(stream)
    if stream is None or width is None:
        return Page(subject)
    screen = is_terminal(stream)
    lines = shutil.get_terminal_size().lines
    return Page(subject, width - _widened(stream), lines, fit=not screen, screen=screen)


def _widened(stream: TextIO) -> int:
    """How many columns a line may gain where the stream's encoding makes `...` of `…`."""
    try:
        "…".encode(stream.encoding)
    except UnicodeError:
        return 4  # two cuts in a line
    return 0


def write(blocks: Iterable[Block], stream: TextIO | None) -> None:
    """Write blocks: as wide as the stream is; where it has no width plain and uncropped."""
    if stream is None:
        return
    width = width_of(stream)
    if width is not None:
        from schedir.render.text import write_to_terminal  # with rich: a pipe needs none of it

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
