"""What a Trainer keeps in its checkpoints, and how it goes on from there.

folder/epoch-2/   the checkpoint after two epochs, complete, as Checkpoint writes it
       epoch-3/   the one after three; of the last `keep` there is a folder each
       saving/    the next one, until it is complete and renamed
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import attrs

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.training.checkpoints.agreeing import everywhere
from schedir.training.checkpoints.checkpoint import Checkpoint
from schedir.training.checkpoints.manifest import DamagedError
from schedir.training.checkpoints.storage import make_folder
from schedir.training.checkpoints.subject import Stateful
from schedir.training.history import Epoch, History

logger = logging.getLogger("schedir")

_HISTORY = "history"


class Kept:
    """A training and its history in checkpoints in a folder; without a folder nothing is kept.

    Raises ExecutionError where the batches do not know where they are, or `others` has a name that
    the history has.
    """

    def __init__(
        self,
        folder: str | PathLike[str] | None,
        keep: int,
        executor: Executor,
        scheduler: Any,
        batches: Any,
        evaluation: Any,
        others: Mapping[str, Stateful],
    ) -> None:
        self._executor, self._keep = executor, keep
        self._history = _Epochs()
        self._folder = None if folder is None else Path(folder)
        if folder is None:
            return
        if not hasattr(batches, "state_dict"):
            raise ExecutionError(
                f"a {type(batches).__name__} does not know where it is, so nothing can go on from "
                "a checkpoint: give Batches(…) of it"
            )
        if _HISTORY in others:
            raise ExecutionError(f"others: {_HISTORY!r} is the Trainer's own; give another name")
        data = batches
        if hasattr(evaluation, "state_dict"):  # it may be shuffled, and floats add up in order
            data = _Data(batches, evaluation)
        self._checkpoint = Checkpoint(
            executor,
            scheduler=scheduler,
            batches=data,
            others={_HISTORY: self._history, **others},
        )

    def resume(self) -> History:
        """Go on from the last checkpoint that is not damaged; returns the epochs that it has.

        Raises ExecutionError where there are checkpoints, but not for all ranks, or all are
        damaged, or the last one does not fit, and where none can be saved.
        """
        folder = self._folder
        if folder is None:
            return History()
        there = everywhere(self._executor.gather, lambda: _numbers(_prepared(folder)))
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
            return self._history.epochs
        if refused:
            raise ExecutionError(
                f"no checkpoint in {folder} can be loaded: {'; '.join(refused)}; to begin anew, "
                "give another folder"
            )
        return History()

    def save(self, history: History) -> None:
        """Save all beside what was saved before, of which what is too old is then removed."""
        folder = self._folder
        if folder is None:
            return
        self._history.epochs = history
        self._checkpoint.save(folder / "saving")
        number = len(history)

        def finish() -> None:
            own = _folder_of(folder, number)
            if own.exists():  # a damaged one, or it would have been loaded
                shutil.rmtree(own)
            (folder / "saving").rename(own)
            for old in [n for n in _numbers(folder) if n <= number][: -self._keep]:
                shutil.rmtree(_folder_of(folder, old), ignore_errors=True)

        everywhere(self._executor.gather, lambda: finish() if self._is_first else None)

    @property
    def _is_first(self) -> bool:
        return (self._executor.pipeline, self._executor.rank) == (0, 0)


def _prepared(folder: Path) -> Path:
    """The folder, in which checkpoints can be saved.

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
    """After which epochs there are checkpoints, damaged ones too, in order."""
    found = (re.fullmatch(r"epoch-([1-9]\d*)", one.name) for one in folder.iterdir())
    return sorted(int(name[1]) for name in found if name)


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
