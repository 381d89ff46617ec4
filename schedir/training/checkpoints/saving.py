"""From a training to the nested dict of tensors that its checkpoint is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.runtime.accelerator import accelerator_of
from schedir.training.checkpoints.agreeing import everywhere
from schedir.training.checkpoints.names import Names, names_of
from schedir.training.checkpoints.optimizer_state import (
    SECTION,
    Record,
    joined,
    records_of,
    states_of,
)
from schedir.training.checkpoints.packing import packed
from schedir.training.checkpoints.rng_state import rng_state
from schedir.training.checkpoints.storage import write
from schedir.training.checkpoints.subject import Stateful, Subject


@attrs.frozen(eq=False)
class _Part:
    """What the first process has to know of one: which it is, its param groups, how many groups
    its optimisers have, and of their states what is no tensor."""

    place: tuple[int, int]
    records: list[Record]
    groups: set[int]
    values: dict[str, dict[str, Any]]


def save(subject: Subject, step: int, folder: Path) -> None:
    """Write a checkpoint, as every process does; see `Checkpoint.save`."""
    accelerator_of(subject.device).synchronize()
    names = names_of(subject.model, subject.held, subject.gather)
    state: dict[str, Any] = {}

    def prepared() -> _Part:
        if isinstance(subject.model, Executor):
            _check_updated(subject.model)
        states = _states(subject, names)
        tensors = {name: _tensors(own) for name, own in states.items()}
        state.update(_modules(subject))
        state[SECTION] = {"state": tensors}
        process = ".".join(map(str, subject.place))
        state["rng"] = {process: packed(rng_state(subject.device), "the RNG state")}
        if subject.feeds and subject.batches is not None:
            state["batches"] = {str(subject.pipeline): _state(subject.batches, "batches")}
        part = _Part(
            subject.place,
            records_of(subject.optimizers, names.aliases),
            {len(optimizer.param_groups) for optimizer in subject.optimizers.values()},
            {
                name: {k: v for k, v in own.items() if k not in tensors[name]}
                for name, own in states.items()
            },
        )
        packed(_merged([part]), "the optimizer's state")  # else it would fail on its way
        return part

    parts = everywhere(subject.gather, prepared)
    number = [part.place for part in parts].index(subject.place)

    def completed() -> None:
        groups = set().union(*(part.groups for part in parts))
        if subject.scheduler is not None and len(groups) > 1:
            raise ExecutionError(
                f"the stages' optimizers have {' and '.join(map(str, sorted(groups)))} param "
                "groups, so a scheduler's state would depend on the cut; make as many for every "
                "stage, though one may be empty"
            )
        if number:
            return
        beside = {"step": step, "optimizer": _merged(parts)}
        if subject.scheduler is not None:
            beside["scheduler"] = type(subject.scheduler).__name__
            state["scheduler"] = _state(subject.scheduler, "scheduler")
        state["training"] = packed(beside, "the optimizer's state")
        state["others"] = {name: _state(one, name) for name, one in subject.others.items()}

    everywhere(subject.gather, completed)
    write(folder, state, subject.gather, number)


def _merged(parts: Sequence[_Part]) -> dict[str, Any]:
    """What is no tensor of the optimisers of some processes."""
    records = joined(record for part in parts for record in part.records)
    return {
        "records": [attrs.asdict(record, recurse=False) for record in records],
        "values": {name: own for part in parts for name, own in part.values.items() if own},
    }


def _check_updated(executor: Executor) -> None:
    """Raise ExecutionError where a step was left without its update; an OPTIM_STEP drops what it
    has applied."""
    for stage, optimizer in executor.optimizers.items():
        for group in optimizer.param_groups:
            if any(parameter.grad is not None for parameter in group["params"]):
                raise ExecutionError(
                    f"gradients of stage {stage} wait for an update, and a checkpoint keeps none: "
                    "save after a step with update=True"
                )


def _modules(subject: Subject) -> dict[str, dict[str, Tensor]]:
    """By section, what is here of the modules and this process is to write."""
    found: dict[str, dict[str, Tensor]] = {}
    for held in subject.held:
        if held.saves:
            for name, value in held.state().items():
                content = value if isinstance(value, Tensor) else packed(value, name)
                found.setdefault(held.section, {})[name] = content
    return found


def _states(subject: Subject, names: Names) -> dict[str, dict[str, Any]]:
    """What the optimisers here keep of the parameters that this process is to write."""
    saved = {p for held in subject.held if held.saves for _, p in held.parameters()}
    return states_of(subject.optimizers, names.aliases, saved)


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in values.items() if isinstance(value, Tensor)}


def _state(one: Stateful, what: str) -> Tensor:
    return packed(one.state_dict(), f"the state of {what}")
