"""Cut a list of layers into the stages of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from schedir.errors import ExecutionError
from schedir.ir import Schedule
from schedir.training.cutting.cuts import cut_of
from schedir.training.cutting.deferred import Deferred, Making, type_name
from schedir.training.cutting.layers import Layer, Layers, Pop, Stash, kept_before, layers_of
from schedir.training.cutting.shared_parameters import (
    Inventory,
    inventory_of,
    with_own_parameters,
)
from schedir.training.cutting.stage_module import Link, StageModule
from schedir.training.cutting.stages import Span, Stages, StageSummary, held_stages


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
    """Cut a model, given as its layers in order, into stages; none is left out, none is empty.

    `layers` is an `nn.Sequential`, a sequence, or a mapping from names to layers. A layer is a
    module, any function of the layer's input, `deferred(make, …)`, or `stash` and `pop` of a skip
    connection. `stages` is a schedule, of which the stages of this process are made (see
    `held_stages`, which `rank` is for), or a number, for all of so many: `partition(layers, 1)[0]`
    is the whole model. State dicts have the names of the whole: "3.weight" is the weight of layer
    3, "head.weight" that of the layer named head.

    It is cut in one of these ways:

    - `by="parameters"`, the default: as many parameters on each stage as can be; or "uniform": as
      many layers. These and `costs` are the optimal contiguous cut, see `balanced`.
    - `by="type:REGEX"`: as many layers whose class, or whose function's name, matches the regular
      expression, in any case (DeepSpeed's partition_method).
    - `by="Et*3|(t*2|)*6,tL"`: Megatron-LM's --pipeline-model-parallel-layout, with `|` between
      stages. `t` are the layers of the longest run of one class, `E` is all before it, each `m`
      one layer after it, and `L` is the rest, if any: norm and head. Where there are not as many
      `t` as that, each letter is one layer, of which there must be as many.
    - `costs`: one number per layer, of any unit; those of `measured_costs`, say.
    - `boundaries`: the first layer of each stage but the first, by number or name.

    Deferred layers are made where they are owned, on `device`, from random numbers of torch seeded
    by `seed` and the layer's name, so that weights depend neither on the cut nor on what was drawn.
    With `init` they are made on the device meta, as modules that are given may be, and get memory
    there, and values by `init(module)` of every module in them: `lambda m: m.reset_parameters()`.
    Modules are used as they are, moved to `device` if that is given; only of layers that share
    parameters across stages of this process the later ones are copied. Such parameters, and those
    of layers tied by key, are the result's `ties`.

    A layer is called with what the one before returns, as the executor calls stages: a tuple by
    position and a mapping by keyword where it takes it so. What `stage_inputs=` of a step gives to
    a stage by name goes to each of its layers that has a parameter of that name.

    Every rank must cut the same list in the same way, which the executor compares.

    Raises ExecutionError for what can't be cut so, naming the layer.
    """
    listed = layers_of(layers)
    number = stages.stages if isinstance(stages, Schedule) else stages
    kept = kept_before([layer.given for layer in listed])
    inventory = inventory_of(listed)
    spans, told = cut_of(inventory, number, by, costs, boundaries)
    if isinstance(stages, Schedule):
        here: Sequence[int] = held_stages(stages, rank)
    elif rank is None:
        here = range(number)
    else:
        raise ExecutionError("rank= says whose stages to make of a schedule; a number has no ranks")
    ties = inventory.ties(spans)
    if init is not None:
        _check_untied(inventory)
    making = Making(seed, torch.device(device) if device is not None else None, init)
    own = with_own_parameters(listed, spans, here)
    summaries = tuple(
        StageSummary(
            tuple(layer.name for layer in listed[first:end]),
            inventory.parameters((first, end)),
            None if told is None else sum(told[first:end]),
            tuple(type_name(layer.given) for layer in listed[first:end]),
        )
        for first, end in spans
    )
    modules = {stage: stage_module(own, spans[stage], kept, making) for stage in here}
    return Stages(modules, ties, summaries)


def stage_module(
    listed: Sequence[Layer], span: Span, kept: Sequence[tuple[str, ...]], making: Making
) -> StageModule:
    """Make the module of one stage."""
    first, end = span
    modules: dict[str, nn.Module] = {}
    made: dict[object, object] = {}
    links = []
    for layer in listed[first:end]:
        given, use = layer.given, None
        if isinstance(given, (Stash, Pop)):
            links.append(Link(layer.name, str(layer), skip=given))
            continue
        if isinstance(given, Deferred):
            use, key = given.use, given.key or layer
            if key not in made:
                made[key] = making.made(layer.name, given)
            given = made[key]
        elif isinstance(given, nn.Module):
            given = making.settled(layer.name, given)
        if isinstance(given, nn.Module):
            modules[layer.name] = given
            links.append(Link(layer.name, str(layer), use=use))
        else:
            links.append(Link(layer.name, str(layer), function=given))
    before = f"layer {listed[first - 1]}" if first else "the model's input"
    leaves = kept[end] if end < len(listed) else ()
    return StageModule(tuple(links), modules, before, kept[first], leaves)


def _check_untied(inventory: Inventory) -> None:
    """Raise ExecutionError where layers on meta share a parameter, as init gives it two values."""
    seen: dict[object, Layer] = {}
    for layer, held in zip(inventory.layers, inventory.holdings, strict=True):
        if not isinstance(layer.given, nn.Module) or not any(
            parameter.is_meta for parameter in layer.given.parameters()
        ):
            continue
        for holding in held:
            other = seen.setdefault(holding.identity, layer)
            if other is not layer:
                raise ExecutionError(
                    f"layers {other} and {layer} share a parameter on the device meta, which init "
                    "would give two values; list them as deferred(…).tied(key)"
                )
