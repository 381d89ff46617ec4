"""The losses and metrics of a training, entry by entry."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, overload

import attrs

Mode: TypeAlias = Literal["min", "max"]
"""Whether less of a measure is better, or more."""


@attrs.frozen
class Evaluation:
    """The mean loss over a data set's samples, and metrics by name."""

    loss: float
    metrics: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen
class Record:
    """An entry of the history, the same on every rank: of an epoch's end, or of a step.

    `epoch` is the number of the epoch, from 1, that was over then; None in the midst of one. `step`
    is how many steps were made. `loss` is the mean over all samples that were trained on since the
    entry before, each at the weights of its step, without calls that were skipped for a loss that
    is not finite; `lr` the learning rate of the last step, that of the first param group.
    `evaluation_loss` and `metrics`, by name, are those of the whole evaluation set at this step;
    None and empty without one.
    """

    epoch: int | None
    step: int
    loss: float
    lr: float
    evaluation_loss: float | None = None
    metrics: Mapping[str, float] = attrs.field(factory=dict)

    def measured(self, by: str) -> float:
        """The evaluation loss, by "loss", or a metric; NaN where it was not evaluated."""
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
    """The entries of a training, the first one first; printed, a line for each.

    `measure`, "loss" for the evaluation loss or a metric's name, and `mode` say which is the best.
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
        """The first entry whose measure is the best; None where none has one."""
        sign = 1 if self.mode == "min" else -1
        found = [(sign * one.measured(self.measure), at) for at, one in enumerate(self)]
        known = [one for one in found if not math.isnan(one[0])]
        return self[min(known)[1]] if known else None

    @property
    def stale(self) -> int:
        """How many entries there are since the best one."""
        return len(self) - (self.index(self.best) + 1 if self.best else 0)

    def __str__(self) -> str:
        return "\n".join(map(str, self))
