"""Find the parameters of each layer, and those that several layers or stages share."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence

import attrs
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from schedir.errors import ExecutionError
from schedir.runtime.arguments import TieOf
from schedir.runtime.memory import shared_memory
from schedir.training.cutting.deferred import Deferred, skeleton
from schedir.training.cutting.layers import Layer
from schedir.training.cutting.stages import Span, ties_of


@attrs.frozen
class Holding:
    """A parameter in one layer: its identity, its name in the whole model, and its shape."""

    identity: Hashable
    name: str
    shape: tuple[int, ...]
    size: int


@attrs.frozen
class Inventory:
    """The parameters of each layer, and the running statistics that it keeps."""

    layers: Sequence[Layer]
    holdings: Sequence[tuple[Holding, ...]]
    statistics: Sequence[frozenset[Hashable]]

    def parameters(self, span: Span) -> int:
        """How many numbers the parameters of some layers hold; shared parameters count once."""
        sizes = {h.identity: h.size for held in self.holdings[slice(*span)] for h in held}
        return sum(sizes.values())

    def ties(self, spans: Sequence[Span]) -> tuple[TieOf, ...]:
        """The parameters that several stages hold, by stage and name.

        Raises ExecutionError if stages share running statistics, or memory that is no parameter.
        """
        kept: dict[Hashable, tuple[int, Layer]] = {}
        stages: dict[int, nn.Module] = {}
        for stage, span in enumerate(spans):
            layers = self.layers[slice(*span)]
            stages[stage] = nn.ModuleList(x.given for x in layers if isinstance(x.given, nn.Module))
            for layer, statistics in zip(layers, self.statistics[slice(*span)], strict=True):
                for statistic in statistics:
                    other, first = kept.setdefault(statistic, (stage, layer))
                    if other != stage:
                        raise ExecutionError(
                            f"layers {first} and {layer} share the running statistics of a "
                            f"normalisation, but lie on stages {other} and {stage}, and each would "
                            "keep its own; put both layers on one stage"
                        )
        held = [
            (stage, one.identity, one.name)
            for stage, span in enumerate(spans)
            for of_layer in self.holdings[slice(*span)]
            for one in of_layer
        ]
        ties = ties_of(held)
        tied = {(stage, name) for tie in ties for stage, name in tie}
        known = [x for stage, x, name in held if isinstance(x, int) and (stage, name) in tied]
        if found := shared_memory(stages, known):
            raise ExecutionError(
                f"stages {found[0].stage} and {found[1].stage} share the memory of a tensor of "
                f"shape {list(found[0].tensor.shape)}, but not as one parameter; let both have the "
                "same nn.Parameter, which becomes a tie, or give each layer its own copy"
            )
        return ties


def inventory_of(layers: Sequence[Layer]) -> Inventory:
    """List the parameters of each layer; deferred layers are made on meta, one at a time.

    Raises ExecutionError if layers that are tied by one key have different parameters.
    """
    holdings: list[tuple[Holding, ...]] = []
    statistics: list[frozenset[Hashable]] = []
    of_key: dict[str, tuple[Layer, tuple[Holding, ...]]] = {}
    for number, layer in enumerate(layers):
        module, owner, key = layer.given, None, None
        if isinstance(module, Deferred):
            key = module.key
            owner = ("layer", number) if key is None else ("key", key)
            module = skeleton(layer.name, module)
        if not isinstance(module, nn.Module):
            module = nn.Module()  # a function holds nothing
        held = _holdings(layer.name, module, owner)
        if key is not None:
            _check_alike(key, layer, held, *of_key.setdefault(key, (layer, held)))
        holdings.append(held)
        statistics.append(
            frozenset(
                id(part) if owner is None else (owner, name)
                for name, part in module.named_modules()
                if isinstance(part, _NormBase) and part.track_running_stats
            )
        )
    return Inventory(layers, holdings, statistics)


def _holdings(layer: str, module: nn.Module, owner: Hashable) -> tuple[Holding, ...]:
    """The parameters of a module. `owner` is None for a module that may share them with others."""
    found = []
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        inner = first.setdefault(id(parameter), name)
        identity = id(parameter) if owner is None else (owner, inner)
        # A lazy parameter has no shape yet; the executor says so.
        lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
        shape = () if lazy else tuple(parameter.shape)
        size = 0 if lazy else parameter.numel()
        found.append(Holding(identity, f"{layer}.{name}", shape, size))
    return tuple(found)


def _check_alike(
    key: str, layer: Layer, held: Sequence[Holding], first: Layer, its: Sequence[Holding]
) -> None:
    mine, others = (
        [f"{one.name.removeprefix(f'{name}.')}{list(one.shape)}" for one in all_held]
        for name, all_held in ((layer.name, held), (first.name, its))
    )
    if mine != others:
        raise ExecutionError(
            f"layers {first} and {layer} are tied by {key!r}, but the former has "
            f"{', '.join(others) or 'no parameters'} and the latter "
            f"{', '.join(mine) or 'none'}; make both alike, and pass use= to tied to call them "
            "differently"
        )


def with_own_parameters(
    layers: Sequence[Layer], spans: Sequence[Span], stages: Iterable[int]
) -> list[Layer]:
    """Give each stage its own copy of the parameters that several stages here share.

    The first stage keeps the original. The others get equal copies, in copied modules whose other
    tensors are the same.
    """
    owner: dict[int, int] = {}
    found = list(layers)
    for stage in stages:
        memo: dict[int, object] = {}
        for number in range(*spans[stage]):
            module = layers[number].given
            if not isinstance(module, nn.Module):
                continue
            own = {id(p): owner.setdefault(id(p), stage) == stage for p in module.parameters()}
            if not all(own.values()):
                tensors = (*module.parameters(), *module.buffers())
                memo.update((id(x), x) for x in tensors if own.get(id(x), True))
                found[number] = attrs.evolve(layers[number], given=copy.deepcopy(module, memo))
    return found
