"""The checkpoints of a training in one folder: the last ones, and the best.

folder/epoch-2/   the checkpoint after two epochs, complete, as Checkpoint writes it
       step-90/   the checkpoint after 90 steps; the last `keep` are kept
       best/      the checkpoint of the best evaluation
       saving/    the next checkpoint, until it is complete and renamed
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

_STEPS = "steps"  # the file in each checkpoint's folder with the number of steps made


class RunFolder:
    """Saves the checkpoints of one training, and loads the last good one. Every rank calls it.

    It keeps the last `keep` of `epoch-N` and `step-N`, and `best`.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint, keep: int, executor: Executor) -> None:
        self._folder, self._checkpoint, self._keep = folder, checkpoint, keep
        self._gather = executor.gather
        self._is_first = (executor.pipeline, executor.rank) == (0, 0)
        self._last: Path | None = None  # the last one saved or loaded here

    def resume(self) -> None:
        """Load the last checkpoint that is not damaged, if there is one.

        Raises ExecutionError if some ranks do not see the checkpoints, if all are damaged, if the
        last one does not fit, or if no checkpoint can be saved here.
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
                    f"process {missing} does not see the checkpoint {own}: use a folder that all "
                    "ranks see"
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
                "use another folder"
            )

    def save(self, name: str, step: int) -> None:
        """Save a checkpoint, then remove the ones that are too old."""
        folder = self._folder
        own = folder / name
        # A checkpoint of the same step is saved in place: it stays valid meanwhile.
        saving = own if own == self._last else folder / "saving"
        self._checkpoint.save(saving)
        self._last = own

        def finish() -> None:
            if saving != own:
                (saving / _STEPS).write_text(str(step))
                if own.exists():  # damaged, otherwise it would have been loaded
                    shutil.rmtree(own)
                saving.rename(own)
            steps = _steps_in(folder)
            passed = sorted((name for name in steps if steps[name] <= step), key=steps.__getitem__)
            for old in passed[: -self._keep]:
                shutil.rmtree(folder / old, ignore_errors=True)

        everywhere(self._gather, lambda: finish() if self._is_first else None)

    def save_best(self) -> None:
        """Save the best checkpoint so far; the old one stays until the new one is complete."""
        self._checkpoint.save(self._folder / "best")


def _prepared(folder: Path) -> Path:
    """Make the folder for checkpoints.

    Raises ExecutionError if nothing can be saved in it, or if it is a checkpoint itself.
    """
    if Checkpoint.is_at(folder):
        raise ExecutionError(
            f"{folder} is a checkpoint itself, but a Trainer keeps its checkpoints in folders "
            "below it: use another folder, or move the files (of a checkpoint after 3 epochs, "
            f"say, to {folder / 'epoch-3'})"
        )
    make_folder(folder)
    return folder


def _steps_in(folder: Path) -> dict[str, float]:
    """The checkpoints in a folder, damaged ones too, with the number of steps made; infinity if
    that can't be read, so that those come first."""
    found = {}
    for one in folder.iterdir():
        if re.fullmatch(r"(epoch|step)-[1-9]\d*", one.name):
            try:
                found[one.name] = float((one / _STEPS).read_text())
            except (OSError, ValueError):
                found[one.name] = math.inf
    return found
