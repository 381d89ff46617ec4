"""Callbacks of a training: methods that a Trainer calls on every rank.

before_training ─▶ after_step … after_step ─▶ figures, after_log        every `log_every` steps
                                          └─▶ after_record              an entry of the history
                                          └─▶ after_epoch ─▶ …          an epoch's end
… ─▶ after_training                                                     also after an error
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist

from schedir.errors import ExecutionError
from schedir.runtime import Executor, StepResult
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
        """The training has ended, also by an error. The last callback ends first."""


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


class Monitor(Callback):
    """Adds "peak_memory_gib" to the figures of every log: the largest peak of all processes.

    >>> from torch import nn
    >>> from schedir import build
    >>> from schedir.runtime import Executor
    >>> from schedir.training import Monitor
    >>> schedule = build("1f1b", ranks=1, microbatches=1)
    >>> executor = Executor(schedule, {0: nn.Linear(4, 1)}, nn.MSELoss())
    >>> [*Monitor(executor).figures()]
    ['peak_memory_gib']

    On a GPU a peak counts the tensors there; on the CPU it is the memory of the process. The
    processes exchange their peaks at every log.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def figures(self) -> Mapping[str, float]:
        """The largest peak of all processes so far, in GiB."""
        device = self._executor.device
        if device.type == "cpu":
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        else:
            peak = torch.get_device_module(device).max_memory_allocated(device)
        return {"peak_memory_gib": max(self._executor.gather(peak)) / 2**30}


AfterRecord: TypeAlias = Callable[[History], object]
"""A function in place of a Callback, called after each new entry of the history."""


def callbacks_of(given: object) -> list[Callback]:
    """Make callbacks from the Trainer's argument; loggers stay on the first process only.

    Raises ExecutionError for an object that is no callback.
    """
    if not isinstance(given, (list, tuple)):
        raise ExecutionError(f"callbacks must be a list, not {type(given).__name__}")
    found = []
    for one in given:
        if isinstance(one, type) or not (isinstance(one, Callback) or callable(one)):
            raise ExecutionError(
                "a callback is a Callback or a function of the history, not "
                + (f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__)
            )
        callback = one if isinstance(one, Callback) else Callback()
        if callback is not one:
            vars(callback)["after_record"] = one
        if is_first() or not isinstance(one, Logger):
            found.append(callback)
    return found


def is_first() -> bool:
    """Whether this is the first process."""
    return not (dist.is_initialized() and dist.get_rank())
