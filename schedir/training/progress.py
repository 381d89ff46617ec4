"""Where a training stands: what its checkpoints have of the loop itself."""

from __future__ import annotations

from typing import Any

import attrs

from schedir.errors import ExecutionError
from schedir.training.evaluation import MeanLoss
from schedir.training.history import Evaluation, History, Record


class Progress:
    """What a training has come to, with the state that a checkpoint keeps of it.

    `step` steps were made and `epoch` epochs are over; `in_epoch` steps are of the present one, and
    `lr` was the rate of the last one. `loss` is the mean since the last entry of the `history`, and
    `logged` that since the last log, in whose steps `seconds` went by. With `skips` they leave out
    what is not finite; with another `segment` it would be another training.
    """

    def __init__(self, history: History, skips: bool, segment: int | None) -> None:
        self.history, self._skips, self._segment = history, skips, segment
        self.step = self.epoch = 0
        self.lr = 0.0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Forget an epoch that was left early."""
        self.in_epoch = 0
        self.loss = MeanLoss(self._skips)
        self.begin_log()

    def begin_log(self) -> None:
        """Take the means of the next log from here on."""
        self.logged, self.seconds = MeanLoss(self._skips), 0.0

    def record(self, epoch: int | None, found: Evaluation | None) -> None:
        """Enter what was trained since the last entry, and what an evaluation has found."""
        measured = () if found is None else (found.loss, found.metrics)
        entry = Record(epoch, self.step, self.loss.mean, self.lr, *measured)
        self.history = attrs.evolve(self.history, records=(*self.history, entry))
        self.loss = MeanLoss(self._skips)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, and lists and dicts of them."""
        return {
            "segment": self._segment,
            "history": [attrs.asdict(record) for record in self.history],
            "numbers": [self.step, self.epoch, self.in_epoch, self.lr, self.seconds],
            "loss": self.loss.totals,
            "logged": self.logged.totals,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises ExecutionError where that is of other segments."""
        segment = state["segment"]
        if segment != self._segment:
            raise ExecutionError(
                f"the checkpoint is of a training with segment={segment}, and this one has "
                f"segment={self._segment}, which trains otherwise; give it the same"
            )
        records = tuple(Record(**fields) for fields in state["history"])
        self.history = attrs.evolve(self.history, records=records)
        self.step, self.epoch, self.in_epoch, self.lr, self.seconds = state["numbers"]
        self.loss, self.logged = (MeanLoss(self._skips, state[of]) for of in ("loss", "logged"))
