"""Cut a list of layers into the stages of a schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.runtime import rng
from schedir.runtime.boundaries.calling import CallingConvention, convention_of
from schedir.training.cutting.cuts import cut
from schedir.training.cutting.layers import (
    Deferred,
    Layer,
    Layers,
    Pop,
    Stash,
    layers_of,
    made,
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
    init: Callable[[nn.Module], object] | None = None,
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
    init: Callable[[nn.Module], object] | None = None,
) -> Uncut:
    """The parts of a list of layers. Deferred layers are made on meta, one at a time.

    Raises ExecutionError for what is no list of layers, if layers that are tied by one key have
    different parameters, and if `init` would give a shared parameter two values.
    """
    listed = layers_of(layers)
    stashed = stashed_before([layer.given for layer in listed])
    parts = [_part(number, layer) for number, layer in enumerate(listed)]
    _check_tied(listed, parts)
    if init is not None:
        _check_unshared(parts)
    making = _Making(seed, None if device is None else torch.device(device), init)

    def make(spans: Sequence[Span], stages: Iterable[int]) -> Iterator[tuple[int, nn.Module]]:
        own = own_modules(parts, spans, stages)
        for stage, modules in own.items():
            yield stage, _stage_module(listed, spans[stage], modules, stashed, making)

    return Uncut(parts, make)


def _part(number: int, layer: Layer) -> Part:
    """A layer as a part of the model."""
    module, owner = layer.given, None
    if isinstance(module, Deferred):
        owner = ("layer", number) if module.key is None else ("key", module.key)
        module = made_on_meta(layer.name, module)
    if not isinstance(module, nn.Module):
        module = nn.Module()  # a function holds nothing
    statistics = frozenset(
        id(part) if owner is None else (owner, name)
        for name, part in module.named_modules()
        if isinstance(part, _NormBase) and part.track_running_stats
    )
    return Part(
        layer.name,
        {layer.name: type_name(layer.given)},
        holdings_of(module.named_parameters(remove_duplicate=False), f"{layer.name}.", owner),
        {layer.name: layer.given} if isinstance(layer.given, nn.Module) else {},
        statistics,
    )


def _check_tied(listed: Sequence[Layer], parts: Sequence[Part]) -> None:
    """Raise ExecutionError if layers that are tied by one key have different parameters."""
    first: dict[str, Part] = {}
    for layer, part in zip(listed, parts, strict=True):
        key = layer.given.key if isinstance(layer.given, Deferred) else None
        if key is None:
            continue
        other = first.setdefault(key, part)
        mine, others = map(_shapes, (part, other))
        if mine != others:
            raise ExecutionError(
                f"layers {other} and {part} are tied by {key!r}, but the former has "
                f"{', '.join(others) or 'no parameters'} and the latter "
                f"{', '.join(mine) or 'none'}; make both alike, and pass use= to tied to call them "
                "differently"
            )


def _shapes(part: Part) -> list[str]:
    return [
        f"{held.name.removeprefix(f'{part.name}.')}{list(held.shape)}" for held in part.holdings
    ]


def _check_unshared(parts: Sequence[Part]) -> None:
    """Raise ExecutionError if layers on meta share a parameter: init would give it two values."""
    seen: dict[object, Part] = {}
    for part in parts:
        if not any(p.is_meta for given in part.modules.values() for p in given.parameters()):
            continue
        for holding in part.holdings:
            other = seen.setdefault(holding.identity, part)
            if other is not part:
                raise ExecutionError(
                    f"layers {other} and {part} share a parameter on the device meta, which init "
                    "would give two values; list them as deferred(…).tied(key)"
                )


@attrs.frozen
class _Making:
    """How layers are made: with memory on `device`, from random numbers of `seed`.

    With an `init`, deferred layers are made on the device meta. Layers on meta get memory on
    `device`, and `init` is called with every module in them.
    """

    seed: int
    device: torch.device | None
    init: Callable[[nn.Module], object] | None


def _made(name: str, layer: Any, making: _Making) -> Any:
    """Make a deferred layer, or move a module that was given."""
    key = layer.key if isinstance(layer, Deferred) else None
    with rng(making.seed, seed_of(key or name), 0, 0):
        if isinstance(layer, Deferred) and making.init is not None:
            layer = made_on_meta(name, layer)
        elif isinstance(layer, Deferred):
            with making.device or nullcontext():
                layer = made(name, layer)
        if not isinstance(layer, nn.Module):
            return layer
        if making.init is not None and any(tensor.is_meta for tensor in _tensors(layer).values()):
            _fill(name, layer, making.device or torch.get_default_device(), making.init)
        return layer if making.device is None else layer.to(making.device)


def _fill(
    name: str, layer: nn.Module, device: torch.device, init: Callable[[nn.Module], object]
) -> None:
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
    tensors = _tensors(layer).items()
    if left := [key for key, tensor in tensors if tensor.numel() and _is_unset(tensor)]:
        raise ExecutionError(
            f"layer {name}: init has given no values to {', '.join(left)}, made on the device "
            "meta without values; let init(module) set every parameter and buffer"
        )


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _unset(tensor: Tensor) -> float | int | bool:
    """A value that no init gives to a whole tensor."""
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min


def _is_unset(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    # A mask may well be all False, so it can't be recognised as unset.
    return tensor.dtype != torch.bool and bool((tensor == _unset(tensor)).all())


def _stage_module(
    listed: Sequence[Layer],
    span: Span,
    own: Mapping[str, nn.Module],
    stashed: Sequence[tuple[str, ...]],
    making: _Making,
) -> StageModule:
    """Make the module of one stage, of which `own` are the modules that were given."""
    first, end = span
    modules: dict[str, nn.Module] = {}
    of_key: dict[object, object] = {}
    calls = []
    for layer in listed[first:end]:
        given, use = layer.given, None
        if isinstance(given, (Stash, Pop)):
            calls.append(LayerCall(layer.name, str(layer), skip=given))
            continue
        if isinstance(given, Deferred):
            use, key = given.use, given.key or layer
            if key not in of_key:
                of_key[key] = _made(layer.name, given, making)
            given = of_key[key]
        elif isinstance(given, nn.Module):
            given = _made(layer.name, own[layer.name], making)
        if isinstance(given, nn.Module):
            modules[layer.name] = given
            calls.append(LayerCall(layer.name, str(layer), use=use))
        else:
            calls.append(LayerCall(layer.name, str(layer), function=given))
    before = f"layer {listed[first - 1]}" if first else "the model's input"
    leaves = stashed[end] if end < len(listed) else ()
    return StageModule(tuple(calls), modules, before, stashed[first], leaves)


@attrs.frozen(eq=False)
class LayerCall:
    """One layer of a stage, and how to call it.

    `label` is its name in messages. It is a `function`, a `skip`, or a module, which is looked up
    by `name` at every call, so that it may be exchanged. `use`, if any, is called with the module
    and the value.
    """

    name: str
    label: str
    function: Callable[..., Any] | None = None
    use: Callable[..., Any] | None = None
    skip: Stash | Pop | None = None


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
        calls: tuple[LayerCall, ...],
        modules: Mapping[str, nn.Module],
        before: str,
        enters: tuple[str, ...] = (),
        leaves: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self._calls, self._before = calls, before
        self._enters, self._leaves = enters, leaves
        self._conventions: dict[Hashable, CallingConvention] = {}
        self._names: dict[Hashable, frozenset[str]] = {}
        for name, module in modules.items():
            _attach(self, name, module)

    def forward(self, given: Any, /, **beside: Any) -> Any:
        """Call the layers."""
        taken = self._takers(beside) if beside else {}
        aside: dict[str, Any] = {}
        value = given
        if self._enters:
            value, *entered = given
            aside.update(zip(self._enters, entered, strict=True))
        before = self._before
        for call in self._calls:
            if isinstance(call.skip, Stash):
                aside[call.skip.name] = value
                continue
            try:
                value = self._called(call, value, aside, taken.get(call))
            except torch.OutOfMemoryError:
                raise
            except _OF_THE_INPUT as error:
                raise ExecutionError(
                    f"layer {call.label} fails on what {before} gives, {_described(value)}: "
                    f"{type(error).__name__}: {error}{_hint(call, value)}",
                    cause=error,
                ) from error
            before = f"layer {call.label}"
        if self._leaves:
            return (value, *(aside[name] for name in self._leaves))
        return value

    def _called(
        self,
        call: LayerCall,
        value: Any,
        aside: Mapping[str, Any],
        beside: Mapping[str, Any] | None,
    ) -> Any:
        if isinstance(call.skip, Pop):
            return call.skip.join(value, aside[call.skip.name])
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
        if key not in self._conventions:
            self._conventions[key] = convention_of(layer, value, beside)
        return self._conventions[key](layer, value, beside)

    def _layer(self, call: LayerCall) -> Callable[..., Any]:
        return self.get_submodule(call.name) if call.function is None else call.function

    def _takers(self, beside: Mapping[str, Any]) -> dict[LayerCall, dict[str, Any]]:
        """Find the layers that take the values which the stage gets beside its input."""
        found = {}
        for call in self._calls:
            if call.skip is None:
                layer = call.use or self._layer(call)
                if (key := (call, type(layer))) not in self._names:
                    self._names[key] = _parameters(layer)
                found[call] = {x: beside[x] for x in beside if x in self._names[key]}
        untaken = set(beside).difference(*found.values())
        if untaken:
            raise ExecutionError(
                f"no layer of this stage, {', '.join(call.label for call in self._calls)}, has a "
                f"parameter named {' or '.join(sorted(untaken))}, which stage_inputs= gives it"
            )
        return found


def _hint(call: LayerCall, value: Any) -> str:
    """What a function that uses a tied layer may have been written against."""
    if call.use is None or isinstance(value, Tensor):
        return ""
    kind = type(value).__name__
    return (
        f"; the function of .tied(key, use) is called as use(layer, x), x being all of the {kind}"
    )


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


def _described(value: Any) -> str:
    """Describe a layer's input by its types and shapes."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_described(v)}" for key, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_described, value)) + ")"
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    inside = f" of {', '.join(map(_described, tensors))}" if tensors else ""
    return f"{type(value).__name__}{inside}"
