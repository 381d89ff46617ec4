"""Long work shows how far it is: on stderr, where that is a terminal, once it takes a second."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from schedir.cli.terminal import has_colour, is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE = 1.0  # seconds


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
