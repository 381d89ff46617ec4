"""The whole model's state dict, out of its stages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from schedir.runtime import Executor
from schedir.runtime.accelerator import accelerator_of
from schedir.training.checkpoints.names import held_by, names_of


def gathered_state(executor: Executor) -> dict[str, Any] | None:
    """The whole model's state dict on the first rank, on the CPU; None on the others.

    For exports, and to compare: a plain model's `load_state_dict` takes it. Every rank calls it,
    between two steps. It is sent stage by stage. A loss's parameters are not in it; of replicas the
    first one's buffers are.

    Raises ExecutionError, on all ranks, where a name stands for different things in two stages.
    """
    accelerator_of(executor.device).synchronize()
    held = held_by(executor)
    names_of(executor, held, executor.gather)
    whole: dict[str, Any] = {}
    is_first = False
    for stage in range(executor.schedule.stages):
        own = {
            name: value.cpu().clone() if isinstance(value, Tensor) else value
            for one in held
            if one.stage == stage and one.saves and one.section == "model"
            for name, value in one.state().items()
        }
        collected = executor.collect(own)
        is_first = collected is not None
        for found in collected or ():
            whole.update(found)
    return whole if is_first else None
