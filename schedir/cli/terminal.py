"""How the commands report errors on stderr, and show the progress of long work on a terminal."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial

import attrs

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


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Let the error of a file that can't be written begin with `what`."""
    try:
        yield
    except OSError as error:
        raise SchedirError(f"{what}: {error.strerror}") from None


@attrs.define
class RefusedError(SchedirError):
    """The schedule `subject` has errors, listed in `report`, so the command can't use it."""

    report: Report
    subject: str
    page: str


def tell(error: SchedirError) -> int:
    """Print an error on stderr, and return the exit code. An error in a file's text is shown with
    the line and a caret under the place, a refused schedule with its report."""
    if isinstance(error, RefusedError):
        write(full(error.report, error.subject), sys.stderr)
        return 1
    fail(str(error))
    if isinstance(error, ParseError) and not error.binary:
        with suppress(OSError):
            _show_line(error)
    return 2


def _show_line(error: ParseError) -> None:
    """Print the line of the error, cut to fit, and a caret under the place; nothing if there is no
    such line. The file is read piece by piece, because one line may fill a huge file."""
    above, column = error.line - 1, error.column - 1
    start = skipped = max(0, column - _MOST_OF_A_LINE * 2 // 3)
    with open(error.file, encoding="utf-8-sig", errors="replace", newline="\n") as file:
        for piece in iter(partial(file.readline, _PIECE), ""):
            if above:
                above -= piece.endswith("\n")
            elif skipped >= len(piece):
                skipped -= len(piece)
            else:
                line = (piece[skipped:] + file.readline(_MOST_OF_A_LINE)).partition("\n")[0]
                # Every character takes one column, tabs too, so the caret stands under the right
                # one.
                shown = "".join(c if c.isprintable() else " " for c in line[:_MOST_OF_A_LINE])
                print(f"    {shown.rstrip()}\n    {' ' * (column - start)}^", file=sys.stderr)
                return


@contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Show on a terminal how far the work is, each second. It yields a function of (done, total).

    The line is erased at the end, after Ctrl-C too. Text that a user's generator prints meanwhile
    goes to stderr, so that it does not mix with the result.
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

    shown = threading.Thread(target=show, daemon=True)
    if not is_terminal(sys.stderr) or os.environ.get("TERM") == "dumb":
        ended.set()
    shown.start()
    try:
        with redirect_stdout(sys.stderr):
            yield advance
    finally:
        ended.set()
        shown.join()
