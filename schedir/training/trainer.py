"""The loop that everybody writes around a step, once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import length_hint
from os import PathLike
from typing import Any

import torch

from schedir.errors import ExecutionError
from schedir.ir import is_number
from schedir.runtime import Executor
from schedir.training.callbacks import AfterEpoch, Callback, callbacks_of, shown
from schedir.training.data.batches import Batches
from schedir.training.evaluation import MeanLoss, Metric, evaluate, measures, pairs
from schedir.training.history import Evaluation, History
from schedir.training.resuming import Kept


class Trainer:
    """Trains for some epochs. Every rank makes one, alike, and calls `fit`.

    `batches` is what an epoch iterates: pairs (inputs, target), on every rank, as `Batches` makes
    them. After each step `scheduler`, of `executor.optimizer`, is stepped, if there is one. After
    each epoch `evaluation`, pairs as well, gives a loss and the `metrics`: see `evaluate`. Both run
    under autocast to the type `autocast`, which may be torch.bfloat16. Then all is saved in the
    folder `checkpoint`, and the `callbacks` are called; what one raises ends the training.

    `fit` goes on from the checkpoint if there is one: after the last epoch that was whole, as if
    nothing had ended the training. For that, `batches` must know where it is, as `Batches` does.

    With `patience` it ends after so many epochs without a better evaluation loss than the best,
    on every rank after the same. Rank 0 prints a line per epoch, on a terminal with a bar, unless
    `progress` is False. `history` has the epochs so far.

    Raises ExecutionError where these do not go together.
    """

    def __init__(
        self,
        executor: Executor,
        batches: Iterable[tuple[Any, Any]],
        *,
        epochs: int,
        scheduler: Any = None,
        evaluation: Iterable[tuple[Any, Any]] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        checkpoint: str | PathLike[str] | None = None,
        patience: int | None = None,
        autocast: torch.dtype | None = None,
        callbacks: Sequence[Callback | AfterEpoch] = (),
        progress: bool = True,
    ) -> None:
        for name, number in ("epochs", epochs), ("patience", 1 if patience is None else patience):
            if not (is_number(number) and number):
                raise ExecutionError(f"{name} must be an int of at least 1, not {number!r}")
        for name, given in {"metrics": metrics, "patience": patience}.items():
            if given and evaluation is None:
                raise ExecutionError(f"{name} needs an evaluation set: give evaluation= as well")
        held_out = () if evaluation is None else evaluation
        for name, data in {"batches": batches, "evaluation": held_out}.items():
            if not isinstance(data, Iterable):
                raise ExecutionError(
                    f"{name} must be an iterable of pairs (inputs, target), not "
                    f"{type(data).__name__}"
                )
            if isinstance(data, Batches) and data.endless:
                raise ExecutionError(f"{name} never ends, so no epoch does: leave out repeat=True")
        if autocast not in (None, torch.bfloat16):
            raise ExecutionError(f"autocast must be torch.bfloat16 or None, not {autocast}")
        self.executor, self.batches, self.epochs = executor, batches, epochs
        if scheduler is not None and not callable(getattr(scheduler, "step", None)):
            raise ExecutionError(f"scheduler must have step(), unlike {type(scheduler).__name__}")
        self.scheduler, self.evaluation, self.metrics = scheduler, evaluation, measures(metrics)
        self.patience, self.autocast, self.progress = patience, autocast, progress
        self.callbacks = callbacks_of(callbacks)
        self.optimizer = executor.optimizer  # refused at once where there is none
        self.history = History()
        self._kept = Kept(checkpoint, executor, scheduler, batches, evaluation)

    def fit(self) -> History:
        """Train until the last epoch, or until patience ends, and return all epochs."""
        if not self.history:
            self.history = self._kept.resume()
        steps = length_hint(self.batches) or None
        with shown(self.epochs, steps, len(self.history), self.progress) as progress:
            callbacks = [*progress, *self.callbacks]
            while len(self.history) < self.epochs and not self.is_stale:
                loss, rate = MeanLoss(), 0.0
                for inputs, target in pairs(self.batches, "training"):
                    rate = self.optimizer.param_groups[0]["lr"]
                    with self._precision():
                        result = self.executor.step(inputs, target=target)
                    loss.add(result)
                    if self.scheduler is not None:
                        self.scheduler.step()
                    for callback in callbacks:
                        callback.after_step(result)
                self.history = self.history.then(loss.mean, rate, self.evaluate())
                self._kept.save(self.history)
                for callback in callbacks:
                    callback.after_epoch(self.history)
        return self.history

    @property
    def is_stale(self) -> bool:
        """Whether patience has ended."""
        return self.patience is not None and self.history.stale >= self.patience

    def evaluate(self) -> Evaluation | None:
        """The evaluation set's loss and metrics at the present weights, if there is one."""
        if self.evaluation is None:
            return None
        with self._precision():
            return evaluate(self.executor, self.evaluation, self.metrics)

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.executor.device.type, self.autocast)
