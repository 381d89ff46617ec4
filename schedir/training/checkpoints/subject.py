"""What a checkpoint is of, as far as this process has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import nn
from torch.optim import Optimizer

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.training.checkpoints.agreeing import Gather, alone
from schedir.training.checkpoints.names import Held, held_by
from schedir.training.checkpoints.optimizer_state import Optimizers


class Stateful(Protocol):
    """What has a state: a learning-rate scheduler, `Batches`, a DataLoader that keeps its place."""

    def state_dict(self) -> dict[str, Any]:
        """The state: tensors, numbers, strings, and lists, tuples and dicts of them."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Go on from a state."""


@attrs.frozen(eq=False)
class Subject:
    """A training, as far as this process has it: the modules, the optimisers, and what has a state.

    `gather` asks all processes that train. This one is the rank `rank` of its `pipeline`, and
    `feeds` where it has the first stage.
    """

    model: Executor | nn.Module
    held: list[Held]
    optimizers: Optimizers
    scheduler: Stateful | None
    batches: Stateful | None
    others: Mapping[str, Stateful]
    gather: Gather
    pipeline: int
    rank: int
    feeds: bool
    device: torch.device

    @property
    def place(self) -> tuple[int, int]:
        """Which process this is."""
        return self.pipeline, self.rank


def subject_of(
    model: Executor | nn.Module,
    optimizer: Optimizer | None,
    scheduler: Stateful | None,
    batches: Stateful | None,
    others: Mapping[str, Stateful],
    loss_fn: object,
) -> Subject:
    """What is given, found to fit. Raises ExecutionError where it does not."""
    for what, one in {"scheduler": scheduler, "batches": batches, **others}.items():
        if one is not None and not hasattr(one, "load_state_dict"):
            raise ExecutionError(
                f"{what} must have state_dict and load_state_dict, which {type(one).__name__} has "
                "not"
            )
    if isinstance(model, Executor):
        return Subject(
            model,
            held_by(model),
            _optimizers_of(model, optimizer, loss_fn),
            scheduler,
            batches,
            others,
            model.gather,
            model.pipeline,
            model.rank,
            0 in model.stages,
            model.device,
        )
    if not isinstance(model, nn.Module):
        raise ExecutionError(
            f"a checkpoint is of an Executor or a model, an nn.Module, not {type(model).__name__}"
        )
    return Subject(
        model,
        held_by(model, loss_fn),
        {} if optimizer is None else {"the model": optimizer},
        scheduler,
        batches,
        others,
        alone,
        0,
        0,
        True,
        next((tensor.device for tensor in model.parameters()), torch.device("cpu")),
    )


def _optimizers_of(model: Executor, optimizer: Optimizer | None, loss_fn: object) -> Optimizers:
    if loss_fn is not None:
        raise ExecutionError("the executor has its loss_fn already; leave out loss_fn=")
    if optimizer is None:
        return {f"stage {stage}": one for stage, one in model.optimizers.items()}
    if model.optimizers:
        raise ExecutionError("the executor has its optimizers already; leave out optimizer=")
    return {"this process": optimizer}
