"""A model as a list of layers, each with its name in the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import CellType
from typing import Any, TypeAlias

import attrs
from torch import nn

from schedir.errors import ExecutionError
from schedir.training.cutting.deferred import Deferred, type_name
from schedir.training.cutting.skips import Pop, Stash

Layers: TypeAlias = nn.Sequential | Sequence[Any] | Mapping[str, Any]
"""Modules, functions and deferred layers, in the order in which they run."""


@attrs.frozen(eq=False)
class Layer:
    """One of a list, by its name in the whole model."""

    name: str
    given: Any

    def __str__(self) -> str:
        if isinstance(self.given, (Stash, Pop)):
            return f"{self.name} ({type(self.given).__name__.lower()} {self.given.name!r})"
        return f"{self.name} ({type_name(self.given)})"


def layers_of(given: Layers) -> list[Layer]:
    """The layers by name: those of an `nn.Sequential` as in its state dict, those of a sequence by
    position, those of a mapping by key.

    Raises ExecutionError where there is none, or one is no layer.
    """
    if isinstance(given, nn.Sequential):
        named = list(given._modules.items())  # children() would leave out one that is listed twice
    elif isinstance(given, (Mapping, nn.ModuleDict)):
        named = list(given.items())
    elif isinstance(given, (Sequence, nn.ModuleList)) and not isinstance(given, str):
        named = [(str(number), layer) for number, layer in enumerate(given)]
    else:
        raise ExecutionError(
            "partition takes an nn.Sequential, a list of layers, or a mapping from names to "
            f"layers, not {type(given).__name__}"
        )
    if not named:
        raise ExecutionError("there is no layer to make stages of")
    found = [Layer(name, layer) for name, layer in named]
    for layer in found:
        _check(layer)
    _check_names([layer.name for layer in found])
    return found


def _check(layer: Layer) -> None:
    if not isinstance(layer.name, str) or not all(layer.name.split(".")):
        raise ExecutionError(f"a layer's name must be a string, not {layer.name!r}")
    if isinstance(layer.given, type):
        raise ExecutionError(
            f"layer {layer.name} is the class {layer.given.__name__}; make one of it, or list "
            f"deferred({layer.given.__name__}, …)"
        )
    if not (callable(layer.given) or isinstance(layer.given, (Deferred, Stash, Pop))):
        raise ExecutionError(
            f"layer {layer.name} is no module, function or deferred layer, but "
            f"{type(layer.given).__name__}"
        )
    if not isinstance(layer.given, (nn.Module, Deferred, Stash, Pop)):
        held = _held_module(layer.given)
        if held is not None:
            raise ExecutionError(
                f"layer {layer.name} is a function that uses the module {type(held).__name__}, "
                "whose parameters its stage would neither hold nor train; list a module that has "
                "it, or, where it is a layer of its own as well, deferred(…).tied(key, use)"
            )


def _held_module(function: Any) -> nn.Module | None:
    """A module with parameters that a function brings along, if that can be seen."""
    if isinstance(function, partial):
        inside = [function.func, *function.args, *function.keywords.values()]
    else:
        cells = getattr(function, "__closure__", None) or ()
        inside = [cell.cell_contents for cell in cells if cell != CellType()]
        inside.append(getattr(function, "__self__", None))
    for held in inside:
        if isinstance(held, nn.Module) and next(held.parameters(), None) is not None:
            return held
    return None


def _check_names(names: Sequence[str]) -> None:
    """No name may lead into another layer: their parameters' names would not be told apart."""
    known = set(names)
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts)):
            if (outer := ".".join(parts[:length])) in known:
                raise ExecutionError(
                    f"layers {outer} and {name} can't both be named so: the latter's parameters "
                    "would have names of the former's"
                )
