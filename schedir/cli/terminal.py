"""How the commands talk to a terminal, a pipe or a file, how they show that long work goes on, and
how they report what went wrong."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from schedir.checker import Report
from schedir.errors import ParseError, SchedirError
from schedir.ir import printable
from schedir.render import outputs_of
from schedir.render.terminal import has_colour, is_terminal, page_for, write

if TYPE_CHECKING:
    from rich.progress import Progress

_MOST_OF_A_LINE = 76
_PIECE = 1 << 16
_PATIENCE = 1.0  # seconds until long work shows how far it is: on stderr, where that is a terminal


def fail(message: str) -> int:
    """Say what is wrong with the target or an option; returns the exit code."""
    say("error", message)
    return 2


def say(level: str, message: str) -> None:
    """Say something on stderr, in one line, whatever the message quotes; what lies below the
    working directory is named from there."""
    here = re.escape(os.path.join(os.getcwd(), ""))
    message = re.sub(rf"(?<![\w./-]){here}", "", message)
    print(f"{level}: {printable(message)}", file=sys.stderr)


class RefusedError(Exception):
    """What `subject` names has errors, which are in the `report`: a command can't go on."""

    def __init__(self, report: Report, subject: str) -> None:
        super().__init__(subject)
        self.report = report
        self.subject = subject


def refuse(refused: RefusedError) -> int:
    """Show why a schedule can't be used; returns the exit code."""
    page = page_for(sys.stderr, refused.subject)
    write(outputs_of("check")["full"].write(refused.report, page).blocks, sys.stderr)
    return 1


def tell(error: SchedirError) -> int:
    """Say what is wrong, in a file's text with the line and a caret under it; returns the exit
    code."""
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
        # Each character takes one column, tabs too, so that the caret stands under the right one.
        shown = "".join(c if c.isprintable() else " " for c in line.rstrip())
        print(f"    {shown}\n    {' ' * (column - start)}^", file=sys.stderr)
    return 2


def _excerpt(path: str, number: int, start: int) -> str | None:
    """What a line of a file holds from `start` on; None where there is nothing.

    It reads piece by piece, as a line may be all of a huge file.
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
    """Say what goes on for as long as it does; what it yields takes (done, total).

    What is shown is gone at the end, also where that is Ctrl-C.
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
    """A line that tells how far the work is; a thread of its own draws it."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._far: tuple[int, int] | None = None
        self._bar: Progress | None = None

    def advance(self, done: int, total: int) -> None:
        """So many of the total are done."""
        self._far = done, total
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=done, total=total, far=f"{done}/{total}")

    def start(self) -> None:
        """Begin to show it."""
        # Only here: most commands are done before rich is imported.
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
        """Take it off the screen."""
        if self._bar is not None:
            self._bar.stop()
