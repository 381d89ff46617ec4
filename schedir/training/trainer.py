"""The training loop around a step, by epochs or by steps: log, evaluate, save, resume."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass
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
from schedir.training.callbacks import AfterRecord, Callback, callbacks_of, is_first
from schedir.training.checkpoint.checkpoint import Checkpoint, Stateful
from schedir.training.checkpoint.run_folder import RunFolder
from schedir.training.evaluation import Metric, evaluate, measures, pairs
from schedir.training.history import Evaluation, History, Mode, Standing
from schedir.training.loggers import ProgressBar
from schedir.training.schedulers import takes_metric

logger = logging.getLogger("schedir")

_PROGRESS = "progress"  # the name of what a checkpoint has of the Trainer
_NUMBERS = (
    *("epochs", "max_steps", "eval_every", "save_every", "log_every"),
    *("patience", "segment"),
)


@dataclass(eq=False, repr=False)
class Trainer:
    """Trains for some epochs or steps. Every rank makes one with the same arguments.

    >>> import torch
    >>> from torch import nn
    >>> from schedir import build
    >>> from schedir.runtime import Executor
    >>> from schedir.training import Batches, Trainer
    >>> schedule = build("1f1b", ranks=2, microbatches=2)
    >>> stages = {0: nn.Linear(4, 4), 1: nn.Linear(4, 1)}
    >>> adam = lambda parameters: torch.optim.Adam(parameters, lr=0.01)
    >>> executor = Executor(schedule, stages, nn.MSELoss(), adam, in_process=True)
    >>> batches = Batches([(torch.ones(6, 4), torch.zeros(6, 1))] * 5)
    >>> history = Trainer(executor, batches, epochs=2, progress=False).fit()
    >>> [(entry.epoch, entry.step) for entry in history]
    [(1, 5), (2, 10)]

    **How long.** `batches` yields the pairs (inputs, target) of an epoch, on every rank; see
    `Batches`. The training ends after `epochs` or `max_steps`, whichever comes first. If the
    batches never end, pass `max_steps` only.

    **History.** The `history` gets an entry at each epoch's end, or with `eval_every` every that
    many steps, and at the end of the training: the mean loss since the entry before and, if
    there is an `evaluation` set (pairs too), its loss and `metrics`; see `evaluate`. An entry is
    judged by its evaluation loss, or by the metric that `best` names; with `best_mode="max"` a
    higher value is better. With `patience` the training ends after that many entries without a new
    best one, on every rank after the same entry.

    **Precision.** Training and evaluation run under autocast to `autocast`: torch.bfloat16, or
    torch.float16 if the executor has a `scaler`. The Trainer uses the executor's scaler, and
    refuses another one.

    **Learning rate.** `scheduler` works on `executor.optimizer`. It is stepped after each step, or
    by `scheduler_by` after each "epoch" or each "evaluation" (an entry of the history). If its step
    takes a metric, as ReduceLROnPlateau's does, it gets the number that an entry is judged by.

    **NaN and infinity.** A loss or gradient that is not finite ends the training before the next
    save. If the executor skips it (`nonfinite="skip"`), callbacks see `result.skipped`, the
    scheduler still steps, and an entry's loss leaves out calls whose loss is not finite.

    **Checkpoints.** They are saved in folders below `checkpoint`. With `save_every` they are saved
    every that many steps and at the end, in `step-N`; otherwise at each epoch's end, in `epoch-N`,
    or without `epochs` at each entry, in `step-N`. The last `keep` are kept. With `best` ("loss"
    for the evaluation loss, or a metric) the best entry's checkpoint is kept in `best`; load it
    with `Checkpoint(executor).load("run/best")`. A checkpoint has the executor, the scheduler, the
    data and the history. `others` maps names to more objects to save, with `state_dict` and
    `load_state_dict`: a scheduler that a callback steps, say, or averaged weights. Checkpoints are
    saved after the `callbacks`. If a callback raises, what is due is saved first, and the training
    ends. With `async_save` the files are written while the training goes on; see
    `Checkpoint.async_save`. The next save and the end of `fit` wait for them, and raise what was
    wrong. The log then has "copy_seconds" and "copy_gib", the time and size of the last copy on
    this process.

    **Resuming.** `fit` goes on from the last checkpoint as if the training had never stopped. If
    that one is damaged, it logs a warning and goes on from the one before. `batches` must know
    where it is, as `Batches` does.

    **Stopping.** If the executor is asked to stop (`executor.stop_requested`), as by a cluster that
    needs the machine, `fit` saves a checkpoint after the step and returns. `stopped` is True then,
    and nothing is evaluated or entered in the history: a resumed training does that in its time.

    **Segments.** With `segment`, an epoch is a stream that keeps the pipeline full, in segments of
    that many microbatches; see `Executor.run`. It trains differently from one step for each batch,
    so resume with the same `segment`. Logs, evaluations and checkpoints wait for the end of a
    segment, so that they change nothing; `max_steps` cuts the last segment short.

    **Progress.** Rank 0 prints a line for each entry and, with `log_every`, one every that many
    steps: the mean loss since the last log, the learning rate, the throughput, and the figures of
    callbacks; see `Callback.after_log`. Throughput is in `unit` per second of training alone; it
    counts what the executor's `count` counts. On a terminal it shows a bar, with the log beside it.
    `progress=False` prints nothing.

    Raises ExecutionError if the arguments do not fit each other.
    """

    executor: Executor
    batches: Iterable[tuple[Any, Any]]
    _: KW_ONLY
    epochs: int | None = None
    max_steps: int | None = None
    eval_every: int | None = None
    save_every: int | None = None
    log_every: int | None = None
    scheduler: Any = None
    scheduler_by: Literal["step", "epoch", "evaluation"] = "step"
    evaluation: Iterable[tuple[Any, Any]] | None = None
    metrics: Mapping[str, Metric] | None = None
    best: str | None = None
    best_mode: Mode = "min"
    patience: int | None = None
    checkpoint: str | PathLike[str] | None = None
    keep: int = 2
    async_save: bool = False
    others: Mapping[str, Stateful] | None = None
    segment: int | None = None
    autocast: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None
    unit: str = "samples"
    callbacks: Sequence[Callback | AfterRecord] = ()
    progress: bool = True

    def __post_init__(self) -> None:
        self.callbacks, self.metrics = callbacks_of(self.callbacks), measures(self.metrics)
        self._by_metric = self.scheduler is not None and takes_metric(self.scheduler)
        for wrong, message in self._rules():
            if wrong:
                raise ExecutionError(message)
        self.optimizer = self.executor.optimizer  # refused at once where there is none
        self._length = length_hint(self.batches)
        history = History((), self.best or "loss", self.best_mode)
        self._now = Standing(history, self.executor.nonfinite == "skip", self.segment)
        self.stopped = False
        self._folder: RunFolder | None = None
        if self.checkpoint is not None:
            data: Any = self.batches
            if hasattr(self.evaluation, "state_dict"):  # in another order sums round otherwise
                data = _Data(data, self.evaluation)
            others = {_PROGRESS: self._now, **(self.others or {})}
            saves = Checkpoint(self.executor, scheduler=self.scheduler, batches=data, others=others)
            self._folder = RunFolder(
                Path(self.checkpoint), saves, self.keep, self.executor, self.async_save
            )

    def _rules(self) -> Iterator[tuple[object, str]]:
        """What may be wrong with the arguments: whether it is, and the error's words.

        A rule relies on the rules before it.
        """
        evaluation, by = self.evaluation, self.scheduler_by
        metrics, keep = self.metrics or {}, self.keep
        for name in _NUMBERS:
            number = getattr(self, name)
            unfit = number is not None and not (is_number(number) and number)
            yield unfit, f"{name} must be an int of at least 1, not {number!r}"
        yield not (is_number(keep) and keep), f"keep must be an int of at least 1, not {keep!r}"
        yield (
            self.epochs is None and self.max_steps is None,
            "nothing says when the training ends: pass epochs= or max_steps=",
        )
        for name in ("metrics", "patience", "best"):
            yield (
                getattr(self, name) and evaluation is None,
                f"{name} needs an evaluation set: pass evaluation= as well",
            )
        by_epochs = self.epochs or by == "epoch" or (evaluation is not None and not self.eval_every)
        held_out = () if evaluation is None else evaluation
        for name, given in {"batches": self.batches, "evaluation": held_out}.items():
            yield (
                not isinstance(given, Iterable),
                f"{name} must be an iterable of pairs (inputs, target), not {type(given).__name__}",
            )
            yield (
                getattr(given, "endless", False) and (by_epochs or name == "evaluation"),
                f"{name} never ends, so no epoch ends: leave out repeat=True, or, for batches, "
                'use steps: max_steps, eval_every, and scheduler_by="step" or "evaluation"',
            )
        own = self.executor.scaler
        yield (
            self.scaler not in (None, own),
            "scaler must be the executor's: Executor(…, scaler=scaler)",
        )
        half = torch.bfloat16 if own is None else torch.float16
        words = "torch.bfloat16 or None, or torch.float16 with Executor(…, scaler=…)"
        for name, allowed, what in (
            ("autocast", (None, torch.bfloat16, half), words),
            ("best", (None, "loss", *metrics), '"loss" or the name of a metric'),
            ("best_mode", ("min", "max"), '"min" or "max"'),
            ("scheduler_by", ("step", "epoch", "evaluation"), '"step", "epoch" or "evaluation"'),
        ):
            chosen = getattr(self, name)
            yield chosen not in allowed, f"{name} must be {what}, not {chosen!r}"
        evaluated = by == "evaluation" or (by == "epoch" and not self.eval_every)
        yield (
            self._by_metric and (evaluation is None or not evaluated),
            f"a {type(self.scheduler).__name__} needs the evaluation loss or a metric: pass "
            'evaluation= and scheduler_by="evaluation"',
        )
        yield (
            self.checkpoint is not None and not hasattr(self.batches, "state_dict"),
            f"a {type(self.batches).__name__} does not know where it is, so no training can resume "
            "from a checkpoint: wrap it, as in batches=Batches(…)",
        )
        yield (
            self.checkpoint is not None and _PROGRESS in (self.others or {}),
            f"others: the Trainer itself uses {_PROGRESS!r}; use another name",
        )

    def fit(self) -> History:
        """Train to the end, or until patience ends or a stop is asked for; return the history.

        A training that has a checkpoint is resumed from it; see `Trainer`. Called again, `fit`
        trains on if the training has not ended.
        """
        now, self.stopped = self._now, False
        if now.step:
            now.begin_epoch()
        elif self._folder is not None:
            self._folder.resume()
        if self._is_over():
            if is_first():
                logger.warning("nothing to train: step %d is the last already", now.step)
            return self.history
        ends = (self.epochs or 0) * self._length, self.max_steps
        shown = self.progress and is_first()
        bar = [ProgressBar(min(filter(None, ends), default=None))] if shown else []
        self._called = callbacks_of([*bar, *self.callbacks])
        with ExitStack() as stack:  # whatever fails, all that has begun ends
            for callback in self._called:
                callback.before_training(now.step)
                stack.callback(lambda begun: begun.after_training(self.history), callback)
            if self._folder is not None:
                stack.callback(self._folder.end)
            while not (self._is_over() or self.stopped):
                self._train()
            if self._folder is not None:
                self._folder.wait()
            if self.stopped and is_first():
                saved = "" if self._folder is None else ", and has saved a checkpoint"
                logger.warning("the training stops after step %d, as asked%s", now.step, saved)
        return self.history

    @property
    def history(self) -> History:
        """The entries so far."""
        return self._now.history

    @property
    def is_stale(self) -> bool:
        """Whether the training has run out of patience."""
        return self.patience is not None and self.history.stale >= self.patience

    def evaluate(self) -> Evaluation | None:
        """Compute the evaluation set's loss and metrics with the current weights; None without a
        set."""
        if self.evaluation is None:
            return None
        with self._precision():
            return evaluate(self.executor, self.evaluation, self.metrics)

    def _is_over(self) -> bool:
        now, ever = self._now, math.inf
        ends = now.epoch >= (self.epochs or ever) or now.step >= (self.max_steps or ever)
        return ends or self.is_stale

    def _train(self) -> None:
        """Train to the end of the epoch, or to the last step."""
        now, size = self._now, self.executor.schedule.microbatches
        source = pairs(self.batches, "training", now.in_epoch)
        batches = islice(source, self.max_steps and self.max_steps - now.step)
        together = (self.segment or size) // size  # steps
        often = self.log_every, self.eval_every, self.save_every
        ended = False
        while not (ended or self.is_stale or self.stopped):
            before, began, result = now.step, perf_counter(), None
            results = self._results(batches)
            for result in results:
                self._count(result)
                # At an epoch's end, if it is known, everything that is due is done together.
                if (now.step - before) % together or now.in_epoch == self._length:
                    continue
                if self.executor.stop_requested or any(
                    self._is_due(every, before) for every in often
                ):
                    break
            else:
                ended = True
            results.close()
            is_epoch = ended and (now.step != self.max_steps or now.in_epoch == self._length)
            if is_epoch:
                next(source, None)  # yields nothing, but tells the batches that the epoch is over
            self._arrive(before, began, result, is_epoch)

    def _results(self, batches: Iterable[Any]) -> Generator[StepResult, None, None]:
        """Train on batches; yield the result of each, outside of autocast."""
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
        now = self._now
        now.step, now.in_epoch = now.step + 1, now.in_epoch + 1
        now.lr = self.optimizer.param_groups[0]["lr"]
        now.loss.add(result)
        now.logged.add(result)
        self._step_scheduler("step")
        for callback in self._called:
            callback.after_step(result)

    def _is_due(self, every: int | None, before: int) -> bool:
        """Whether a multiple of `every` steps was reached since step `before`."""
        return every is not None and self._now.step // every > before // every

    def _arrive(self, before: int, began: float, result: StepResult | None, is_epoch: bool) -> None:
        """Log, evaluate, call back and save, as is due after the steps since `before`.

        These steps began at the time `began`, and `result` is that of the last one.
        """
        now, asked = self._now, self.executor.stop_requested
        figures = {}
        loss = now.logged.mean  # reading it waits for the last step
        now.seconds += perf_counter() - began
        if result is not None and self._is_due(self.log_every, before):
            figures = {"loss": loss, "lr": now.lr, **self._rates(result)}
            if self._folder is not None:
                figures |= self._folder.figures
            now.begin_log()
        if is_epoch:
            now.epoch, now.in_epoch = now.epoch + 1, 0
        self.stopped = asked and not self._is_over()
        enters = self._is_due(self.eval_every, before) if self.eval_every else is_epoch
        if self._is_over() and (not self.history or self.history[-1].step != now.step):
            enters = True
        if enters:
            now.record(now.epoch if is_epoch else None, self.evaluate())
            self._step_scheduler("evaluation")
        if is_epoch:
            self._step_scheduler("epoch")
        saves = True  # after the callbacks, and even if one raises
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
            saves = saves or self._is_over() or self.stopped
        finally:
            if self._folder is not None:
                if enters and self.best and self.history.best is self.history[-1]:
                    self._folder.save("best")
                if saves:
                    by_epoch = is_epoch and not self.save_every
                    name = f"epoch-{now.epoch}" if by_epoch else f"step-{now.step}"
                    self._folder.save(name)

    def _rates(self, result: StepResult) -> dict[str, float]:
        """The throughput since the last log, the bubble of the last step, and the figures of
        callbacks."""
        _, samples = self._now.logged.totals
        found = {f"{self.unit}_per_second": samples / self._now.seconds}
        times = self.executor.gather((result.busy, result.elapsed))
        busy, elapsed = map(sum, zip(*times, strict=True))
        if len(times) > 1 and not math.isnan(busy):
            found["bubble"] = 1 - busy / elapsed
        for callback in self._called:
            found |= callback.figures()
        return found

    def _step_scheduler(self, after: str) -> None:
        """Step the scheduler if it is stepped after this: a step, an epoch or an evaluation."""
        if self.scheduler is not None and after == self.scheduler_by:
            by = [self.history[-1].measured(self.history.measure)] if self._by_metric else []
            self.scheduler.step(*by)

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.executor.device.type, self.autocast)


@dataclass
class _Data:
    """The state of the batches and of the evaluation set as one."""

    batches: Stateful
    evaluation: Any

    def state_dict(self) -> dict[str, Any]:
        return {**self.batches.state_dict(), "evaluation": self.evaluation.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = dict(state)
        if "evaluation" in own:
            self.evaluation.load_state_dict(own.pop("evaluation"))
        self.batches.load_state_dict(own)
