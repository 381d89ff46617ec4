"""How the commands talk to a terminal, and how they report what went wrong."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO

from schedir.check import Report
from schedir.errors import ParseError
from schedir.render.diagnostics import full

_MOST_OF_A_LINE = 76


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
    try:
        with open(error.file, encoding="utf-8", errors="replace", newline="\n") as file:
            line = next((text for n, text in enumerate(file, 1) if n == error.line), None)
    except OSError:
        line = None
    if line is not None:
        column = error.column - 1
        start = max(0, column - _MOST_OF_A_LINE * 2 // 3)
        clipped = line.rstrip()[start : start + _MOST_OF_A_LINE]
        # Each character takes one column, tabs too, so that the caret stands under the right one.
        shown = "".join(c if c.isprintable() else " " for c in clipped)
        print(f"    {shown}\n    {' ' * (column - start)}^", file=sys.stderr)
    return 2
