"""Callbacks of a training: the user's, and the one that shows progress on the first process.

before_training ─▶ after_step … after_step ─▶ figures, after_log        every `log_every` steps
                                          └─▶ after_record              an entry of the history
                                          └─▶ after_epoch ─▶ …          an epoch's end
… ─▶ after_training                                                     also after an error
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schedir.display import rounded
from schedir.errors import ExecutionError
from schedir.runtime import StepResult
from schedir.training.history import History


class Callback:
    """A Trainer calls its methods on every rank; override the ones that you need.

    >>> from schedir.training import Callback, History, Record
    >>> class Best(Callback):
    ...     def after_record(self, history):
    ...         print("best so far:", history.best.epoch)
    >>> first = Record(epoch=1, step=100, loss=0.9, lr=0.1, evaluation_loss=0.8)
    >>> Best().after_record(History((first,)))
    best so far: 1

    All methods except `after_step` may call the executor: the pipeline is drained then. If a
    checkpoint is due, it is saved after all callbacks, with the changes that they make to `others`.
    """

    def before_training(self, step: int) -> None:
        """The training begins; `step` is the number of steps made so far, 0 for a new training."""

    def after_step(self, result: StepResult) -> None:
        """A step was made, and the scheduler was stepped. Reading `result.loss` waits for it."""

    def figures(self) -> Mapping[str, float]:
        """Return more figures to log, by name. The Trainer asks before every log."""
        return {}

    def after_log(self, step: int, figures: Mapping[str, float]) -> None:
        """`log_every` steps were made since the last log.

        The `figures` are the mean "loss" of these steps, the last step's "lr",
        "samples_per_second" (or the Trainer's `unit`), over several processes the last step's
        "bubble", the figures of all callbacks, and with `async_save` "copy_seconds" and "copy_gib".
        """

    def after_record(self, history: History) -> None:
        """The history has a new entry, `history[-1]`, with its evaluation.

        It comes at each epoch's end, or every `eval_every` steps, and at the end of the training.
        """

    def after_epoch(self, history: History) -> None:
        """An epoch is over. Its entry is `history[-1]`, unless `eval_every` is set."""

    def after_training(self, history: History) -> None:
        """The training has ended, also by an error."""


class Logger(Callback):
    """A callback on the first process only, whose `after_log` gets the history's entries too.

    >>> from schedir.training import History, Logger, Record
    >>> class Printed(Logger):
    ...     def after_log(self, step, figures):
    ...         print(step, figures)
    >>> Printed().after_record(History((Record(epoch=1, step=100, loss=0.9, lr=0.1),)))
    100 {'record/loss': 0.9, 'record/lr': 0.1}

    The names for an entry are "record/loss", "record/lr", "evaluation/loss", and "evaluation/"
    with a metric's name.
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
"""A function in place of a Callback, called after each new entry of the history."""


class _Function(Callback):
    def __init__(self, function: AfterRecord) -> None:
        self._function = function

    def after_record(self, history: History) -> None:
        self._function(history)


def callbacks_of(given: object) -> list[Callback]:
    """Make callbacks from the Trainer's argument; loggers stay on the first process only.

    Raises ExecutionError for an object that is no callback.
    """
    if not isinstance(given, (list, tuple)):
        raise ExecutionError(f"callbacks must be a list, not {type(given).__name__}")
    for one in given:
        if not (isinstance(one, Callback) or (callable(one) and not isinstance(one, type))):
            raise ExecutionError(
                "a callback is a Callback or a function of the history, not "
                + (f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__)
            )
    own = (one for one in given if is_first() or not isinstance(one, Logger))
    return [one if isinstance(one, Callback) else _Function(one) for one in own]


def is_first() -> bool:
    """Whether this is the first process."""
    return not (dist.is_initialized() and dist.get_rank())


class _Shown(Callback):
    """Prints a line for each log and each entry of the history.

    On a terminal it shows a bar of the steps, of `total` if that is known, and the log beside it.
    """

    def __init__(self, total: int | None) -> None:
        # The stdout of this moment, in any locale.
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
            self._console.print(f"resumes after step {step}")
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
    """The callback that shows progress, on the first process and if `wanted`.

    `total` is the number of steps, None if unknown.
    """
    return [_Shown(total)] if wanted and is_first() else []


def _short(value: float) -> str:
    return rounded(value, 4) if abs(value) < 9999.5 else f"{value:,.0f}"
