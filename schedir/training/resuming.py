"""What a Trainer keeps in its checkpoint, and how it goes on from there."""

from __future__ import annotations

from os import PathLike
from typing import Any

import attrs

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.training.checkpoints.checkpoint import Checkpoint
from schedir.training.checkpoints.subject import Stateful
from schedir.training.history import Epoch, History


class Kept:
    """A training and its history in the folder of a checkpoint; without a folder nothing is kept.

    Raises ExecutionError where the batches do not know where they are.
    """

    def __init__(
        self,
        folder: str | PathLike[str] | None,
        executor: Executor,
        scheduler: Any,
        batches: Any,
        evaluation: Any,
    ) -> None:
        self._folder, self._executor = folder, executor
        self._history = _Epochs()
        self._checkpoint = None
        if folder is None:
            return
        if not hasattr(batches, "state_dict"):
            raise ExecutionError(
                f"a {type(batches).__name__} does not know where it is, so nothing can go on from "
                "a checkpoint: give Batches(…) of it"
            )
        data = batches
        if hasattr(evaluation, "state_dict"):  # it may be shuffled, and floats add up in order
            data = _Data(batches, evaluation)
        others = {"history": self._history}
        self._checkpoint = Checkpoint(executor, scheduler=scheduler, batches=data, others=others)

    def resume(self) -> History:
        """Go on from the checkpoint, if there is one; returns the epochs that it has.

        Raises ExecutionError where it is not there for all ranks, or does not fit.
        """
        if self._checkpoint is None or self._folder is None:
            return History()
        there = self._executor.gather(Checkpoint.is_at(self._folder))
        if any(there) and not all(there):
            missing = ", ".join(str(at) for at, seen in enumerate(there) if not seen)
            raise ExecutionError(
                f"the checkpoint {self._folder} is not there for process {missing}: give a folder "
                "that all ranks see"
            )
        if all(there):
            self._checkpoint.load(self._folder)
        return self._history.epochs

    def save(self, history: History) -> None:
        """Save all, in place of what was saved before."""
        if self._checkpoint is not None and self._folder is not None:
            self._history.epochs = history
            self._checkpoint.save(self._folder)


class _Data:
    """Batches and an evaluation set, with the state of the batches, which has that of the set."""

    def __init__(self, batches: Stateful, evaluation: Stateful) -> None:
        self._batches, self._evaluation = batches, evaluation

    def state_dict(self) -> dict[str, Any]:
        return {**self._batches.state_dict(), "evaluation": self._evaluation.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = dict(state)
        if "evaluation" in own:
            self._evaluation.load_state_dict(own.pop("evaluation"))
        self._batches.load_state_dict(own)


class _Epochs:
    """A history, with a state that a checkpoint can hold."""

    def __init__(self) -> None:
        self.epochs = History()

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": [attrs.asdict(epoch) for epoch in self.epochs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = History(tuple(Epoch(**fields) for fields in state["epochs"]))
