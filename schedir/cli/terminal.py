"""How the commands report errors on stderr, and show the progress of long work on a terminal."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING

from schedir.checker import Report
from schedir.errors import ParseError, SchedirError
from schedir.ir import printable
from schedir.render.diagnostics import full
from schedir.render.text import has_colour, is_terminal, write

if TYPE_CHECKING:
    from rich.progress import Progress

_MOST_OF_A_LINE = 76
_PATIENCE = 1.0  # seconds before a progress line appears, if stderr is a terminal


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
    """A line of a file from column `start` on, cut to fit; None if the line is shorter."""
    with open(path, encoding="utf-8-sig", errors="replace", newline="\n") as file:
        line = next(islice(file, number - 1, None), "")[start:]
    return line.rstrip("\n")[:_MOST_OF_A_LINE] if line else None


@contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress line on stderr while the work runs. It yields a function of (done, total).

    The line is erased at the end, after Ctrl-C too.
    """
    shown = _Shown(doing)
    if not is_terminal(sys.stderr) or os.environ.get("TERM") == "dumb":
        yield shown.advance
        return
    timer = threading.Timer(_PATIENCE, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield shown.advance
    finally:
        timer.cancel()
        timer.join()
        shown.stop()


class _Shown:
    """A progress line, drawn by a thread."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._far: tuple[int, int] | None = None
        self._bar: Progress | None = None

    def advance(self, done: int, total: int) -> None:
        """Report that `done` of `total` are done."""
        self._far = done, total
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=done, total=total, far=f"{done}/{total}")

    def start(self) -> None:
        """Draw the line from now on."""
        # Imported here because most commands finish before they need rich.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(file=sys.stderr, no_color=not has_colour(sys.stderr), force_terminal=True)
        bar = Progress(
            SpinnerColumn("line"),  # plain ASCII
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[far]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        bar.add_task(self._doing, total=None, far="")
        bar.start()
        self._bar = bar
        if self._far is not None:
            self.advance(*self._far)

    def stop(self) -> None:
        """Erase the line."""
        if self._bar is not None:
            self._bar.stop()
