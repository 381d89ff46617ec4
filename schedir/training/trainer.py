"""The loop that everybody writes around a step, once, and the checkpoints that it goes on from.

folder/epoch-2/   the checkpoint after two epochs, complete, as Checkpoint writes it
       epoch-3/   the one after three; of the last `keep` there is a folder each
       saving/    the next one, until it is complete and renamed
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import length_hint
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from schedir.errors import ExecutionError
from schedir.ir import is_number
from schedir.runtime import Executor, StepResult
from schedir.training.callbacks import AfterEpoch, Callback, callbacks_of, shown
from schedir.training.checkpoint.checkpoint import Checkpoint, Stateful
from schedir.training.checkpoint.collective import everywhere
from schedir.training.checkpoint.storage import DamagedError, make_folder
from schedir.training.data import Batches
from schedir.training.evaluation import MeanLoss, Metric, evaluate, measures, pairs
from schedir.training.history import Epoch, Evaluation, History

logger = logging.getLogger("schedir")

_HISTORY = "history"


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

    With `segment`, an epoch is a stream whose pipeline stays full, in segments of so many
    microbatches: see `Executor.run`. That trains otherwise than a step for each batch would, so a
    training that goes on from a checkpoint must have the same.

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
        segment: int | None = None,
        autocast: torch.dtype | None = None,
        callbacks: Sequence[Callback | AfterEpoch] = (),
        progress: bool = True,
    ) -> None:
        may_be_none = {"patience": patience, "segment": segment}
        for name, number in {"epochs": epochs, "keep": keep, **may_be_none}.items():
            if number is None and name in may_be_none:
                continue
            if not (is_number(number) and number):
                raise ExecutionError(f"{name} must be an int of at least 1, not {number!r}")
        for name, given in {"metrics": metrics, "patience": patience}.items():
            if given and evaluation is None:
                raise ExecutionError(f"{name} needs an evaluation set: give evaluation= as well")
        held_out = () if evaluation is None else evaluation
        for name, pairs_given in {"batches": batches, "evaluation": held_out}.items():
            if not isinstance(pairs_given, Iterable):
                raise ExecutionError(
                    f"{name} must be an iterable of pairs (inputs, target), not "
                    f"{type(pairs_given).__name__}"
                )
            if isinstance(pairs_given, Batches) and pairs_given.endless:
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
        self.segment = segment
        self.callbacks = callbacks_of(callbacks)
        self.optimizer = executor.optimizer  # refused at once where there is none
        self.history = History()
        self._is_first = (executor.pipeline, executor.rank) == (0, 0)
        self._folder, self._keep = None if checkpoint is None else Path(checkpoint), keep
        if self._folder is None:
            return
        if not hasattr(batches, "state_dict"):
            raise ExecutionError(
                f"a {type(batches).__name__} does not know where it is, so nothing can go on from "
                "a checkpoint: give Batches(…) of it"
            )
        if others and _HISTORY in others:
            raise ExecutionError(f"others: {_HISTORY!r} is the Trainer's own; give another name")
        data: Any = batches
        if hasattr(evaluation, "state_dict"):  # it may be shuffled, and floats add up in order
            data = _Data(data, evaluation)
        self._epochs = _Epochs(segment)
        others = {_HISTORY: self._epochs, **(others or {})}
        self._checkpoint = Checkpoint(executor, scheduler=scheduler, batches=data, others=others)

    def fit(self) -> History:
        """Train until the last epoch, or until patience ends, and return all epochs."""
        if not self.history:
            self._resume()
        steps = length_hint(self.batches) or None
        with shown(self.epochs, steps, len(self.history), self.progress) as progress:
            callbacks = [*progress, *self.callbacks]
            while len(self.history) < self.epochs and not self.is_stale:
                loss, rate = MeanLoss(skips=self.executor.nonfinite == "skip"), 0.0
                for result in self._results():
                    rate = self.optimizer.param_groups[0]["lr"]
                    loss.add(result)
                    if self.scheduler is not None and self.scheduler_by == "step":
                        self.scheduler.step()
                    for callback in callbacks:
                        callback.after_step(result)
                found = self.evaluate()
                self.history = self.history.then(loss.mean, rate, found)
                if self.scheduler is not None and self.scheduler_by == "epoch":
                    by_loss = isinstance(self.scheduler, ReduceLROnPlateau)
                    self.scheduler.step(*[found.loss] if found and by_loss else ())
                try:
                    for callback in callbacks:
                        callback.after_epoch(self.history)
                finally:  # with what they have changed, and whatever they raise
                    self._save()
        return self.history

    def _results(self) -> Iterator[StepResult]:
        """Train for an epoch; gives the result of each batch, outside of autocast."""
        batches = pairs(self.batches, "training")
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

    def _resume(self) -> None:
        """Go on from the last checkpoint that is not damaged.

        Raises ExecutionError where there are checkpoints, but not for all ranks, or all are
        damaged, or the last one does not fit, and where none can be saved.
        """
        folder = self._folder
        if folder is None:
            return
        there = everywhere(self.executor.gather, lambda: _numbers(_prepared(folder)))
        refused: list[str] = []
        for number in sorted(set().union(*there), reverse=True):
            own = _folder_of(folder, number)
            missing = ", ".join(str(at) for at, seen in enumerate(there) if number not in seen)
            if missing:
                raise ExecutionError(
                    f"the checkpoint {own} is not there for process {missing}: give a folder that "
                    "all ranks see"
                )
            try:
                self._checkpoint.load(own)
            except DamagedError as error:
                refused.append(str(error))
                continue
            if refused and self._is_first:
                logger.warning("%s; the training goes on from %s", "; ".join(refused), own)
            self.history = self._epochs.history
            return
        if refused:
            raise ExecutionError(
                f"no checkpoint in {folder} can be loaded: {'; '.join(refused)}; to begin anew, "
                "give another folder"
            )

    def _save(self) -> None:
        """Save all beside what was saved before, of which what is too old is then removed."""
        folder = self._folder
        if folder is None:
            return
        self._epochs.history = self.history
        self._checkpoint.save(folder / "saving")
        number = len(self.history)

        def finish() -> None:
            own = _folder_of(folder, number)
            if own.exists():  # a damaged one, or it would have been loaded
                shutil.rmtree(own)
            (folder / "saving").rename(own)
            for old in [n for n in _numbers(folder) if n <= number][: -self._keep]:
                shutil.rmtree(_folder_of(folder, old), ignore_errors=True)

        everywhere(self.executor.gather, lambda: finish() if self._is_first else None)


def _prepared(folder: Path) -> Path:
    """Make the folder, in which checkpoints can be saved.

    Raises ExecutionError where they can't, or it is a checkpoint itself.
    """
    if Checkpoint.is_at(folder):
        raise ExecutionError(
            f"{folder} is a checkpoint itself, and a Trainer keeps its own in folders below it: "
            f"give another folder, or move what is there to {_folder_of(folder, 3)}, if three is "
            "the number of its epochs"
        )
    make_folder(folder)
    return folder


def _folder_of(folder: Path, number: int) -> Path:
    return folder / f"epoch-{number}"


def _numbers(folder: Path) -> list[int]:
    """The epochs after which there are checkpoints, damaged ones too, in order."""
    found = (re.fullmatch(r"epoch-([1-9]\d*)", one.name) for one in folder.iterdir())
    return sorted(int(name[1]) for name in found if name)


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


class _Epochs:
    """Gives a history, and the segments that it is of, a state that a checkpoint can hold."""

    def __init__(self, segment: int | None) -> None:
        self.history, self._segment = History(), segment

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": [attrs.asdict(epoch) for epoch in self.history], "segment": self._segment}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        segment = state.get("segment")
        if segment != self._segment:
            raise ExecutionError(
                f"the checkpoint is of a training with segment={segment}, and this one has "
                f"segment={self._segment}, which trains otherwise; give it the same"
            )
        self.history = History(tuple(Epoch(**fields) for fields in state["epochs"]))
