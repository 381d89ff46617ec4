"""The checkpoints of a training in one folder, of which the last ones and the best are kept.

folder/epoch-2/   the checkpoint after two epochs, complete, as Checkpoint writes it
       step-90/   the one after 90 steps; of the last `keep` there is a folder each
       best/      the one of the best evaluation
       saving/    the next one, until it is complete and renamed
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections import ChainMap
from pathlib import Path

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.training.checkpoint.checkpoint import Checkpoint
from schedir.training.checkpoint.collective import everywhere
from schedir.training.checkpoint.storage import DamagedError, make_folder

logger = logging.getLogger("schedir")

_STEPS = "steps"  # the file in each checkpoint's folder that has how many steps it is after


class RunFolder:
    """Saves checkpoints of one training, and loads the last good one; every rank calls it alike.

    The last `keep` of `epoch-N` and `step-N` are kept, and `best` is.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint, keep: int, executor: Executor) -> None:
        self._folder, self._checkpoint, self._keep = folder, checkpoint, keep
        self._gather = executor.gather
        self._is_first = (executor.pipeline, executor.rank) == (0, 0)
        self._last: Path | None = None  # that was saved or loaded here

    def resume(self) -> None:
        """Load the last checkpoint that is not damaged, if there is one.

        Raises ExecutionError where there are checkpoints, but not for all ranks, or all are
        damaged, or the last one does not fit, and where none can be saved.
        """
        folder = self._folder
        there = everywhere(self._gather, lambda: _steps_in(_prepared(folder)))
        steps = ChainMap(*there)
        refused: list[str] = []
        for name in sorted(steps, key=steps.__getitem__, reverse=True):
            own = folder / name
            missing = ", ".join(str(at) for at, seen in enumerate(there) if name not in seen)
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
            self._last = own
            return
        if refused:
            raise ExecutionError(
                f"no checkpoint in {folder} can be loaded: {'; '.join(refused)}; to begin anew, "
                "give another folder"
            )

    def save(self, name: str, step: int) -> None:
        """Save all beside what was saved before, of which what is too old is then removed."""
        folder = self._folder
        own = folder / name
        # One of the same step is replaced at once, as it stays a checkpoint meanwhile.
        saving = own if own == self._last else folder / "saving"
        self._checkpoint.save(saving)
        self._last = own

        def finish() -> None:
            if saving != own:
                (saving / _STEPS).write_text(str(step))
                if own.exists():  # a damaged one, or it would have been loaded
                    shutil.rmtree(own)
                saving.rename(own)
            steps = _steps_in(folder)
            passed = sorted((name for name in steps if steps[name] <= step), key=steps.__getitem__)
            for old in passed[: -self._keep]:
                shutil.rmtree(folder / old, ignore_errors=True)

        everywhere(self._gather, lambda: finish() if self._is_first else None)

    def save_best(self) -> None:
        """Save all in place of the best so far, which stays until that is complete."""
        self._checkpoint.save(self._folder / "best")


def _prepared(folder: Path) -> Path:
    """Make the folder, in which checkpoints can be saved.

    Raises ExecutionError where they can't, or it is a checkpoint itself.
    """
    if Checkpoint.is_at(folder):
        raise ExecutionError(
            f"{folder} is a checkpoint itself, and a Trainer keeps its own in folders below it: "
            f"give another folder, or move what is there to {folder / 'epoch-3'}, if three is "
            "the number of its epochs"
        )
    make_folder(folder)
    return folder


def _steps_in(folder: Path) -> dict[str, float]:
    """The checkpoints that are there, damaged ones too, and after how many steps each is; infinity
    where that can't be read, so that those are looked at first."""
    found = {}
    for one in folder.iterdir():
        if re.fullmatch(r"(epoch|step)-[1-9]\d*", one.name):
            try:
                found[one.name] = float((one / _STEPS).read_text())
            except (OSError, ValueError):
                found[one.name] = math.inf
    return found
