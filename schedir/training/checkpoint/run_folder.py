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
from collections.abc import Callable
from functools import partial
from pathlib import Path

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.training.checkpoint.background import Saving
from schedir.training.checkpoint.checkpoint import Checkpoint
from schedir.training.checkpoint.collective import everywhere
from schedir.training.checkpoint.storage import DamagedError, make_folder, writing

logger = logging.getLogger("schedir")

_STEPS = "steps"  # the file in each checkpoint's folder with the number of steps made


class RunFolder:
    """Saves the checkpoints of one training, and loads the last good one. Every rank calls it.

    It keeps the last `keep` of `epoch-N` and `step-N`, and `best`. With `in_background` the
    training goes on while files are written, until the next save, `wait` or `end`.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        keep: int,
        executor: Executor,
        in_background: bool,
    ) -> None:
        self._folder, self._checkpoint, self._keep = folder, checkpoint, keep
        self._in_background = in_background
        self._saving: Saving | None = None
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
        self.wait()
        own = self._folder / name
        # A checkpoint of the same step is saved in place: it stays valid meanwhile.
        saving = own if own == self._last else self._folder / "saving"
        self._save(saving, partial(self._finish, saving, own, step))
        self._last = own

    def save_best(self) -> None:
        """Save the best checkpoint so far; the old one stays until the new one is complete."""
        self.wait()
        self._save(self._folder / "best")

    def wait(self) -> None:
        """Wait for the save that is under way. Raises ExecutionError if it has failed."""
        if self._saving is not None:
            self._last, last = None, self._last  # until it is known to be there
            self._saving.wait()
            self._last = last

    def end(self) -> None:
        """Wait for the save that is under way on this process alone, after a failure."""
        if self._saving is not None:
            self._saving.end()

    @property
    def figures(self) -> dict[str, float]:
        """How long the last copy for a save in the background held up the training, and its
        size on this process."""
        if self._saving is None:
            return {}
        return {"copy_seconds": self._saving.seconds, "copy_gib": self._saving.bytes / 2**30}

    def _save(self, folder: Path, then: Callable[[], object] = lambda: None) -> None:
        """Save; `then` follows on the first process."""
        if self._in_background:
            self._saving = self._checkpoint.async_save(folder, then=then)
            return
        self._checkpoint.save(folder)
        everywhere(self._gather, lambda: then() if self._is_first else None)

    def _finish(self, saving: Path, own: Path, step: int) -> None:
        """Rename a complete checkpoint to its own name, and remove the ones that are too old."""
        if saving != own:
            with writing(saving / _STEPS):
                (saving / _STEPS).write_text(str(step))
            if own.exists():  # damaged, otherwise it would have been loaded
                shutil.rmtree(own)
            saving.rename(own)
        steps = _steps_in(self._folder)
        passed = sorted((name for name in steps if steps[name] <= step), key=steps.__getitem__)
        for old in passed[: -self._keep]:
            shutil.rmtree(self._folder / old, ignore_errors=True)


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
