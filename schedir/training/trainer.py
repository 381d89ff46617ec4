"""The loop that everybody writes around a step, once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import length_hint
from os import PathLike
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from schedir.errors import ExecutionError
from schedir.ir import is_number
from schedir.runtime import Executor
from schedir.training.callbacks import AfterEpoch, Callback, callbacks_of, shown
from schedir.training.checkpoints.subject import Stateful
from schedir.training.data import Batches
from schedir.training.evaluation import MeanLoss, Metric, evaluate, measures, pairs
from schedir.training.history import Evaluation, History
from schedir.training.resuming import Kept


class Trainer:
    """Trains for some epochs. Every rank makes one, alike, and calls `fit`.

    `batches` is what an epoch iterates: pairs (inputs, target), on every rank, as `Batches` makes
    them. `scheduler`, of `executor.optimizer`, is stepped after each step, or with
    `scheduler_by="epoch"` after each epoch's evaluation, by whose loss a ReduceLROnPlateau goes.
    After each epoch `evaluation`, pairs as well, gives a loss and the `metrics`: see `evaluate`.
    Both run under autocast to the type `autocast`, which may be torch.bfloat16. Then the
    `callbacks` are called, and all is saved in the folder `checkpoint`, even if one of them raises,
    which ends the training.

    What is not finite ends the training, before anything of that epoch is saved. Where the executor
    skips it (`nonfinite="skip"`), callbacks see `result.skipped`, the scheduler steps all the same,
    and an epoch's loss leaves out calls whose own is not finite.

    The folder has a checkpoint, `epoch-N`, for each of the last `keep` epochs. `fit` goes on from
    the last one, as if nothing had ended the training, or says on the log that it is damaged and
    goes on from the one before. For that, `batches` must know where it is, as `Batches` does.
    Saved are the executor, the scheduler, the data and the history, and whatever else steps with
    the training, by a name, in `others`: all that has `state_dict` and `load_state_dict`, such as
    a scheduler that a callback steps, or averaged weights.

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
        scheduler_by: Literal["step", "epoch"] = "step",
        evaluation: Iterable[tuple[Any, Any]] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        checkpoint: str | PathLike[str] | None = None,
        keep: int = 2,
        others: Mapping[str, Stateful] | None = None,
        patience: int | None = None,
        autocast: torch.dtype | None = None,
        callbacks: Sequence[Callback | AfterEpoch] = (),
        progress: bool = True,
    ) -> None:
        counts = {"epochs": epochs, "keep": keep, "patience": 1 if patience is None else patience}
        for name, number in counts.items():
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
        if scheduler_by not in ("step", "epoch"):
            raise ExecutionError(f'scheduler_by must be "step" or "epoch", not {scheduler_by!r}')
        by_loss = scheduler_by == "epoch" and evaluation is not None
        if isinstance(scheduler, ReduceLROnPlateau) and not by_loss:
            raise ExecutionError(
                "a ReduceLROnPlateau goes by the evaluation loss: give evaluation= and "
                'scheduler_by="epoch"'
            )
        self.scheduler, self.scheduler_by = scheduler, scheduler_by
        self.evaluation, self.metrics = evaluation, measures(metrics)
        self.patience, self.autocast, self.progress = patience, autocast, progress
        self.callbacks = callbacks_of(callbacks)
        self.optimizer = executor.optimizer  # refused at once where there is none
        self.history = History()
        kept = scheduler, batches, evaluation, others or {}
        self._kept = Kept(checkpoint, keep, executor, *kept)

    def fit(self) -> History:
        """Train until the last epoch, or until patience ends, and return all epochs."""
        if not self.history:
            self.history = self._kept.resume()
        steps = length_hint(self.batches) or None
        with shown(self.epochs, steps, len(self.history), self.progress) as progress:
            callbacks = [*progress, *self.callbacks]
            while len(self.history) < self.epochs and not self.is_stale:
                loss, rate = MeanLoss(skips=self.executor.nonfinite == "skip"), 0.0
                for inputs, target in pairs(self.batches, "training"):
                    rate = self.optimizer.param_groups[0]["lr"]
                    with self._precision():
                        result = self.executor.step(inputs, target=target)
                    loss.add(result)
                    if self.scheduler is not None and self.scheduler_by == "step":
                        self.scheduler.step()
                    for callback in callbacks:
                        callback.after_step(result)
                found = self.evaluate()
                self.history = self.history.then(loss.mean, rate, found)
                if self.scheduler_by == "epoch":
                    self._step_by_epoch(found)
                try:
                    for callback in callbacks:
                        callback.after_epoch(self.history)
                finally:  # with what they have changed, and whatever they raise
                    self._kept.save(self.history)
        return self.history

    def _step_by_epoch(self, found: Evaluation | None) -> None:
        if found is not None and isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(found.loss)
        elif self.scheduler is not None:
            self.scheduler.step()

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
