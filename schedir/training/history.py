"""The history of a training: its losses and metrics, entry by entry, and where it stands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

import attrs

from schedir.errors import ExecutionError
from schedir.runtime import StepResult

Mode: TypeAlias = Literal["min", "max"]
"""Whether a lower measure is better, or a higher one."""


@attrs.frozen
class Evaluation:
    """The mean loss over a data set's samples, and metrics by name.

    >>> from schedir.training import Evaluation
    >>> found = Evaluation(loss=0.25, metrics={"accuracy": 0.9})
    >>> found.metrics["accuracy"]
    0.9
    """

    loss: float
    metrics: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen
class Record:
    """An entry of the history, at an epoch's end or at a step; the same on every rank.

    >>> from schedir.training import Record
    >>> print(Record(epoch=2, step=200, loss=0.5, lr=0.01, evaluation_loss=0.625))
    epoch 2  loss 0.5000  evaluation 0.6250  lr 0.01

    - `epoch`: the number of the epoch, from 1, that has just ended; None within an epoch.
    - `step`: the number of steps made so far.
    - `loss`: the mean over all samples trained on since the entry before, each with the weights of
      its step, without calls that were skipped because their loss is not finite.
    - `lr`: the learning rate of the last step, in the first param group.
    - `evaluation_loss` and `metrics`, by name: those of the whole evaluation set at this step; None
      and empty without an evaluation set.
    """

    epoch: int | None
    step: int
    loss: float
    lr: float
    evaluation_loss: float | None = None
    metrics: Mapping[str, float] = attrs.field(factory=dict)

    def measured(self, by: str) -> float:
        """The evaluation loss, if `by` is "loss", or the metric of that name; NaN if there is
        none."""
        found = {**self.metrics, "loss": self.evaluation_loss}.get(by)
        return math.nan if found is None else found

    def __str__(self) -> str:
        found = {"loss": self.loss}
        if self.evaluation_loss is not None:
            found |= {"evaluation": self.evaluation_loss, **self.metrics}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        at = f"step {self.step}" if self.epoch is None else f"epoch {self.epoch}"
        return f"{at}  {shown}  lr {self.lr:.3g}"


@attrs.frozen
class History(Sequence[Record]):
    """The entries of a training, in order. Printed, it is a line for each.

    >>> from schedir.training import History, Record
    >>> history = History((Record(1, 100, 0.9, 0.1, 0.7), Record(2, 200, 0.8, 0.1, 0.9)))
    >>> history.best.epoch, history.stale
    (1, 1)
    >>> print(history)
    epoch 1  loss 0.9000  evaluation 0.7000  lr 0.1
    epoch 2  loss 0.8000  evaluation 0.9000  lr 0.1

    The best entry has the lowest `measure`, or with `mode="max"` the highest. `measure` is "loss"
    for the evaluation loss, or a metric's name.
    """

    records: tuple[Record, ...] = ()
    measure: str = "loss"
    mode: Mode = "min"

    @overload
    def __getitem__(self, at: int) -> Record: ...
    @overload
    def __getitem__(self, at: slice) -> History: ...
    def __getitem__(self, at: int | slice) -> Record | History:
        if isinstance(at, slice):
            return attrs.evolve(self, records=self.records[at])
        return self.records[at]

    def __len__(self) -> int:
        return len(self.records)

    @property
    def best(self) -> Record | None:
        """The entry with the best measure, the first of equals; None if no entry has the
        measure."""
        known = [one for one in self if not math.isnan(one.measured(self.measure))]
        choose = min if self.mode == "min" else max
        return choose(known, key=lambda one: one.measured(self.measure), default=None)

    @property
    def stale(self) -> int:
        """The number of entries since the best one."""
        return len(self) - (self.index(self.best) + 1 if self.best else 0)

    def __str__(self) -> str:
        return "\n".join(map(str, self))


class MeanLoss:
    """The mean loss of many calls, each weighted by its samples; their sum if it `adds`.

    A call's loss is read when the next call is added, so no rank waits for the loss of the call
    that it has just made. With `skips`, a loss that is not finite does not count. `totals` are
    those of another MeanLoss, to go on from.
    """

    def __init__(
        self, skips: bool = False, totals: Sequence[float] = (0.0, 0.0), adds: bool = False
    ) -> None:
        self._skips, self._totals, self._adds = skips, totals, adds
        self._unread: StepResult | None = None

    def add(self, result: StepResult) -> None:
        """Count a call."""
        self._totals, self._unread = self.totals, result

    @property
    def totals(self) -> Sequence[float]:
        """The sum of the losses of all samples so far, and the number of samples."""
        call, self._unread = self._unread, None
        if call is not None and call.samples and not (self._skips and not math.isfinite(call.loss)):
            total, samples = self._totals
            number = 1.0 if self._adds else call.samples
            self._totals = total + call.loss * number, samples + number
        return self._totals

    @property
    def mean(self) -> float:
        """The mean over all calls so far, or their sum; NaN where they have no samples."""
        total, samples = self.totals
        if self._adds:
            return total
        return total / samples if samples else math.nan


class Standing:
    """Where a training stands and what it has seen: its part of a checkpoint.

    `step` steps were made and `epoch` epochs are over; `in_epoch` steps belong to the current
    epoch, and `lr` is the learning rate of the last step. `loss` is the mean since the last entry
    of the `history`, `logged` the mean since the last log, and `seconds` the time of the steps
    since then. With `skips` the means leave out losses that are not finite. `segment` is that of
    the Trainer.
    """

    def __init__(self, history: History, skips: bool, segment: int | None) -> None:
        self.history, self._skips, self._segment = history, skips, segment
        self.step = self.epoch = 0
        self.lr = 0.0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin an epoch anew, without the steps of one that was left early."""
        self.in_epoch = 0
        self.loss = MeanLoss(self._skips)
        self.begin_log()

    def begin_log(self) -> None:
        """Begin the means of the next log."""
        self.logged, self.seconds = MeanLoss(self._skips), 0.0

    def record(self, epoch: int | None, found: Evaluation | None) -> None:
        """Add an entry to the history: the training since the last entry, and an evaluation."""
        measured = () if found is None else (found.loss, found.metrics)
        entry = Record(epoch, self.step, self.loss.mean, self.lr, *measured)
        self.history = attrs.evolve(self.history, records=(*self.history, entry))
        self.loss = MeanLoss(self._skips)

    def state_dict(self) -> dict[str, Any]:
        """The state, as numbers, and lists and dicts of them."""
        return {
            "segment": self._segment,
            "history": [attrs.asdict(record) for record in self.history],
            "numbers": [self.step, self.epoch, self.in_epoch, self.lr, self.seconds],
            "loss": self.loss.totals,
            "logged": self.logged.totals,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises ExecutionError if it was saved with another segment length."""
        segment = state["segment"]
        if segment != self._segment:
            raise ExecutionError(
                f"the checkpoint was saved with segment={segment}, but this Trainer has "
                f"segment={self._segment}, which would train differently; pass segment={segment}"
            )
        records = tuple(Record(**fields) for fields in state["history"])
        self.history = attrs.evolve(self.history, records=records)
        self.step, self.epoch, self.in_epoch, self.lr, self.seconds = state["numbers"]
        self.loss, self.logged = (MeanLoss(self._skips, state[of]) for of in ("loss", "logged"))
