"""The history of a training: its losses and metrics, entry by entry."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, overload

import attrs

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
        found = self.evaluation_loss if by == "loss" else self.metrics.get(by)
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

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    @property
    def best(self) -> Record | None:
        """The entry with the best measure, the first of equals; None if no entry has the
        measure."""
        sign = 1 if self.mode == "min" else -1
        found = [(sign * one.measured(self.measure), at) for at, one in enumerate(self)]
        known = [one for one in found if not math.isnan(one[0])]
        return self[min(known)[1]] if known else None

    @property
    def stale(self) -> int:
        """The number of entries since the best one."""
        return len(self) - (self.index(self.best) + 1 if self.best else 0)

    def __str__(self) -> str:
        return "\n".join(map(str, self))
