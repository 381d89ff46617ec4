"""The losses and metrics of a training, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import attrs


@attrs.frozen
class Evaluation:
    """The mean loss over a data set's samples, and metrics by name."""

    loss: float
    metrics: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen
class Epoch:
    """One epoch, the same on every rank.

    `number` counts from 1. `loss` is the mean over all samples that were trained on, each at the
    weights of its step, without calls that were skipped for a loss that is not finite; `lr` the
    learning rate of the last step, that of the first param group. `evaluation_loss` and `metrics`,
    by name, are those of the whole evaluation set at the epoch's end; None and empty without one.
    """

    number: int
    loss: float
    lr: float
    evaluation_loss: float | None = None
    metrics: Mapping[str, float] = attrs.field(factory=dict)

    def __str__(self) -> str:
        found = {"loss": self.loss}
        if self.evaluation_loss is not None:
            found |= {"evaluation": self.evaluation_loss, **self.metrics}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        return f"epoch {self.number}  {shown}  lr {self.lr:.3g}"


@attrs.frozen
class History(Sequence[Epoch]):
    """The epochs of a training, the first one first; printed, a line for each."""

    epochs: tuple[Epoch, ...] = ()

    @overload
    def __getitem__(self, at: int) -> Epoch: ...
    @overload
    def __getitem__(self, at: slice) -> History: ...
    def __getitem__(self, at: int | slice) -> Epoch | History:
        return History(self.epochs[at]) if isinstance(at, slice) else self.epochs[at]

    def __len__(self) -> int:
        return len(self.epochs)

    def __iter__(self) -> Iterator[Epoch]:
        return iter(self.epochs)

    @property
    def best(self) -> Epoch | None:
        """The first epoch with the least evaluation loss; None where none has one."""
        losses = [(e.evaluation_loss, e.number) for e in self if e.evaluation_loss is not None]
        known = [found for found in losses if not math.isnan(found[0])]
        return self[min(known)[1] - 1] if known else None

    @property
    def stale(self) -> int:
        """How many epochs have passed since the best one."""
        return len(self) - (self.best.number if self.best else 0)

    def then(self, loss: float, lr: float, evaluation: Evaluation | None) -> History:
        """The history with one epoch more."""
        found = () if evaluation is None else (evaluation.loss, evaluation.metrics)
        return History((*self, Epoch(len(self) + 1, loss, lr, *found)))

    def __str__(self) -> str:
        return "\n".join(map(str, self))
