"""The checkpoints of a training in one folder: the last ones, and the best.

folder/epoch-2/           the checkpoint after two epochs, complete, as Checkpoint writes it
       step-90/           the checkpoint after 90 steps; the last `keep` are kept
       best/              the checkpoint of the best evaluation
       .step-120.saving/  the next checkpoint, until it is complete and renamed
"""

from __future__ import annotations

import logging
import re
import shutil
from collections import ChainMap
from functools import partial
from pathlib import Path

import attrs

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.training.checkpoint.checkpoint import Checkpoint
from schedir.training.checkpoint.saving import Saving
from schedir.training.checkpoint.storage import DamagedError, make_folder, step_of
from schedir.training.collective import everywhere

logger = logging.getLogger("schedir")


@attrs.define(eq=False)
class RunFolder:
    """Saves the checkpoints of one training, and loads the last good one. Every rank calls it.

    It keeps the last `keep` of `epoch-N` and `step-N`, and others, such as `best`. With
    `in_background` the training goes on while files are written, until the next save, `wait` or
    `end`.
    """

    folder: Path
    checkpoint: Checkpoint
    keep: int
    executor: Executor
    in_background: bool
    _saving: Saving | None = attrs.field(default=None, init=False)

    def resume(self) -> None:
        """Load the last checkpoint that is not damaged, if there is one.

        Raises ExecutionError if some ranks do not see the checkpoints, if all are damaged, if the
        last one does not fit, or if no checkpoint can be saved here.
        """
        there = everywhere(self.executor.gather, self._prepared)
        steps = ChainMap(*there)
        refused: list[str] = []
        for name in sorted(steps, key=steps.__getitem__, reverse=True):
            own = self.folder / name
            missing = ", ".join(str(at) for at, seen in enumerate(there) if name not in seen)
            if missing:
                raise ExecutionError(
                    f"process {missing} does not see the checkpoint {own}: use a folder that all "
                    "ranks see"
                )
            try:
                self.checkpoint.load(own)
            except DamagedError as error:
                refused.append(str(error))
                continue
            if refused and self._is_first:
                logger.warning("%s; the training goes on from %s", "; ".join(refused), own)
            return
        if refused:
            raise ExecutionError(
                f"no checkpoint in {self.folder} can be loaded: {'; '.join(refused)}; to begin "
                "anew, use another folder"
            )

    def save(self, name: str) -> None:
        """Save a checkpoint, then remove the ones that are too old. One of the same name stays
        valid meanwhile."""
        self.wait()
        prune = partial(self._prune, self.checkpoint.step)
        if self.in_background:
            self._saving = self.checkpoint.async_save(self.folder / name, then=prune)
        else:
            self.checkpoint.save(self.folder / name)
            everywhere(self.executor.gather, lambda: prune() if self._is_first else None)

    def wait(self) -> None:
        """Wait for the save that is under way. Raises ExecutionError if it has failed."""
        if self._saving is not None:
            self._saving.wait()

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

    @property
    def _is_first(self) -> bool:
        return (self.executor.pipeline, self.executor.rank) == (0, 0)

    def _prepared(self) -> dict[str, float]:
        """Make the folder for checkpoints, and list those that are there.

        Raises ExecutionError if nothing can be saved in it, or if it is a checkpoint itself.
        """
        if Checkpoint.is_at(self.folder):
            raise ExecutionError(
                f"{self.folder} is a checkpoint itself, but a Trainer keeps its checkpoints in "
                "folders below it: use another folder, or move the files (of a checkpoint after 3 "
                f"epochs, say, to {self.folder / 'epoch-3'})"
            )
        make_folder(self.folder, self.folder)
        return self._steps()

    def _steps(self) -> dict[str, float]:
        """The checkpoints here, damaged ones too, with the number of steps made; infinity if that
        can't be read, so that those come first."""
        return {
            one.name: step_of(one)
            for one in self.folder.iterdir()
            if re.fullmatch(r"(epoch|step)-[1-9]\d*", one.name)
        }

    def _prune(self, step: int) -> None:
        """Remove the checkpoints that are too old after this step, and what a kill has left."""
        steps = self._steps()
        passed = sorted((name for name in steps if steps[name] <= step), key=steps.__getitem__)
        left = [one.name for one in self.folder.glob(".*.saving")]
        for old in passed[: -self.keep] + left:
            shutil.rmtree(self.folder / old, ignore_errors=True)
