"""Cut a list of layers into the stages of a schedule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.runtime import rng
from schedir.runtime.boundary import meta_of, run_on, spreads
from schedir.training.cutting.cuts import cut
from schedir.training.cutting.layers import (
    Deferred,
    Layers,
    Skip,
    layers_of,
    made_on_meta,
    seed_of,
    stashed_before,
    type_name,
)
from schedir.training.cutting.stages import (
    Part,
    Span,
    Stages,
    Uncut,
    holdings_of,
    own_modules,
    tied_names,
)

_OF_THE_INPUT = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""The errors that layers raise for an input that they do not take."""

Init: TypeAlias = Callable[[nn.Module], object]
"""Gives a module's own parameters and buffers values."""


def partition(
    layers: Layers,
    stages: Schedule | int,
    *,
    by: str | None = None,
    costs: Sequence[float] | None = None,
    boundaries: Sequence[int | str] | None = None,
    rank: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    init: Init | None = None,
) -> Stages:
    """Cut a model, given as its layers in order, into stages. No stage is empty.

    >>> from torch import nn
    >>> from schedir import build
    >>> from schedir.training import partition
    >>> schedule = build("1f1b", ranks=2, microbatches=4)
    >>> layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)]
    >>> print(partition(layers, schedule))
    stage 0: 0 Linear, 1 ReLU; 72 parameters
    stage 1: 2 Linear; 18 parameters

    - `layers`: an `nn.Sequential`, a sequence, or a mapping from names to layers. A layer is a
      module, a function of the layer's input, `deferred(make, …)`, or the `stash` or `pop` of a
      skip connection.
    - `stages`: a schedule, to make the stages of this process, or a number, to make that many
      stages here: `partition(layers, 1)[0]` is the whole model.
    - `rank`: this process's rank in the schedule. By default it is the rank that torchrun gave it;
      without torchrun all stages are made.

    State dicts have the names of the whole model: "3.weight" is the weight of layer 3,
    "head.weight" that of the layer named head.

    Pass at most one of these ways to cut:

    - `by="parameters"`, the default, balances the parameters of the stages, and `by="uniform"` the
      layers. These and `costs` are optimal contiguous cuts; see `balanced`.
    - `by="type:REGEX"` balances the layers whose class, or whose function's name, matches the
      regular expression, in any case (DeepSpeed's partition_method).
    - `by="Et*3|(t*2|)*6,tL"` is Megatron-LM's --pipeline-model-parallel-layout, with `|` between
      stages. Each `t` is a layer of the longest run of one class, `E` is all layers before the run,
      each `m` one layer after it, and `L` the rest, if any: norm and head. If the run has another
      length than there are `t`, each letter is one layer, and there must be as many layers.
    - `costs`: one number per layer, in any unit, such as those of `measured_costs`.
    - `boundaries`: the first layer of each stage except stage 0, by number or name.

    How layers are made:

    - `seed`: deferred layers are made only on the process that owns them, from torch's random
      numbers, seeded by `seed` and the layer's name. So weights depend neither on the cut nor on
      earlier random numbers.
    - `device`: deferred layers are made there. Modules are moved there if it is given; otherwise
      they are used as they are.
    - `init`: with it, deferred layers are made on the device meta, get memory on `device`, and
      `init(module)` is called for every module in them to give it values: `lambda m:
      m.reset_parameters()`. Modules may be on meta too, then.

    If layers share parameters across stages of this process, the later ones are copied. Shared
    parameters, and those of layers tied by key, are the result's `ties`.

    A layer is called with the result of the layer before it, as the executor calls stages: a tuple
    by position and a mapping by keyword, if the layer takes it so. A value that a step's
    `stage_inputs` gives to a stage by name goes to each of its layers with a parameter of that
    name.

    Every rank must cut the same list in the same way; the executor compares the cuts.

    Raises ExecutionError, with the layer's name, for a list that can't be cut so.
    """
    return cut(uncut_layers(layers, seed, device, init), stages, by, costs, boundaries, rank)


def uncut_layers(
    layers: Layers,
    seed: int,
    device: torch.device | str | None,
    init: Init | None = None,
) -> Uncut:
    """The parts of a list of layers. Deferred layers are made on meta, one at a time.

    Raises ExecutionError for what is no list of layers, if layers that are tied by one key have
    different parameters, and if `init` would give a shared parameter two values.
    """
    listed = layers_of(layers)
    stashed = stashed_before(listed)
    parts = [_part(name, given) for name, given in listed.items()]
    _check_tied(listed, parts)
    if init is not None:
        _check_unshared(parts)
    place = None if device is None else torch.device(device)
    made = partial(_made, seed=seed, device=place, init=init)

    def make(spans: Sequence[Span], stages: Iterable[int]) -> Iterator[tuple[int, nn.Module]]:
        for stage, own in own_modules(parts, spans, stages).items():
            first, end = spans[stage]
            before = f"layer {parts[first - 1]}" if first else "the model's input"
            calls = _calls(parts[first:end], {**listed, **own}, made)
            yield stage, StageModule(calls, before, stashed[first], stashed[end])

    return Uncut(parts, make)


def _part(name: str, given: Any) -> Part:
    """A layer as a part of the model."""
    module, owner = given, None
    if isinstance(given, Deferred):
        module, owner = made_on_meta(name, given), given.owner(name)
    if not isinstance(module, nn.Module):
        module = nn.Module()  # a function holds nothing
    statistics = (
        (f"{path}.running_mean".lstrip("."), part.running_mean)
        for path, part in module.named_modules()
        if isinstance(part, _NormBase) and part.running_mean is not None
    )
    return Part(
        name,
        {name: type_name(given)},
        holdings_of(module.named_parameters(remove_duplicate=False), f"{name}.", owner),
        {name: given} if isinstance(given, nn.Module) else {},
        holdings_of(statistics, f"{name}.", owner),
    )


def _check_tied(listed: Mapping[str, Any], parts: Sequence[Part]) -> None:
    """Raise ExecutionError if layers that are tied by one key have different parameters."""
    first: dict[str, Part] = {}
    for given, part in zip(listed.values(), parts, strict=True):
        if not isinstance(given, Deferred) or (key := given.key) is None:
            continue
        other = first.setdefault(key, part)
        mine, others = (
            [f"{held.name.removeprefix(one.name)[1:]}{list(held.shape)}" for held in one.holdings]
            for one in (part, other)
        )
        if mine != others:
            raise ExecutionError(
                f"layers {other} and {part} are tied by {key!r}, but the former has "
                f"{', '.join(others) or 'no parameters'} and the latter "
                f"{', '.join(mine) or 'none'}; make both alike, and pass use= to tied to call them "
                "differently"
            )


def _check_unshared(parts: Sequence[Part]) -> None:
    """Raise ExecutionError if layers on meta share a parameter: init would give it two values."""
    seen: dict[nn.Parameter, Part] = {}
    for part in parts:
        for parameter in (p for module in part.modules.values() for p in module.parameters()):
            other = seen.setdefault(parameter, part)
            if other is not part and parameter.is_meta:
                raise ExecutionError(
                    f"layers {other} and {part} share a parameter on the device meta, which init "
                    "would give two values; list them as deferred(…).tied(key)"
                )


def _made(
    name: str, given: Any, *, seed: int, device: torch.device | None, init: Init | None
) -> Any:
    """Make a deferred layer, or move a module that was given."""
    _, source = given.owner(name) if isinstance(given, Deferred) else (None, name)
    with rng(seed, seed_of(source), 0, 0):
        if isinstance(given, Deferred):
            with device or nullcontext() if init is None else torch.device("meta"):
                given = given.make()
        if isinstance(given, nn.Module):
            if init is not None and any(tensor.is_meta for tensor in _tensors(given).values()):
                _fill(name, given, device or torch.get_default_device(), init)
            if device is not None:
                given = given.to(device)
        return given


def _fill(name: str, layer: nn.Module, device: torch.device, init: Init) -> None:
    """Give a layer on meta memory and values. Raises ExecutionError if a tensor stays unset."""
    shared = tied_names(layer)
    layer.to_empty(device=device)
    for first, *others in shared:  # to_empty makes shared parameters separate ones
        for other in others:
            path, _, last = other.rpartition(".")
            setattr(layer.get_submodule(path), last, layer.get_parameter(first))
    with torch.no_grad():
        for tensor in _tensors(layer).values():
            tensor.fill_(_unset(tensor))
        for module in layer.modules():
            init(module)
    left = [
        key
        for key, x in _tensors(layer).items()
        # A mask may well be all False, so it can't be recognised as unset.
        if x.numel() and x.dtype != torch.bool and bool((x.isnan() | (x == _unset(x))).all())
    ]
    if left:
        raise ExecutionError(
            f"layer {name}: init has given no values to {', '.join(left)}, made on the device "
            "meta without values; let init(module) set every parameter and buffer"
        )


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _unset(tensor: Tensor) -> float:
    """A value that no init gives to a whole tensor, except to a mask."""
    if tensor.is_floating_point() or tensor.is_complex():
        return math.nan
    return tensor.dtype != torch.bool and torch.iinfo(tensor.dtype).min


@attrs.frozen(eq=False)
class Call:
    """One layer of a stage, and how to call it.

    `label` is its name in messages. `layer` is a function, a `Skip`, or a module, which the stage
    looks up by `name` at every call, so that it may be exchanged. `use`, if any, is called with the
    module and the value.
    """

    name: str
    label: str
    layer: Any
    use: Callable[..., Any] | None = None


def _calls(
    parts: Iterable[Part], listed: Mapping[str, Any], made: Callable[[str, Any], Any]
) -> Iterator[Call]:
    """Make the layers of one stage."""
    shared: dict[object, object] = {}
    for part in parts:
        given, use = listed[part.name], None
        if isinstance(given, Deferred):
            owner, use = given.owner(part.name), given.use
            if owner not in shared:
                shared[owner] = made(part.name, given)
            given = shared[owner]
        elif isinstance(given, nn.Module):
            given = made(part.name, given)
        yield Call(part.name, str(part), given, use)


class StageModule(nn.Module):
    """Calls layers one after the other; their parameters have the names of the whole model.

    A layer is called as the executor calls stages: a tuple goes in by position and a mapping by
    keyword if forward takes it so, otherwise as one argument. So the result does not depend on the
    cut. `before` says, for messages, where the input comes from. `enters` and `leaves` are the
    names of stashed values, which come in and go out in a tuple, behind the layers' value.

    A value that the stage gets by name beside its input goes to each of its layers whose forward,
    or function, has a parameter of that name.
    """

    def __init__(
        self,
        calls: Iterable[Call],
        before: str,
        enters: tuple[str, ...] = (),
        leaves: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self._before, self._enters, self._leaves = before, enters, leaves
        self._calls = []
        self._spreads: dict[Hashable, bool] = {}
        self._names: dict[Hashable, frozenset[str]] = {}
        for call in calls:
            if isinstance(call.layer, nn.Module):
                _attach(self, call.name, call.layer)
                call = attrs.evolve(call, layer=None)
            self._calls.append(call)

    def forward(self, given: Any, /, **beside: Any) -> Any:
        """Call the layers."""
        value, *entered = given if self._enters else (given,)
        aside = dict(zip(self._enters, entered, strict=True))
        taken = self._takers(beside) if beside else {}
        before = self._before
        for call in self._calls:
            skip = call.layer
            try:
                if not isinstance(skip, Skip):
                    value = self._called(call, value, taken.get(call))
                elif skip.join is not None:
                    value = skip.join(value, aside[skip.name])
                else:
                    aside[skip.name] = value
                    continue
            except torch.OutOfMemoryError:
                raise
            except _OF_THE_INPUT as error:
                shown = pytree.tree_map_only(Tensor, lambda x: meta_of(x.detach()), value)
                hint = ""
                if call.use is not None and not isinstance(value, Tensor):
                    hint = "; the function of .tied(key, use) is called as use(layer, x), x being "
                    hint += f"all of the {type(value).__name__}"
                raise ExecutionError(
                    f"layer {call.label} fails on what {before} gives, {shown}: "
                    f"{type(error).__name__}: {error}{hint}",
                    cause=error,
                ) from error
            before = f"layer {call.label}"
        if self._leaves:
            return (value, *(aside[name] for name in self._leaves))
        return value

    def _called(self, call: Call, value: Any, beside: Mapping[str, Any] | None) -> Any:
        layer = self._layer(call)
        if call.use is not None:
            return call.use(layer, value, **beside or {})
        if isinstance(value, Tensor) and not beside:
            return layer(value)
        # Finding out how a layer takes a value takes 30 µs, so it is kept by the value's form.
        form: object = None
        if isinstance(value, (Mapping, tuple, list)):
            form = tuple(value) if isinstance(value, Mapping) else len(value)
        key = call, type(layer), type(value), form, tuple(beside or ())
        if key not in self._spreads:
            self._spreads[key] = spreads(layer, value, beside)
        return run_on(layer, value, beside, self._spreads[key])

    def _layer(self, call: Call) -> Any:
        return self.get_submodule(call.name) if call.layer is None else call.layer

    def _takers(self, beside: Mapping[str, Any]) -> dict[Call, dict[str, Any]]:
        """Find the layers that take the values which the stage gets beside its input."""
        found = {}
        for call in self._calls:
            if isinstance(call.layer, Skip):
                continue
            layer = call.use or self._layer(call)
            if (key := (call, type(layer))) not in self._names:
                self._names[key] = _parameters(layer)
            found[call] = {x: beside[x] for x in beside if x in self._names[key]}
        if untaken := set(beside).difference(*found.values()):
            raise ExecutionError(
                f"no layer of this stage, {', '.join(call.label for call in self._calls)}, has a "
                f"parameter named {' or '.join(sorted(untaken))}, which stage_inputs= gives it"
            )
        return found


def _parameters(layer: Callable[..., Any]) -> frozenset[str]:
    """The names of the parameters of a layer's forward, or of a function."""
    try:
        function = layer.forward if isinstance(layer, nn.Module) else layer
        return frozenset(inspect.signature(function).parameters)
    except ValueError:  # a builtin without a signature
        return frozenset()


def _attach(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register a module by a name that may have dots."""
    *path, last = name.split(".")
    try:
        for part in path:
            if part not in root._modules:
                root.add_module(part, nn.Module())
            root = root.get_submodule(part)
        root.add_module(last, module)
    except KeyError:
        raise ExecutionError(
            f"a layer can't be named {name}, because modules have an attribute of that name; "
            "rename it"
        ) from None
