"""An optimiser's state and param groups, under the names that parameters have in the whole model.

So they don't depend on which stage holds a parameter, nor on how it is numbered there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from schedir.errors import ExecutionError
from schedir.training.checkpoints.names import Aliases
from schedir.training.checkpoints.storage import Stored

SECTION = "optimizer"

Optimizers: TypeAlias = Mapping[str, Optimizer]
"""Those of this process, by what to call whose they are."""

_MEMBERS = ("params", "param_names")


@attrs.frozen
class Record:
    """A param group, or the part of one that a stage has, as a checkpoint keeps it.

    `optimizer` is its class, `number` that of the group there, `options` its hyperparameters and
    `names` its parameters.
    """

    optimizer: str
    number: int
    options: dict[str, Any]
    names: tuple[str, ...]


def states_of(
    optimizers: Optimizers, aliases: Aliases, saved: Collection[nn.Parameter]
) -> dict[str, dict[str, Any]]:
    """What is kept of each of the `saved` parameters, by its first name."""
    return {
        _names(parameter, aliases, place)[0]: dict(state)
        for place, optimizer in optimizers.items()
        for parameter, state in optimizer.state.items()
        if parameter in saved
    }


def records_of(optimizers: Optimizers, aliases: Aliases) -> list[Record]:
    """The param groups."""
    return [
        Record(
            type(optimizer).__name__,
            number,
            {
                # Another process may have no such device.
                key: value.cpu() if isinstance(value, Tensor) else value
                for key, value in _options(group).items()
            },
            tuple(_names(parameter, aliases, place)[0] for parameter in group["params"]),
        )
        for place, optimizer in optimizers.items()
        for number, group in enumerate(optimizer.param_groups)
    ]


def joined(records: Iterable[Record]) -> list[Record]:
    """Those of all stages, with one for those that have all alike but their parameters."""
    found: list[Record] = []
    for record in records:
        for at, other in enumerate(found):
            same = (other.number, other.optimizer) == (record.number, record.optimizer)
            if same and _alike(other.options, record.options):
                names = dict.fromkeys(other.names + record.names)
                found[at] = attrs.evolve(other, names=tuple(names))
                break
        else:
            found.append(record)
    return found


@attrs.frozen(eq=False)
class Kept:
    """What a checkpoint has of optimisers: the groups, and of each name what is no tensor."""

    records: Sequence[Record]
    values: Mapping[str, Mapping[str, Any]]
    _by_name: Mapping[str, Record] = attrs.field(init=False)

    @_by_name.default
    def _index(self) -> dict[str, Record]:
        return {name: record for record in self.records for name in record.names}

    def values_of(self, names: Iterable[str]) -> Mapping[str, Any]:
        """What is no tensor of the state of a parameter with these names."""
        return next((self.values[name] for name in names if name in self.values), {})

    def options_for(
        self, optimizers: Optimizers, aliases: Aliases
    ) -> dict[str, list[dict[str, Any] | None]]:
        """The hyperparameters of the groups of each optimiser here, None where nothing is kept.

        Raises ExecutionError where the checkpoint is of an optimiser of another class, does not
        have a parameter, or has those of one group in groups that differ.
        """
        return {
            place: [
                self._options(place, optimizer, number, aliases)
                for number in range(len(optimizer.param_groups))
            ]
            for place, optimizer in optimizers.items()
        }

    def _options(
        self, place: str, optimizer: Optimizer, number: int, aliases: Aliases
    ) -> dict[str, Any] | None:
        whose = f"param group {number} of {place}"
        found: tuple[str, Record] | None = None
        for parameter in optimizer.param_groups[number]["params"]:
            names = _names(parameter, aliases, place)
            record = next((self._by_name[name] for name in names if name in self._by_name), None)
            if record is None:
                raise ExecutionError(
                    f"the checkpoint's optimizer does not have {names[0]}, which is in {whose}: it "
                    "was not trained there; leave it out here too, or load_weights alone"
                )
            if record.optimizer != type(optimizer).__name__:
                raise ExecutionError(
                    f"the checkpoint was saved with {record.optimizer}, but that of {place} is "
                    f"{type(optimizer).__name__}; make the same optimizer, or load_weights alone"
                )
            if found is not None and not _alike(found[1].options, record.options):
                raise ExecutionError(
                    f"{found[0]} and {names[0]} are in {whose}, but in param groups of the "
                    f"checkpoint that differ: {_difference(found[1].options, record.options)}; "
                    "make the same groups"
                )
            found = names[0], record
        if found is not None:
            return found[1].options
        # Of a group without parameters here other stages have some.
        return next((one.options for one in self.records if one.number == number), None)


def state_tensors(
    stored: Stored, optimizers: Optimizers, aliases: Aliases
) -> dict[nn.Parameter, dict[str, tuple[str, Tensor]]]:
    """By parameter, by key of its state: the name in the checkpoint, and a tensor for it."""
    by_name: dict[str, dict[str, str]] = {}
    for flat, path in stored.paths.items():
        if path[:2] == (SECTION, "state"):
            by_name.setdefault(path[2], {})[path[3]] = flat
    found: dict[nn.Parameter, dict[str, tuple[str, Tensor]]] = {}
    for place, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                known = [name for name in _names(parameter, aliases, place) if name in by_name]
                found[parameter] = {
                    # Numbers, as the steps of Adam, are kept on the CPU.
                    key: (
                        flat,
                        stored.empty(flat, parameter.device if stored.sizes[flat] else "cpu"),
                    )
                    for key, flat in (by_name[known[0]] if known else {}).items()
                }
    return found


def give(
    optimizers: Optimizers,
    aliases: Aliases,
    options: Mapping[str, Sequence[dict[str, Any] | None]],
    tensors: Mapping[nn.Parameter, Mapping[str, tuple[str, Tensor]]],
    kept: Kept,
) -> None:
    """Load the optimisers here, as by their own `load_state_dict`."""
    for place, optimizer in optimizers.items():
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = {parameter: number for number, parameter in enumerate(held)}
        state = {}
        for parameter, number in numbers.items():
            read = {key: tensor for key, (_, tensor) in tensors[parameter].items()}
            if found := {**kept.values_of(_names(parameter, aliases, place)), **read}:
                state[number] = found
        groups = [
            {**_loaded(group, new or {}), "params": [numbers[own] for own in group["params"]]}
            for group, new in zip(optimizer.param_groups, options[place], strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _MEMBERS}


def _loaded(group: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options where `new` ones are loaded; a tensor stays on its device."""
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
            "in no state dict of the model, so it has no name to be kept by"
        )
    return aliases[parameter]


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return not _difference(one, other)


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
