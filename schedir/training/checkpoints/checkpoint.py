"""Checkpoints under the whole model's names: of any cut, number of ranks and schedule, and of none.

1f1b on 2 ranks ──save─┐     model.3.weight                      ┌─load──► pipedream on 3
a plain model   ──save─┴──►  optimizer.state.3.weight.exp_avg ───┴─load──► a plain model
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from schedir.errors import ExecutionError
from schedir.ir import is_number
from schedir.runtime import Executor
from schedir.training.checkpoints.loading import Loading
from schedir.training.checkpoints.saving import save
from schedir.training.checkpoints.storage import is_complete
from schedir.training.checkpoints.subject import Stateful, subject_of


class Checkpoint:
    """What a training needs to go on as if it had never stopped, in a folder.

    `model` is an executor, or a plain model that one process trains without any: then `optimizer`
    is its optimiser, over the loss's parameters too where `loss_fn` is a module. An executor knows
    both (and takes `optimizer=` where the caller steps). What one has saved any other loads, under
    another cut, schedule and number of ranks, as long as modules name what they hold as the whole
    model does, which those of `partition` and `stages_of` do.

    It holds weights and buffers; the optimisers' state and param groups, by the parameters' names;
    the state of `scheduler`, of `batches`, and of `others`, by name; the number of the next step;
    and the generators of torch, the device, Python and numpy. A training that goes on from it
    equals one that was never interrupted, bit for bit and dropout included, if its executor has the
    same `seed`. Gradients are not kept: save after a step that updates. To load drops those that
    are there.

    What several processes have is written once, by the first of them: replicas' weights and
    statistics. A tied parameter has all its names, its optimiser state the first one. `scheduler`
    and `others` are those of the first process, `batches` that of each pipeline's first stage; the
    generators are those of every process, and where there are more now, the others go on as the
    first of their pipeline does.

    The files are those of torch.distributed.checkpoint, whose tools read them, in a folder that all
    processes see. To load them runs no code that they may hold. Each has its SHA-256 saved with it,
    in `.metadata`, so that what is not what was saved does not load.

    Raises ExecutionError for what has no state to keep.
    """

    def __init__(
        self,
        model: Executor | nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Stateful | None = None,
        batches: Stateful | None = None,
        others: Mapping[str, Stateful] | None = None,
        loss_fn: object = None,
    ) -> None:
        self._model = model
        self._subject = subject_of(model, optimizer, scheduler, batches, others or {}, loss_fn)
        self._step = 0

    @property
    def step(self) -> int:
        """The number of the next step, which seeds its forwards: `executor.steps`. Of a plain
        model it is for the caller to count."""
        return self._model.steps if isinstance(self._model, Executor) else self._step

    @step.setter
    def step(self, number: int) -> None:
        if isinstance(self._model, Executor):
            self._model.steps = number
        elif is_number(number):
            self._step = number
        else:
            raise ExecutionError(f"step must be an int of at least 0, not {number!r}")

    @staticmethod
    def is_at(path: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint was saved there whole; `load` says whether it is damaged since."""
        return is_complete(Path(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all to a folder, which is made if need be; every rank calls it, between two steps.

        A checkpoint that is there is replaced at the very end and at once: whenever this is
        interrupted, the folder has the old one or the new one.

        Raises ExecutionError, on all ranks, where it fails on any, and the old one stays: where a
        name stands for different things in two stages, say, a state can't be kept, gradients of
        `step(…, update=False)` wait for an update, or the folder is a file or can't be made.
        """
        save(self._subject, self.step, Path(path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take all from a folder, in place; every rank calls it, and reads what it needs alone.

        First all files are compared with their hashes, each by one of the ranks.

        What the checkpoint has beyond that, such as an optimiser's state where there is no
        optimiser here, is left alone.

        Raises ExecutionError, on all ranks, where there is no complete checkpoint, a file of it is
        missing, damaged, of another checkpoint or without a hash, or the checkpoint is of another
        model, naming what is missing, unexpected and of another shape, of another optimiser
        or other param groups, or without what is to be loaded; nothing has changed then.
        """
        self.step = Loading(self._subject, Path(path), weights_only=False).step

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Take the parameters and buffers alone: to evaluate, or to begin another training with.

        Raises ExecutionError as `load`.
        """
        Loading(self._subject, Path(path), weights_only=True)
