"""Callbacks of a training: the user's, and the one by which the first process shows progress.

before_training ─▶ after_step … after_step ─▶ figures, after_log        every `log_every` steps
                                          └─▶ after_record              an entry of the history
                                          └─▶ after_epoch ─▶ …          an epoch's end
… ─▶ after_training                                                     whatever has ended it
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schedir.errors import ExecutionError
from schedir.runtime import StepResult
from schedir.training.history import History


class Callback:
    """Called in a training, on every rank; one overrides what it needs.

    But for `after_step`, they may call the executor: the pipeline is drained. What is due is saved
    after all callbacks, with what they have changed of `others`.
    """

    def before_training(self, step: int) -> None:
        """The training begins, or goes on, after so many steps."""

    def after_step(self, result: StepResult) -> None:
        """A step has been made, and the scheduler's. To read `result.loss` waits for it."""

    def figures(self) -> Mapping[str, float]:
        """What else to log, by name: asked for before every log."""
        return {}

    def after_log(self, step: int, figures: Mapping[str, float]) -> None:
        """`log_every` steps were made since the last log. The `figures` are their mean "loss", the
        last one's "lr", "samples_per_second" or another unit, over several processes the last
        step's "bubble", and those of all callbacks."""

    def after_record(self, history: History) -> None:
        """The history has a new entry, `history[-1]`: an epoch's end, or every `eval_every` steps,
        and the end of all. It has been evaluated."""

    def after_epoch(self, history: History) -> None:
        """An epoch is over, and entered as `history[-1]` unless `eval_every` says when to."""

    def after_training(self, history: History) -> None:
        """The training has ended, whatever it was that ended it."""


class Logger(Callback):
    """A callback of the first process alone, whose `after_log` is told of each entry of the history
    as well: "record/loss", "record/lr", "evaluation/loss", and "evaluation/" with a metric's name.
    """

    def after_record(self, history: History) -> None:
        """Log the new entry."""
        entry = history[-1]
        figures = {"record/loss": entry.loss, "record/lr": entry.lr}
        if entry.evaluation_loss is not None:
            found = {"loss": entry.evaluation_loss, **entry.metrics}
            figures |= {f"evaluation/{name}": value for name, value in found.items()}
        self.after_log(entry.step, figures)


AfterRecord: TypeAlias = Callable[[History], object]
"""A function in place of a Callback: what is called after each new entry of the history."""


class _Function(Callback):
    def __init__(self, function: AfterRecord) -> None:
        self._function = function

    def after_record(self, history: History) -> None:
        self._function(history)


def callbacks_of(given: object) -> list[Callback]:
    """Make callbacks of what was given, without those of another process.

    Raises ExecutionError for what is none.
    """
    if not isinstance(given, (list, tuple)):
        raise ExecutionError(f"callbacks must be a list, not {type(given).__name__}")
    for one in given:
        if not (isinstance(one, Callback) or (callable(one) and not isinstance(one, type))):
            raise ExecutionError(
                "a callback is a Callback or a function of the history, not "
                + (f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__)
            )
    own = (one for one in given if _is_first() or not isinstance(one, Logger))
    return [one if isinstance(one, Callback) else _Function(one) for one in own]


def _is_first() -> bool:
    return not (dist.is_initialized() and dist.get_rank())


class _Shown(Callback):
    """Prints a line for each log and each entry of the history; on a terminal it shows a bar of the
    steps, of which there are `total` if that is known, and the log beside it."""

    def __init__(self, total: int | None) -> None:
        # Wherever stdout is at present, and in any locale.
        self._console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def before_training(self, step: int) -> None:
        if step:
            self._console.print(f"goes on after step {step}")
        self._bar.update(self._task, completed=step)
        self._bar.start()

    def after_step(self, result: StepResult) -> None:
        self._bar.advance(self._task)

    def after_log(self, step: int, figures: Mapping[str, float]) -> None:
        line = "  ".join(f"{name} {_short(value)}" for name, value in figures.items())
        if self._console.is_terminal:
            self._bar.update(self._task, description=line)
        else:
            self._console.print(f"step {step}  {line}")

    def after_record(self, history: History) -> None:
        line = str(history[-1])
        if history.best and history.stale:
            line += f"  {history.stale} after the best"
        self._console.print(line)

    def after_training(self, history: History) -> None:
        self._bar.stop()


def shown(total: int | None, wanted: bool) -> list[Callback]:
    """What shows a training of so many steps, if that is known, on the first process and where
    `wanted`."""
    return [_Shown(total)] if wanted and _is_first() else []


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
