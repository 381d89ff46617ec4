"""Where a training stands: the part of a checkpoint that belongs to the training loop."""

from __future__ import annotations

from typing import Any

import attrs

from schedir.errors import ExecutionError
from schedir.training.evaluation import MeanLoss
from schedir.training.history import Evaluation, History, Record


class Progress:
    """The progress of a training, with a state for checkpoints.

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
