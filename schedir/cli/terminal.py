"""How the commands report errors on stderr, and show the progress of long work on a terminal."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from schedir.checker import Report
from schedir.errors import ParseError, SchedirError
from schedir.ir import printable
from schedir.render.diagnostics import full
from schedir.render.text import is_terminal, write

_MOST_OF_A_LINE = 76
_PIECE = 1 << 16
_SECONDS = 1.0  # before a line of progress appears, and between two
_ERASE = "\r\x1b[2K"


def fail(message: str) -> int:
    """Print an error on stderr, and return the exit code 2."""
    say("error", message)
    return 2


def say(level: str, message: str) -> None:
    """Print one line on stderr, such as `warning: …`. Paths in the working directory are shortened,
    and characters that a terminal would obey are escaped."""
    with suppress(FileNotFoundError):  # of a folder that has been removed
        here = re.escape(os.path.join(os.getcwd(), ""))
        message = re.sub(rf"(?<![\w./-]){here}", "", message)
    print(f"{level}: {printable(message)}", file=sys.stderr)


def see(page: str) -> None:
    """Print on stderr, below an error, which page of the docs says more."""
    if sys.stdout is not None:
        sys.stdout.flush()  # so that this line comes last where both are one file
    print(f"see: schedir docs {page}", file=sys.stderr)


@contextmanager
def about(page: str) -> Iterator[None]:
    """Let the errors that are raised within name this page of the docs."""
    try:
        yield
    except SchedirError as error:
        error.page = page
        raise


class RefusedError(Exception):
    """The schedule `subject` has errors, listed in `report`, so the command can't use it."""

    def __init__(self, report: Report, subject: str) -> None:
        super().__init__(subject)
        self.report = report
        self.subject = subject


def refuse(refused: RefusedError) -> int:
    """Print on stderr why a schedule can't be used, and return the exit code."""
    write(full(refused.report, refused.subject), sys.stderr)
    see(refused.report.errors[0].code)
    return 1


def tell(error: SchedirError) -> int:
    """Print an error on stderr, and return the exit code. An error in a file's text is shown with
    the line and a caret under the place."""
    fail(str(error))
    if not isinstance(error, ParseError) or error.binary:
        return 2
    column = error.column - 1
    start = max(0, column - _MOST_OF_A_LINE * 2 // 3)
    try:
        line = _excerpt(error.file, error.line, start)
    except OSError:
        line = None
    if line is not None:
        # Every character takes one column, tabs too, so the caret stands under the right one.
        shown = "".join(c if c.isprintable() else " " for c in line.rstrip())
        print(f"    {shown}\n    {' ' * (column - start)}^", file=sys.stderr)
    return 2


def _excerpt(path: str, number: int, start: int) -> str | None:
    """A line of a file from column `start` on, cut to fit; None if the line is shorter.

    It reads piece by piece, because one line may fill a huge file.
    """
    with open(path, encoding="utf-8-sig", errors="replace", newline="\n") as file:
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


@contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Show on a terminal how far the work is, each second. It yields a function of (done, total).

    The line is erased at the end, after Ctrl-C too.
    """
    far, ended = "", threading.Event()

    def advance(done: int, total: int) -> None:
        nonlocal far
        far = f"{done}/{total} "

    def show() -> None:
        began, line = time.monotonic(), ""
        while not ended.wait(_SECONDS):
            line = f"{doing} {far}{time.monotonic() - began:.0f} s"
            print(f"{_ERASE}{line}", end="", file=sys.stderr, flush=True)
        print(_ERASE if line else "", end="", file=sys.stderr, flush=True)

    if not is_terminal(sys.stderr) or os.environ.get("TERM") == "dumb":
        yield advance
        return
    shown = threading.Thread(target=show, daemon=True)
    shown.start()
    try:
        yield advance
    finally:
        ended.set()
        shown.join()
