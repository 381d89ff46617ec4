"""A model as a list of layers, each with its name in the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dis import get_instructions
from functools import partial
from types import CellType
from typing import Any, TypeAlias

import attrs
from torch import Tensor, nn

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
    function = _function(layer.given)
    held = None if function is None else _brought_along(function)
    if held is not None:
        what = f"the module {type(held).__name__}" if isinstance(held, nn.Module) else "a parameter"
        raise ExecutionError(
            f"layer {layer.name} is a function that uses {what}, which its stage would neither "
            "hold nor train; list a module that has it, or, where it is a layer of its own as "
            "well, deferred(…).tied(key, use)"
        )


def _function(given: object) -> Any:
    """What is called in a layer that is no module, if anything is."""
    if isinstance(given, Pop):
        return given.join
    if isinstance(given, Deferred):
        return given.use
    return None if isinstance(given, (nn.Module, Stash)) else given


def _brought_along(function: Any) -> nn.Module | Tensor | None:
    """What has parameters and is brought along by a function, if that can be seen."""
    if isinstance(function, partial):
        inside = [function.func, *function.args, *function.keywords.values()]
    else:
        cells = getattr(function, "__closure__", None) or ()
        inside = [cell.cell_contents for cell in cells if cell != CellType()]
        inside += [function, getattr(function, "__self__", None), *_of_globals(function)]
    for held in inside:
        if isinstance(held, Tensor) and held.requires_grad:
            return held
        if isinstance(held, nn.Module) and next(held.parameters(), None) is not None:
            return held
    return None


def _of_globals(function: Any) -> list[object]:
    """The globals that a function reads: in a script most of what it brings along are such."""
    if not hasattr(function, "__code__"):
        return []
    read = (step.argval for step in get_instructions(function) if step.opname == "LOAD_GLOBAL")
    return [function.__globals__[name] for name in read if name in function.__globals__]


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
