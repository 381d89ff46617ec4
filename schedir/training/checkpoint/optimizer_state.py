"""An optimiser's state and param groups, under the parameters' names in the whole model.

So they depend neither on the stage that holds a parameter, nor on its number there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from schedir.errors import ExecutionError
from schedir.training.checkpoint.storage import Stored
from schedir.training.checkpoint.whole_names import Aliases

T = TypeVar("T")

SECTION = "optimizer"

Optimizers: TypeAlias = Mapping[str, Optimizer]
"""The optimisers of this process, by their owner's name in messages."""

_MEMBERS = ("params", "param_names")


@attrs.frozen
class Record:
    """A param group, or a stage's part of one, as a checkpoint keeps it.

    `optimizer` is the optimiser's class, `number` the group's number, `options` its
    hyperparameters and `names` its parameters.
    """

    optimizer: str
    number: int
    options: dict[str, Any]
    names: tuple[str, ...]


@attrs.frozen(eq=False)
class Kept:
    """The optimisers of a process without their tensors: param groups, how many of them each
    optimiser has, and the plain values of the state, by a parameter's first name."""

    records: list[Record]
    groups: set[int]
    values: dict[str, dict[str, Any]]


def kept_of(
    optimizers: Optimizers, aliases: Aliases, saved: Collection[nn.Parameter]
) -> tuple[dict[str, dict[str, Tensor]], Kept]:
    """Split the optimisers into the state tensors of the `saved` parameters, with this process's
    parts of those that are split, and all the rest.

    Raises ExecutionError for the state of a split parameter that is not split with it.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    kept = Kept([], {len(optimizer.param_groups) for optimizer in optimizers.values()}, {})
    for place, optimizer in optimizers.items():
        for parameter, state in optimizer.state.items():
            name = _names(parameter, aliases, place)[0]
            found = {k: v for k, v in state.items() if isinstance(v, Tensor)}
            for key, value in found.items():
                _check_split(parameter, value, f"the state {key} of {name}, in {place},")
            if parameter in saved:
                tensors[name] = found
                kept.values[name] = {k: v for k, v in state.items() if k not in found}
            elif isinstance(parameter, DTensor):
                tensors[name] = {k: v for k, v in found.items() if isinstance(v, DTensor)}
        for number, group in enumerate(optimizer.param_groups):
            names = tuple(_names(parameter, aliases, place)[0] for parameter in group["params"])
            options = {
                # Another process may have no such device.
                key: value.cpu() if isinstance(value, Tensor) else value
                for key, value in _options(group).items()
            }
            kept.records.append(Record(type(optimizer).__name__, number, options, names))
    return tensors, kept


def _check_split(parameter: Tensor, state: Tensor, what: str) -> None:
    """Raise ExecutionError unless a state tensor is split as its parameter is, or is a number."""
    alike = isinstance(state, DTensor) and state.shape == parameter.shape
    if isinstance(parameter, DTensor) and state.ndim and not alike:
        raise ExecutionError(
            f"{what} is not split as its parameter is, so its parts can't be put together; take an "
            "optimizer with a state of the parameters' shapes"
        )


def _like(parameter: Tensor, name: str, stored: Stored) -> Tensor:
    """An empty tensor for a saved state of a parameter: split as the parameter is here. Numbers,
    such as the steps of Adam, are on the CPU."""
    if not stored.sizes[name]:
        return stored.empty(name)
    if isinstance(parameter, DTensor):
        return torch.empty_like(parameter.detach(), dtype=stored.dtype(name))
    return stored.empty(name, parameter.device)


def merged(parts: Iterable[Kept]) -> dict[str, Any]:
    """Join the parts of all processes; groups that differ only in names become one record."""
    records: list[Record] = []
    values = {}
    for part in parts:
        values.update({name: own for name, own in part.values.items() if own})
        for record in part.records:
            for at, other in enumerate(records):
                same = (other.number, other.optimizer) == (record.number, record.optimizer)
                if same and not _difference(other.options, record.options):
                    names = dict.fromkeys(other.names + record.names)
                    records[at] = attrs.evolve(other, names=tuple(names))
                    break
            else:
                records.append(record)
    found = [attrs.asdict(record, recurse=False) for record in records]
    return {"records": found, "values": values}


def loads_of(
    stored: Stored,
    kept: Mapping[str, Any],
    optimizers: Optimizers,
    aliases: Aliases,
    lacking: Collection[str],
) -> list[Callable[[], None]]:
    """Make a function for each optimiser here that loads it through `load_state_dict`.

    `kept` has the checkpoint's values of optimisers that are no tensors; parameters that it is
    `lacking` have no state there. Raises ExecutionError if the optimiser has another class, if
    another parameter is missing, or if one group's parameters are in different groups there.
    """
    records = [Record(**record) for record in kept["records"]]
    flat_names: dict[str, dict[str, str]] = {}
    for flat, path in stored.paths.items():
        if path[:2] == (SECTION, "state"):
            flat_names.setdefault(path[2], {})[path[3]] = flat

    def load(optimizer: Optimizer, place: str, options: Sequence[Mapping[str, Any]]) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = {parameter: number for number, parameter in enumerate(held)}
        state = {}
        for parameter, number in numbers.items():
            names = _names(parameter, aliases, place)
            flat = _first(flat_names, names) or {}
            tensors = {key: _like(parameter, name, stored) for key, name in flat.items()}
            stored.read_into({flat[key]: tensor for key, tensor in tensors.items()})
            if found := {**(_first(kept["values"], names) or {}), **tensors}:
                state[number] = found
        groups = [
            {**_loaded(group, new), "params": [numbers[own] for own in group["params"]]}
            for group, new in zip(optimizer.param_groups, options, strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    return [
        partial(load, optimizer, place, _options_for(optimizer, place, records, aliases, lacking))
        for place, optimizer in optimizers.items()
    ]


def _options_for(
    optimizer: Optimizer,
    place: str,
    records: Sequence[Record],
    aliases: Aliases,
    lacking: Collection[str],
) -> list[Mapping[str, Any]]:
    """Find the hyperparameters that a checkpoint has for each param group of an optimiser."""
    by_name = {name: record for record in records for name in record.names}
    options: list[Mapping[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        whose = f"param group {number} of {place}"
        found: tuple[str, Record] | None = None
        for parameter in group["params"]:
            names = _names(parameter, aliases, place)
            record = _first(by_name, names)
            if record is None and names[0] in lacking:
                continue
            if record is None:
                raise ExecutionError(
                    f"the checkpoint's optimizer does not have {names[0]}, which is in {whose}: it "
                    "was not trained there; leave it out here too, or load only the weights, with "
                    "load_weights"
                )
            if record.optimizer != type(optimizer).__name__:
                raise ExecutionError(
                    f"the checkpoint was saved with {record.optimizer}, but that of {place} is "
                    f"{type(optimizer).__name__}; make the same optimizer, or load only the "
                    "weights, with load_weights"
                )
            if found and (unlike := _difference(found[1].options, record.options)):
                raise ExecutionError(
                    f"{found[0]} and {names[0]} are in {whose}, but in param groups of the "
                    f"checkpoint that differ: {unlike}; make the groups of the checkpoint"
                )
            found = names[0], record
        # The parameters of a group that is empty here are on other stages.
        alike = [found[1]] if found else [one for one in records if one.number == number]
        options.append(alike[0].options if alike else {})
    return options


def _first(found: Mapping[str, T], names: Iterable[str]) -> T | None:
    """The value of the first name that has one, or None."""
    return next((found[name] for name in names if name in found), None)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _MEMBERS}


def _loaded(group: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, replaced by `new` ones; a tensor stays on its device."""
    found = _options(group)
    for key, value in new.items():
        old = found.get(key)
        if isinstance(value, Tensor) and isinstance(old, Tensor):
            value = value.to(old.device)
        found[key] = value
    return found


def _names(parameter: Any, aliases: Aliases, place: str) -> tuple[str, ...]:
    if parameter not in aliases:
        raise ExecutionError(
            f"the optimizer of {place} has a parameter, of shape {list(parameter.shape)}, that is "
            "in no state dict of the model, so a checkpoint has no name for it; register it in a "
            "module of the model"
        )
    return aliases[parameter]


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {one.get(key)} and {other.get(key)}"
        for key in {**one, **other}
        if not _same(one.get(key), other.get(key))
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    return bool(one == other)
