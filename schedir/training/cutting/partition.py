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
        raise ExecutionError(
            "rank= says which rank's stages of a schedule to make, but a number has no ranks; pass "
            "the schedule in its place"
        )
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
    """Raise ExecutionError if layers on meta share a parameter: init would give it two values."""
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
