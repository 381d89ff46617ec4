"""How the commands talk to a terminal, and how they report what went wrong."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO

from schedir.checker import Report
from schedir.errors import ParseError
from schedir.render.diagnostics import full

_MOST_OF_A_LINE = 76
_PIECE = 1 << 16


def width_of(stream: TextIO | None) -> int | None:
    """The columns of the terminal behind a stream; None where it is a file or a pipe."""
    if stream is None or not stream.isatty():
        return None
    return shutil.get_terminal_size().columns


def has_colour(stream: TextIO | None) -> bool:
    """True where a stream is a terminal that takes colour (no-color.org)."""
    return (
        stream is not None
        and stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


def fail(message: str) -> int:
    """Say what is wrong with the target or an option; returns the exit code."""
    print(f"error: {message}", file=sys.stderr)
    return 2


def refuse(report: Report, subject: str) -> int:
    """Show why a schedule can't be used; returns the exit code."""
    print(full(report, subject, has_colour(sys.stderr)), end="", file=sys.stderr)
    return 1


def show_parse_error(error: ParseError) -> int:
    """Say what is wrong with a file, with the line and a caret under it; returns the exit code."""
    fail(str(error))
    column = error.column - 1
    start = max(0, column - _MOST_OF_A_LINE * 2 // 3)
    try:
        line = _excerpt(error.file, error.line, start)
    except OSError:
        line = None
    if line is not None:
        # Each character takes one column, tabs too, so that the caret stands under the right one.
        shown = "".join(c if c.isprintable() else " " for c in line.rstrip())
        print(f"    {shown}\n    {' ' * (column - start)}^", file=sys.stderr)
    return 2


def _excerpt(path: str, number: int, start: int) -> str | None:
    """What a line of a file holds from `start` on; None where there is nothing.

    It reads piece by piece, as a line may be all of a huge file.
    """
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        text = file.read(_PIECE)
        above = number - 1
        while text and (ends := text.count("\n")) < above:
            above -= ends
            text = file.read(_PIECE)
        text = text.split("\n", above)[-1]
        while start >= len(text):
            start -= len(text)
            text = file.read(_PIECE)
            if not text:
                return None
        text = text[start:] + file.read(_MOST_OF_A_LINE)
    return text.partition("\n")[0][:_MOST_OF_A_LINE]
