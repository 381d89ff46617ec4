"""The names that a process's modules, parameters and buffers have in the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import attrs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedir.errors import ExecutionError
from schedir.runtime import Executor
from schedir.runtime.accelerator import accelerator_of
from schedir.runtime.arguments import whole_name
from schedir.runtime.session import digest
from schedir.training.collective import Gather, everywhere

LOSS = "loss_fn"
"""The prefix of a loss's parameters, if the loss is a module."""

Aliases: TypeAlias = Mapping[nn.Parameter, tuple[str, ...]]
"""All names that each parameter here has in the whole model, with those of its tied copies."""


@attrs.frozen
class _Entry:
    """One name of a state dict, as a process sends it to other processes.

    `content` is a hash of the values here, None for those of a parameter that are not compared.
    `size` is None for a value that is no tensor. `where` is the slice of the mesh, in words.
    """

    key: str
    place: str
    stage: int
    size: tuple[int, ...] | None
    content: int | None
    is_buffer: bool
    where: str


@attrs.frozen(eq=False)
class Held:
    """A module of this process: a stage, a whole model, or a loss.

    `place` is its name in messages, `stage` its number. `section` is the key of its tensors in a
    checkpoint. `saves` is whether this process writes what is whole here: only one of the replicas
    does. `where` is this process's slice of the mesh, in words; empty if there is one.
    """

    place: str
    stage: int
    section: str
    module: nn.Module
    saves: bool = True
    where: str = ""

    def state(self, keep_vars: bool = False) -> dict[str, Any]:
        """The module's state dict, under whole names."""
        found = self.module.state_dict(keep_vars=keep_vars)
        return {whole_name(name): value for name, value in found.items()}

    def whole(self) -> Iterator[tuple[str, Any]]:
        """Yield the state dict with split tensors made whole, by all processes that have parts."""
        for name, value in self.state().items():
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def key(self, name: str) -> str:
        """The name of one of the module's tensors in a checkpoint, with its section."""
        return f"{self.section}.{name}"

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under all their names, which are the keys of optimiser state."""
        for name, value in self.state(keep_vars=True).items():
            if isinstance(value, nn.Parameter):
                yield (self.key(name) if self.section == LOSS else name), value

    def entries(self) -> Iterator[_Entry]:
        """Yield the names of the state dict, for other processes."""
        for name, value in self.state(keep_vars=True).items():
            is_tensor, key = isinstance(value, Tensor), self.key(name)
            is_buffer = is_tensor and not isinstance(value, nn.Parameter)
            compares = is_buffer or (is_tensor and self.where and not isinstance(value, DTensor))
            size, content = (
                tuple(value.shape) if is_tensor else None,
                digest(value) if compares else None,
            )
            yield _Entry(key, self.place, self.stage, size, content, is_buffer, self.where)


def held_by(model: Executor | nn.Module, loss_fn: object = None) -> list[Held]:
    """List this process's modules: an executor's stages and loss, or a plain model and its loss."""
    if not isinstance(model, Executor):
        plain = [Held("the model", 0, "model", model)]
        return plain + ([Held(LOSS, 1, LOSS, loss_fn)] if isinstance(loss_fn, nn.Module) else [])
    placement, where = model.schedule.placement, model.where

    def saves(stage: int) -> bool:
        holders = placement[stage]
        # With `in_process` other ranks' stages are here as well.
        first = model.pipeline == model.slice == 0
        return first and (model.rank == holders[0] or model.rank not in holders)

    found = [
        Held(f"stage {stage}", stage, "model", module, saves(stage), where)
        for stage, module in sorted(model.stages.items())
    ]
    last = len(placement) - 1
    if last in model.stages and isinstance(model.loss_fn, nn.Module):
        found.append(Held(LOSS, last + 1, LOSS, model.loss_fn, saves(last), where))
    return found


@attrs.frozen(eq=False)
class Names:
    """The names of the whole model's tensors.

    `sizes` are the shapes of its parameters and buffers, None for values that are no tensors;
    `aliases` are the names of the parameters that are here.
    """

    sizes: Mapping[str, tuple[int, ...] | None]
    aliases: Aliases


def names_of(model: Executor | nn.Module, held: Sequence[Held], gather: Gather) -> Names:
    """Collect the names of everything that the processes hold.

    Raises ExecutionError on all processes if one name stands for two tensors.
    """
    own: dict[nn.Parameter, list[str]] = {}
    for one in held:
        for name, parameter in one.parameters():
            own.setdefault(parameter, []).append(name)
    stages, given = (model.stages, model.ties) if isinstance(model, Executor) else ({}, ())
    ties = [sorted((stage, name) for stage, name in tie) for tie in given]
    here = {
        (stage, name): stages[stage].get_parameter(name)
        for stage, name in chain(*ties)
        if stage in stages
    }
    told = everywhere(
        gather,
        lambda: (
            [entry for one in held for entry in one.entries()],
            {at: own.get(copy, []) for at, copy in here.items()},
        ),
    )
    names_at = {at: names for _, theirs in told for at, names in theirs.items()}
    aliases = {parameter: tuple(names) for parameter, names in own.items()}
    shared: set[str] = set()
    for tie in ties:
        names = dict.fromkeys(name for at in tie for name in names_at.get(at, ()))
        aliases.update((here[at], tuple(names)) for at in tie if at in here)
        shared.update(f"model.{name}" for name in names)
    first: dict[str, _Entry] = {}
    entries = [entry for theirs, _ in told for entry in theirs]
    for entry in sorted(entries, key=lambda one: one.stage):
        other, name = first.setdefault(entry.key, entry), entry.key.partition(".")[2]
        is_same = (entry.content, entry.size) == (other.content, other.size)
        if other.stage == entry.stage:  # of slices one saves for all what is whole in each
            if other.where != entry.where and not is_same and not entry.is_buffer:
                raise ExecutionError(
                    f"{name} of {entry.place} differs between {other.where} and {entry.where}: "
                    "make what is split a DTensor, by distribute_tensor, so that all of it is "
                    "saved; what is not must be equal"
                )
        elif entry.key not in shared and (entry.content is None or not is_same):
            raise ExecutionError(
                f"{name} is the name of two things, in {other.place} and {entry.place}; stages "
                "must use the whole model's names: make them with partition or stages_of, or "
                "declare a shared parameter with ties="
            )
    return Names({key: entry.size for key, entry in first.items()}, aliases)


def gathered_state(executor: Executor) -> dict[str, Any] | None:
    """Collect the whole model's state dict on the first rank, on the CPU; None on the others.

    >>> from torch import nn
    >>> from schedir import build
    >>> from schedir.runtime import Executor
    >>> from schedir.training import gathered_state, partition
    >>> stages = partition([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)], 2)
    >>> schedule = build("1f1b", ranks=2, microbatches=2)
    >>> executor = Executor(schedule, stages, nn.MSELoss(), in_process=True)
    >>> [*gathered_state(executor)]
    ['0.weight', '0.bias', '2.weight', '2.bias']

    It is for exports and comparisons: a plain model's `load_state_dict` takes it. Every rank calls
    it, between two steps. Stages are sent one after the other. The loss's parameters are not in it.
    Buffers of replicas are the first replica's.

    Raises ExecutionError on all ranks if one name stands for different tensors in two stages.
    """
    accelerator_of(executor.device).synchronize()
    held = held_by(executor)
    names_of(executor, held, partial(executor.gather, what="gathered_state"))
    whole: dict[str, Any] = {}
    is_first = False
    for stage in range(executor.schedule.stages):
        own = {}
        for one in held:
            if one.stage == stage and one.section == "model":
                for name, value in one.whole():
                    if one.saves:
                        own[name] = value.cpu().clone() if isinstance(value, Tensor) else value
        collected = executor.collect(own)
        is_first = collected is not None
        for found in collected or ():
            whole.update(found)
    return whole if is_first else None
