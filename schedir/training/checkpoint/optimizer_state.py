"""An optimiser's state and param groups, under the parameters' names in the whole model.

So they depend neither on the stage that holds a parameter, nor on its number there. torch's
`get_optimizer_state_dict` gives the same names, but makes a step with an optimiser that has made
none, which changes how it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypedDict

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from schedir.errors import ExecutionError
from schedir.training.checkpoint.storage import Stored
from schedir.training.whole_names import Aliases

Optimizers: TypeAlias = Mapping[str, Optimizer]
"""The optimisers of this process, by their owner's name in messages."""


class Record(TypedDict):
    """A process's part of a param group, as a checkpoint keeps it.

    `optimizer` is the optimiser's class, `number` the group's number, `options` its
    hyperparameters and `names` its parameters.
    """

    optimizer: str
    number: int
    options: dict[str, Any]
    names: tuple[str, ...]


class Kept(TypedDict):
    """The optimisers of a checkpoint without their tensors: param groups, and the plain values of
    the state, by a parameter's first name."""

    records: list[Record]
    values: dict[str, dict[str, Any]]


def kept_of(
    optimizers: Optimizers, aliases: Aliases, saved: Collection[nn.Parameter]
) -> tuple[dict[str, dict[str, Tensor]], Kept]:
    """Split the optimisers into the state tensors of the `saved` parameters, with this process's
    parts of those that are split, and all the rest.

    Raises ExecutionError for the state of a split parameter that is not split with it.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    kept = Kept(records=[], values={})
    for place, optimizer in optimizers.items():
        for parameter, state in optimizer.state.items():
            name = _names(parameter, aliases, place)[0]
            found = {k: v for k, v in state.items() if isinstance(v, Tensor)}
            for key, value in found.items():
                _check_split(parameter, value, f"the state {key} of {name}, in {place},")
            if parameter in saved:
                tensors[name] = found
                kept["values"][name] = {k: v for k, v in state.items() if k not in found}
            elif isinstance(parameter, DTensor):
                tensors[name] = {k: v for k, v in found.items() if isinstance(v, DTensor)}
        for number, group in enumerate(optimizer.param_groups):
            names = {own: _names(own, aliases, place)[0] for own in group["params"]}
            options = {
                # Another process may have no such device.
                key: value.cpu() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            own = tuple(name for parameter, name in names.items() if parameter in saved)
            if own or not names:
                kind = type(optimizer).__name__
                kept["records"].append(
                    Record(optimizer=kind, number=number, options=options, names=own)
                )
    return tensors, kept


def _check_split(parameter: Tensor, state: Tensor, what: str) -> None:
    """Raise ExecutionError unless a state tensor is split as its parameter is, or is a number."""
    alike = isinstance(state, DTensor) and state.shape == parameter.shape
    if isinstance(parameter, DTensor) and state.ndim and not alike:
        raise ExecutionError(
            f"{what} is not split as its parameter is, so its parts can't be put together; take an "
            "optimizer with a state of the parameters' shapes"
        )


def loads_of(
    stored: Stored,
    kept: Kept,
    optimizers: Optimizers,
    aliases: Aliases,
    lacking: Collection[str],
) -> Iterator[Callable[[], None]]:
    """Yield a function for each optimiser here that loads it through `load_state_dict`.

    `kept` has the checkpoint's values of optimisers that are no tensors; parameters that it is
    `lacking` have no state there. Raises ExecutionError if the optimiser has another class, if
    another parameter is missing, or if one group's parameters are in different groups there.
    """
    records = {name: record for record in kept["records"] for name in record["names"]}
    tensors: dict[str, dict[str, str]] = {}
    for flat, path in stored.paths.items():
        if path[:2] == ("optimizer", "state"):
            tensors.setdefault(path[2], {})[path[3]] = flat

    def load(optimizer: Optimizer, saved_as: dict[Tensor, str], groups: list[Any]) -> None:
        state = {}
        for number, (parameter, name) in enumerate(saved_as.items()):
            flats = tensors.get(name, {})
            found = {flat: stored.empty(flat, parameter) for flat in flats.values()}
            stored.read_into(found)
            if own := {**kept["values"].get(name, {}), **{k: found[at] for k, at in flats.items()}}:
                state[number] = own
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    for place, optimizer in optimizers.items():
        saved_as: dict[Tensor, str] = {}
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            numbers = range(len(saved_as), len(saved_as) + len(group["params"]))
            for parameter in group["params"]:
                names = _names(parameter, aliases, place)
                saved_as[parameter] = next((name for name in names if name in records), names[0])
            there = [saved_as[own] for own in group["params"] if saved_as[own] not in lacking]
            _check_group(there, records, type(optimizer).__name__, f"param group {number}", place)
            # The parameters of a group that is empty here are on other stages.
            alike = [records[name] for name in there[:1]]
            alike += [record for record in kept["records"] if record["number"] == number]
            options = alike[0]["options"] if alike else {}
            groups.append({**group, **_placed(options, group), "params": [*numbers]})
        yield partial(load, optimizer, saved_as, groups)


def _check_group(
    names: Sequence[str], records: Mapping[str, Record], kind: str, group: str, place: str
) -> None:
    """Raise ExecutionError unless a checkpoint has one param group for these parameters of one."""
    for name in names:
        if name not in records:
            raise ExecutionError(
                f"the checkpoint's optimizer does not have {name}, which is in {group} of {place}: "
                "it was not trained there; leave it out here too, or load only the weights, with "
                "load_weights"
            )
        if records[name]["optimizer"] != kind:
            raise ExecutionError(
                f"the checkpoint was saved with {records[name]['optimizer']}, but that of {place} "
                f"is {kind}; make the same optimizer, or load only the weights, with load_weights"
            )
        one, other = records[names[0]]["options"], records[name]["options"]
        differ = ", ".join(
            f"{key} {one.get(key)} and {other.get(key)}"
            for key in {**one, **other}
            if one.get(key) != other.get(key)
        )
        if differ:
            raise ExecutionError(
                f"{names[0]} and {name} are in {group} of {place}, but in param groups of the "
                f"checkpoint that differ: {differ}; make the groups of the checkpoint"
            )


def _placed(options: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Options with their tensors on the devices of a group's."""
    return {
        key: value.to(old.device)
        if isinstance(value, Tensor) and isinstance(old := group.get(key), Tensor)
        else value
        for key, value in options.items()
    }


def _names(parameter: Any, aliases: Aliases, place: str) -> tuple[str, ...]:
    if parameter not in aliases:
        raise ExecutionError(
            f"the optimizer of {place} has a parameter, of shape {list(parameter.shape)}, that is "
            "in no state dict of the model, so a checkpoint has no name for it; register it in a "
            "module of the model"
        )
    return aliases[parameter]
