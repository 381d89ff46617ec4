"""A model as a list of layers: modules, functions, deferred layers, and skip connections.

A deferred layer is made later, and only on the rank that owns it.

`stash` puts a value aside, and a later `pop` takes it up. Between the two the value crosses the
boundaries of stages beside the layers' values, so any cut computes the same. The idea is
torchgpipe's `@skippable` (Kim et al., arXiv 2004.09910, section 3.3), which sends the value
straight to the stage that takes it up. Here it travels along the pipeline, because only neighbours
talk to each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dis import get_instructions
from functools import partial
from itertools import accumulate
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError

Layers: TypeAlias = (
    nn.Sequential | nn.ModuleList | nn.ModuleDict | Sequence[Any] | Mapping[str, Any]
)
"""Modules, functions and deferred layers, in the order in which they run."""


@attrs.frozen(eq=False)
class Deferred:
    """A layer that `make()` makes; see `deferred`."""

    make: partial[Any]
    key: str | None = None
    use: Callable[..., Any] | None = None

    def tied(self, key: str, use: Callable[..., Any] | None = None) -> Deferred:
        """Tie the layer to others: all layers with the same `key` share all their parameters.

        Make them all alike. The key, not the layer's name, seeds their weights. With `use`, the
        stage calls `use(layer, x)` instead of `layer(x)`: a head may use an embedding's transposed
        weight, say. `x` is all that the layer before gives, in one piece even if that is a tuple.

        Raises ExecutionError if the key is no string, or empty.
        """
        if not isinstance(key, str) or not key:
            raise ExecutionError(f"a tied layer's key must be a string, not {key!r}")
        return attrs.evolve(self, key=key, use=use)

    def owner(self, name: str) -> tuple[str | None, str]:
        """What has the parameters of the layer with this name: all layers of its key, or it."""
        return self.key, self.key or name


def deferred(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Deferred:
    """A layer for `partition` that is made only on the rank that owns it.

    >>> from torch import nn
    >>> from schedir.training import deferred, partition
    >>> print(partition([deferred(nn.Linear, 8, 8), deferred(nn.Linear, 8, 2)], 2))
    stage 0: 0 Linear; 72 parameters
    stage 1: 1 Linear; 18 parameters

    `make(*args, **kwargs)` returns the layer. Every rank makes it on the device meta, one layer at
    a time, to count its parameters. The rank that owns it makes it with memory too, from torch's
    random numbers, seeded by the `seed` of `partition` and the layer's name, so its weights do not
    depend on the cut. It is DeepSpeed's LayerSpec, and with `.tied("key")` its TiedLayerSpec.

    Raises ExecutionError if `make` is not callable, or is a module already.
    """
    if not callable(make):
        raise ExecutionError(
            "deferred takes a function or class that makes the layer, and its arguments, not "
            f"{type(make).__name__}"
        )
    if isinstance(make, nn.Module):
        raise ExecutionError(
            "deferred takes the class of the layer, such as nn.Linear, but this "
            f"{type(make).__name__} is made already; list it as it is"
        )
    return Deferred(partial(make, *args, **kwargs))


@attrs.frozen(eq=False)
class Skip:
    """One end of a skip connection: puts the present value aside under a name, and passes it on.

    With `join` it is the other end: it joins the present value with the one that was put aside.
    """

    name: str
    join: Callable[[Any, Any], Any] | None = None

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ExecutionError(
                f"stash and pop: a value needs a name, a string, not {self.name!r}"
            )


def stash(name: str) -> Skip:
    """A layer for `partition` that puts the current value aside for a later `pop(name, …)`.

    >>> import torch
    >>> from torch import nn
    >>> from schedir.training import partition, pop, stash
    >>> model = partition([stash("in"), nn.Flatten(), pop("in", torch.add)], 1)[0]
    >>> model(torch.ones(1, 2))  # a residual connection around a layer
    tensor([[2., 2.]])

    The value is passed on as well. Raises ExecutionError if the name is no string, or empty.
    """
    return Skip(name)


def pop(name: str, join: Callable[[Any, Any], Any]) -> Skip:
    """A layer for `partition` that takes up the value of an earlier `stash(name)`.

    >>> import torch
    >>> from torch import nn
    >>> from schedir.training import partition, pop, stash
    >>> model = partition([stash("in"), nn.ReLU(), pop("in", torch.mul)], 1)[0]
    >>> model(torch.tensor([[-2.0, 3.0]]))
    tensor([[-0., 9.]])

    Its value is `join(current value, stashed value)`. `join` is a function without parameters to
    train. The stashed value is kept until the last `pop` of its name, or the next `stash` of it.

    Raises ExecutionError if `join` is not callable, or if the name is no string, or empty.
    """
    if not callable(join):
        raise ExecutionError(
            f"pop({name!r}) needs a function of both values, not {type(join).__name__}"
        )
    return Skip(name, join)


def layers_of(given: Layers) -> dict[str, Any]:
    """Name the layers: of an `nn.Sequential` as in its state dict, of a sequence by position, of a
    mapping by key.

    Raises ExecutionError if there is no layer, or if an entry is no layer.
    """
    if isinstance(given, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        given = given._modules  # children() would leave out one that is listed twice
    elif isinstance(given, Sequence) and not isinstance(given, str):
        given = {str(number): layer for number, layer in enumerate(given)}
    if not isinstance(given, Mapping):
        raise ExecutionError(
            "partition takes an nn.Sequential, a list of layers, or a mapping from names to "
            f"layers, not {type(given).__name__}"
        )
    if not given:
        raise ExecutionError("there is no layer to make stages of: the list is empty")
    for name, layer in given.items():
        _check(name, layer)
        for outer in accumulate(name.split("."), "{}.{}".format):
            if outer in given and outer != name:
                raise ExecutionError(
                    f"layers {outer} and {name} can't both have these names: parameters of the two "
                    "could get the same name; rename one"
                )
    return dict(given)


def stashed_before(layers: dict[str, Any]) -> list[tuple[str, ...]]:
    """For each layer, and after the last, the names of the values that were stashed before and are
    still to be taken up.

    Raises ExecutionError for a `stash` without a `pop`, and the other way round.
    """
    wanted: dict[str, str] = {}
    kept: list[tuple[str, ...]] = [()]
    for layer, skip in reversed(layers.items()):
        if isinstance(skip, Skip) and skip.join is not None:
            wanted[skip.name] = layer
        elif isinstance(skip, Skip) and wanted.pop(skip.name, None) is None:
            raise ExecutionError(
                f"layer {layer} puts {skip.name!r} aside, but no later layer takes it up by "
                f"pop({skip.name!r}, …)"
            )
        kept.append(tuple(sorted(wanted)))
    for name, taker in wanted.items():
        raise ExecutionError(
            f"layer {taker} takes up {name!r}, which no earlier layer puts aside by stash({name!r})"
        )
    return kept[::-1]


def made_on_meta(name: str, layer: Deferred) -> Any:
    """Make a layer on the device meta: with shapes, without memory.

    Raises ExecutionError if it can't be made there, or if what is made is no layer.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            found = layer.make()
    except Exception as error:
        raise ExecutionError(
            f"layer {name} can't be made on the device meta, where schedir counts its "
            f"parameters ({type(error).__name__}: {error}); if making it needs a tensor's "
            "values, compute them outside, and pass the result as an argument",
            cause=error,
        ) from error
    if not callable(found):
        raise ExecutionError(
            f"layer {name}: {type_name(layer)} has made no layer, a module or function, but "
            f"{type(found).__name__}"
        )
    return found


def type_name(layer: object) -> str:
    """The name of a layer's class or function; of a deferred layer, the one that makes it."""
    if isinstance(layer, Skip):
        return "Stash" if layer.join is None else "Pop"
    if isinstance(layer, Deferred):
        layer = layer.make.func
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(layer, "__name__", type(layer).__name__)


def seed_of(text: str) -> int:
    """Hash a text to a seed, the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _check(name: object, given: Any) -> None:
    """Raise ExecutionError if it is no layer, or if its name is none."""
    if not isinstance(name, str) or not all(name.split(".")):
        raise ExecutionError(f"a layer's name must be a string, not {name!r}")
    if isinstance(given, type):
        raise ExecutionError(
            f"layer {name} is the class {given.__name__}; list an instance of it, or "
            f"deferred({given.__name__}, …)"
        )
    if isinstance(given, nn.Module):
        return
    function = given
    if isinstance(given, (Deferred, Skip)):
        function = given.use if isinstance(given, Deferred) else given.join
    elif not callable(given):
        raise ExecutionError(
            f"layer {name} is no module, function or deferred layer, but {type(given).__name__}"
        )
    if (held := _brought_along(function)) is not None:
        what = f"the module {type(held).__name__}" if isinstance(held, nn.Module) else "a parameter"
        raise ExecutionError(
            f"layer {name} is a function that uses {what}, which its stage would neither "
            "hold nor train; list a module that has it, or, if it is also a layer of the list, "
            "deferred(…).tied(key, use)"
        )


def _brought_along(function: Any) -> nn.Module | Tensor | None:
    """Find a module or parameter that a function closes over or reads as a global, if any: in the
    functions that it defines, and in those of its file that it calls, too."""
    pending, seen = [function], set[int]()
    while pending:
        held = pending.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Tensor) and held.requires_grad:
            return held
        if isinstance(held, nn.Module):
            if next(held.parameters(), None) is not None:
                return held
        elif isinstance(held, partial):
            pending += [held.func, *held.args, *held.keywords.values()]
        elif isinstance(held, MethodType):
            pending += [held.__self__, held.__func__]
        elif isinstance(held, FunctionType):
            cells, own = held.__closure__ or (), held.__globals__
            pending += [cell.cell_contents for cell in cells if cell != CellType()]
            read = [own[name] for name in sorted(_names_in(held.__code__) & own.keys())]
            pending += [one for one in read if getattr(one, "__globals__", own) is own]
    return None


def _names_in(code: CodeType) -> set[str]:
    """The globals that a function's code reads, and that of the functions that it defines."""
    names = {step.argval for step in get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return names.union(*map(_names_in, inner))
