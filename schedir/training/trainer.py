"""The loop that everybody writes around a step, once, for epochs and for steps."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from operator import length_hint
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from schedir.errors import ExecutionError
from schedir.ir import is_number
from schedir.runtime import Executor, StepResult
from schedir.training.callbacks import AfterRecord, Callback, callbacks_of, shown
from schedir.training.checkpoint.checkpoint import Checkpoint, Stateful
from schedir.training.checkpoint.run_folder import RunFolder
from schedir.training.data import Batches
from schedir.training.evaluation import Metric, evaluate, measures, pairs
from schedir.training.history import Evaluation, History, Mode
from schedir.training.progress import Progress
from schedir.training.schedulers import takes_metric

_PROGRESS = "progress"


class Trainer:
    """Trains for some epochs or steps. Every rank makes one, alike, and calls `fit`.

    `batches` is what an epoch iterates: pairs (inputs, target), on every rank, as `Batches` makes
    them. Training ends after `epochs` or `max_steps`, whichever comes first; where the batches
    never end, steps alone are counted. At each epoch's end, or with `eval_every` after every so
    many steps, and at the end of all, the `history` gets an entry: the mean loss since the one
    before and, of `evaluation`, pairs as well, a loss and the `metrics`: see `evaluate`. Training
    and evaluation run under autocast to the type `autocast`, which may be torch.bfloat16, or
    torch.float16 where the executor has a `scaler`: the Trainer uses that, and refuses another.

    What says how good an entry is, is its evaluation loss, or the metric that `best` names; with
    `best_mode="max"` more is better. With `patience` the training ends after so many entries
    without a better one than the best, on every rank after the same.

    `scheduler`, of `executor.optimizer`, is stepped after each step, or as `scheduler_by` says
    after each "epoch", or after each "evaluation", which is an entry of the history. One whose step
    takes a metric, as ReduceLROnPlateau's, goes by what says how good an entry is.

    What is not finite ends the training, before anything more is saved. Where the executor
    skips it (`nonfinite="skip"`), callbacks see `result.skipped`, the scheduler steps all the same,
    and an entry's loss leaves out calls whose own is not finite.

    All is saved in the folder `checkpoint`, after the `callbacks`, even if one of them raises,
    which ends the training: with `save_every` every so many steps and at the end, in `step-N`; else
    at each epoch's end, in `epoch-N`, and where no `epochs` are counted at each entry. The last
    `keep` of them are kept and, with `best` ("loss" for the evaluation loss, or a metric), that of
    the best entry, in `best`, whatever its age; `Checkpoint(executor).load("run/best")` takes it.

    `fit` goes on from the last one, as if nothing had ended the training, or says on the log that
    it is damaged and goes on from the one before. For that, `batches` must know where it is, as
    `Batches` does. Saved are the executor, the scheduler, the data and the history, and whatever
    else steps with the training, by a name, in `others`: all that has `state_dict` and
    `load_state_dict`, such as a scheduler that a callback steps, or averaged weights.

    With `segment`, an epoch is a stream whose pipeline stays full, in segments of so many
    microbatches: see `Executor.run`. That trains otherwise than a step for each batch would, so a
    training that goes on from a checkpoint must have the same. What is due every so many steps
    waits for the end of a segment, so that it changes nothing; `max_steps` cuts the last one short.

    Rank 0 prints a line per entry and, with `log_every`, a log every so many steps: the mean loss
    since the last log, the learning rate, how much was trained in a second, and what callbacks add;
    see `Callback.after_log`. A second is one of training alone, and what is counted in it is what
    the executor's `count` counts, of which `unit` is the name. On a terminal there is a bar, with
    the log beside it. All that `progress=False` leaves out.

    Raises ExecutionError where these do not go together.
    """

    def __init__(
        self,
        executor: Executor,
        batches: Iterable[tuple[Any, Any]],
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        eval_every: int | None = None,
        save_every: int | None = None,
        log_every: int | None = None,
        scheduler: Any = None,
        scheduler_by: Literal["step", "epoch", "evaluation"] = "step",
        evaluation: Iterable[tuple[Any, Any]] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        best: str | None = None,
        best_mode: Mode = "min",
        patience: int | None = None,
        checkpoint: str | PathLike[str] | None = None,
        keep: int = 2,
        others: Mapping[str, Stateful] | None = None,
        segment: int | None = None,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        unit: str = "samples",
        callbacks: Sequence[Callback | AfterRecord] = (),
        progress: bool = True,
    ) -> None:
        numbers = {
            "keep": keep,
            "epochs": epochs,
            "max_steps": max_steps,
            "eval_every": eval_every,
            "save_every": save_every,
            "log_every": log_every,
            "patience": patience,
            "segment": segment,
        }
        for name, number in numbers.items():
            if (name == "keep" or number is not None) and not (is_number(number) and number):
                raise ExecutionError(f"{name} must be an int of at least 1, not {number!r}")
        if epochs is None and max_steps is None:
            raise ExecutionError("nothing says when the training ends: give epochs= or max_steps=")
        for name, given in {"metrics": metrics, "patience": patience, "best": best}.items():
            if given and evaluation is None:
                raise ExecutionError(f"{name} needs an evaluation set: give evaluation= as well")
        held_out = () if evaluation is None else evaluation
        by_epochs = epochs or scheduler_by == "epoch" or (evaluation is not None and not eval_every)
        for name, pairs_given in {"batches": batches, "evaluation": held_out}.items():
            if not isinstance(pairs_given, Iterable):
                raise ExecutionError(
                    f"{name} must be an iterable of pairs (inputs, target), not "
                    f"{type(pairs_given).__name__}"
                )
            is_endless = isinstance(pairs_given, Batches) and pairs_given.endless
            if is_endless and (by_epochs or name == "evaluation"):
                raise ExecutionError(
                    f"{name} never ends, so no epoch does: leave out repeat=True, or for batches "
                    'count steps, by max_steps, eval_every and scheduler_by="step" or "evaluation"'
                )
        if scaler is not None and scaler is not executor.scaler:
            raise ExecutionError("scaler must be the executor's: Executor(…, scaler=scaler)")
        half = () if executor.scaler is None else (torch.float16,)
        if autocast not in (None, torch.bfloat16, *half):
            raise ExecutionError(
                "autocast must be torch.bfloat16 or None, or torch.float16 with Executor(…, "
                f"scaler=…), not {autocast}"
            )
        self.executor, self.batches = executor, batches
        self.epochs, self.max_steps = epochs, max_steps
        self.eval_every, self.save_every, self.log_every = eval_every, save_every, log_every
        self.evaluation, self.metrics = evaluation, measures(metrics)
        if best not in (None, "loss", *self.metrics):
            raise ExecutionError(f'best must be "loss" or the name of a metric, not {best!r}')
        if best_mode not in ("min", "max"):
            raise ExecutionError(f'best_mode must be "min" or "max", not {best_mode!r}')
        if scheduler_by not in ("step", "epoch", "evaluation"):
            raise ExecutionError(
                f'scheduler_by must be "step", "epoch" or "evaluation", not {scheduler_by!r}'
            )
        self._by_metric = scheduler is not None and takes_metric(scheduler)
        evaluated = scheduler_by == "evaluation" or (scheduler_by == "epoch" and not eval_every)
        if self._by_metric and (evaluation is None or not evaluated):
            raise ExecutionError(
                f"a {type(scheduler).__name__} goes by the evaluation loss or a metric: give "
                'evaluation= and scheduler_by="evaluation"'
            )
        self.scheduler, self.scheduler_by = scheduler, scheduler_by
        self.best, self.patience = best, patience
        self.autocast, self.segment, self.unit, self.progress = autocast, segment, unit, progress
        self.callbacks = callbacks_of(callbacks)
        self.optimizer = executor.optimizer  # refused at once where there is none
        self._length = length_hint(batches)
        self._progress = Progress(
            History((), best or "loss", best_mode), executor.nonfinite == "skip", segment
        )
        self._folder: RunFolder | None = None
        if checkpoint is None:
            return
        if not hasattr(batches, "state_dict"):
            raise ExecutionError(
                f"a {type(batches).__name__} does not know where it is, so nothing can go on from "
                "a checkpoint: give Batches(…) of it"
            )
        if others and _PROGRESS in others:
            raise ExecutionError(f"others: {_PROGRESS!r} is the Trainer's own; give another name")
        data: Any = batches
        if hasattr(evaluation, "state_dict"):  # it may be shuffled, and floats add up in order
            data = _Data(data, evaluation)
        others = {_PROGRESS: self._progress, **(others or {})}
        saves = Checkpoint(executor, scheduler=scheduler, batches=data, others=others)
        self._folder = RunFolder(Path(checkpoint), saves, keep, executor)

    def fit(self) -> History:
        """Train to the end, or until patience ends, and return the history."""
        now = self._progress
        if now.step:
            now.begin_epoch()
        elif self._folder is not None:
            self._folder.resume()
        if self._is_over():
            return self.history
        ends = (self.epochs or 0) * self._length, self.max_steps
        total = min(filter(None, ends), default=None)
        self._called = [*shown(total, self.progress), *self.callbacks]
        for callback in self._called:
            callback.before_training(now.step)
        try:
            while not self._is_over():
                self._train()
        finally:
            for callback in self._called:
                callback.after_training(self.history)
        return self.history

    @property
    def history(self) -> History:
        """The entries so far."""
        return self._progress.history

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

    def _is_over(self) -> bool:
        now, ever = self._progress, math.inf
        ends = now.epoch >= (self.epochs or ever) or now.step >= (self.max_steps or ever)
        return ends or self.is_stale

    def _train(self) -> None:
        """Train for an epoch, or the rest of one, or to the last step."""
        now, size = self._progress, self.executor.schedule.microbatches
        source = pairs(self.batches, "training", now.in_epoch)
        batches = islice(source, self.max_steps and self.max_steps - now.step)
        together = (self.segment or size) // size  # steps
        often = self.log_every, self.eval_every, self.save_every
        ended = False
        while not (ended or self.is_stale):
            before, began, result = now.step, perf_counter(), None
            results = self._results(batches)
            for result in results:
                self._count(result)
                # Where an epoch is known to end all that is due is done with that, once.
                if (now.step - before) % together or now.in_epoch == self._length:
                    continue
                if any(self._is_due(every, before) for every in often):
                    break
            else:
                ended = True
            results.close()
            is_epoch = ended and (now.step != self.max_steps or now.in_epoch == self._length)
            if is_epoch:
                next(source, None)  # nothing; but the batches learn that their epoch is over
            self._arrive(before, began, result, is_epoch)

    def _results(self, batches: Iterable[Any]) -> Generator[StepResult, None, None]:
        """Train on batches; gives the result of each, outside of autocast."""
        if self.segment is None:
            for inputs, target in batches:
                with self._precision():
                    result = self.executor.step(inputs, target=target)
                yield result
            return
        stream = self.executor.run(batches, segment=self.segment)
        while True:
            with self._precision():
                following = next(stream, None)
            if following is None:
                return
            yield following

    def _count(self, result: StepResult) -> None:
        now = self._progress
        now.step, now.in_epoch = now.step + 1, now.in_epoch + 1
        now.lr = self.optimizer.param_groups[0]["lr"]
        now.loss.add(result)
        now.logged.add(result)
        self._step_scheduler("step")
        for callback in self._called:
            callback.after_step(result)

    def _is_due(self, every: int | None, before: int) -> bool:
        """Whether what is due every so many steps is, since there were as many as `before`."""
        return every is not None and self._progress.step // every > before // every

    def _arrive(self, before: int, began: float, result: StepResult | None, is_epoch: bool) -> None:
        """Log, evaluate, call back and save what is due, after the steps since `before`.

        They began at a time, and the last one has a `result`.
        """
        now = self._progress
        figures = {}
        loss = now.logged.mean  # which waits for the last step
        now.seconds += perf_counter() - began
        if result is not None and self._is_due(self.log_every, before):
            figures = {"loss": loss, "lr": now.lr, **self._rates(result)}
            now.begin_log()
        if is_epoch:
            now.epoch, now.in_epoch = now.epoch + 1, 0
        enters = self._is_due(self.eval_every, before) if self.eval_every else is_epoch
        if self._is_over() and (not self.history or self.history[-1].step != now.step):
            enters = True
        if enters:
            now.record(now.epoch if is_epoch else None, self.evaluate())
            self._step_scheduler("evaluation")
        if is_epoch:
            self._step_scheduler("epoch")
        saves = True  # with what callbacks have changed, and whatever they raise
        try:
            for callback in self._called:
                if figures:
                    callback.after_log(now.step, figures)
                if enters:
                    callback.after_record(self.history)
                if is_epoch:
                    callback.after_epoch(self.history)
            saves = enters if self.epochs is None else is_epoch
            if self.save_every:
                saves = self._is_due(self.save_every, before)
            saves = saves or self._is_over()
        finally:
            if self._folder is not None:
                if enters and self.best and self.history.best is self.history[-1]:
                    self._folder.save_best()
                if saves:
                    by_epoch = is_epoch and not self.save_every
                    name = f"epoch-{now.epoch}" if by_epoch else f"step-{now.step}"
                    self._folder.save(name, now.step)

    def _rates(self, result: StepResult) -> dict[str, float]:
        """How much was trained in a second since the last log, the bubble of the last step, and
        what callbacks add."""
        _, samples = self._progress.logged.totals
        found = {f"{self.unit}_per_second": samples / self._progress.seconds}
        times = self.executor.gather((result.busy, result.elapsed))
        busy, elapsed = map(sum, zip(*times, strict=True))
        if len(times) > 1 and not math.isnan(busy):
            found["bubble"] = 1 - busy / elapsed
        for callback in self._called:
            found |= callback.figures()
        return found

    def _step_scheduler(self, after: str) -> None:
        """Step it if it is stepped by what has just been."""
        if self.scheduler is not None and after == self.scheduler_by:
            last = self.history[-1:]
            measured = [one.measured(last.measure) for one in last if self._by_metric]
            self.scheduler.step(*measured)

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.executor.device.type, self.autocast)


class _Data:
    """Gives the state of batches with that of an evaluation set in it."""

    def __init__(self, batches: Stateful, evaluation: Any) -> None:
        self._batches, self._evaluation = batches, evaluation

    def state_dict(self) -> dict[str, Any]:
        return {**self._batches.state_dict(), "evaluation": self._evaluation.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = dict(state)
        if "evaluation" in own:
            self._evaluation.load_state_dict(own.pop("evaluation"))
        self._batches.load_state_dict(own)
