"""Callbacks of a training: the user's, and the one by which rank 0 shows its progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schedir.errors import ExecutionError
from schedir.runtime import StepResult
from schedir.training.history import History


class Callback:
    """Called after each step and each epoch, on every rank; one overrides what it needs."""

    def after_step(self, result: StepResult) -> None:
        """A step has been made, and the scheduler's. To read `result.loss` waits for it."""

    def after_epoch(self, history: History) -> None:
        """An epoch is over, `history[-1]`, and has been evaluated. The checkpoint is saved after
        all callbacks, with what they have changed of `others`."""


AfterEpoch: TypeAlias = Callable[[History], object]
"""A function in place of a Callback: what is called after each epoch."""


class _Function(Callback):
    def __init__(self, function: AfterEpoch) -> None:
        self._function = function

    def after_epoch(self, history: History) -> None:
        self._function(history)


def callbacks_of(given: object) -> list[Callback]:
    """Make callbacks of what was given. Raises ExecutionError for what is none."""
    if not isinstance(given, (list, tuple)):
        raise ExecutionError(f"callbacks must be a list, not {type(given).__name__}")
    for one in given:
        if not (isinstance(one, Callback) or (callable(one) and not isinstance(one, type))):
            raise ExecutionError(
                "a callback is a Callback or a function of the history, not "
                + (f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__)
            )
    return [one if isinstance(one, Callback) else _Function(one) for one in given]


class _Shown(Callback):
    """Shows a bar for the steps of an epoch, on a terminal alone, and prints a line per epoch."""

    def __init__(self, epochs: int, steps: int | None, done: int) -> None:
        # Wherever stdout is at present, and in any locale.
        self._console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
        shown = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self.bar = Progress(
            *shown,
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._epochs = epochs
        if done:
            self._console.print(f"goes on after epoch {done} of {epochs}")
        self._task = self.bar.add_task(self._named(done), total=steps)

    def after_step(self, result: StepResult) -> None:
        self.bar.advance(self._task)

    def after_epoch(self, history: History) -> None:
        line = str(history[-1])
        if history.best is not None and history.stale:
            line += f"  {history.stale} after the best"
        self._console.print(line)
        self.bar.reset(self._task, description=self._named(len(history)))

    def _named(self, done: int) -> str:
        return f"epoch {min(done + 1, self._epochs)} of {self._epochs}"


@contextmanager
def shown(
    epochs: int, steps: int | None, done: int, wanted: bool
) -> Iterator[tuple[Callback, ...]]:
    """Give a callback that shows a training's progress, on the first process and where `wanted`.

    Of so many epochs `done` are over; each has so many steps, if that is known.
    """
    if not wanted or (dist.is_initialized() and dist.get_rank()):
        yield ()
        return
    found = _Shown(epochs, steps, done)
    with found.bar:
        yield (found,)
