"""Deferred layers: made later, and only on the rank that owns them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from schedir.errors import ExecutionError
from schedir.runtime import rng


@attrs.frozen(eq=False)
class Deferred:
    """A layer that `make(*args, **kwargs)` makes; see `deferred`."""

    make: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
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
    return Deferred(make, args, kwargs)


@attrs.frozen
class Making:
    """Makes layers with memory on `device`, with random numbers from `seed`.

    With an `init`, layers are made on the device meta, get memory on `device`, and `init` is called
    with every module in them.
    """

    seed: int = 0
    device: torch.device | None = None
    init: Callable[[nn.Module], object] | None = None

    def made(self, name: str, layer: Deferred) -> Any:
        """Make a layer from its own random numbers."""
        with rng(self.seed, number_of(layer.key or name), 0, 0):
            if self.init is not None:
                made = skeleton(name, layer)
                return self._filled(name, made, self.init) if isinstance(made, nn.Module) else made
            with self.device or nullcontext():
                made = _called(name, layer)
            return self._moved(made) if isinstance(made, nn.Module) else made

    def settled(self, name: str, layer: nn.Module) -> nn.Module:
        """Move a module to the device; one on meta gets values if there is an `init`."""
        if self.init is not None and any(tensor.is_meta for tensor in _tensors(layer).values()):
            with rng(self.seed, number_of(name), 0, 0):
                return self._filled(name, layer, self.init)
        return self._moved(layer)

    def _moved(self, layer: nn.Module) -> nn.Module:
        return layer if self.device is None else layer.to(self.device)

    def _filled(
        self, name: str, layer: nn.Module, init: Callable[[nn.Module], object]
    ) -> nn.Module:
        """Give a layer on meta memory and values. Raises ExecutionError if a tensor stays unset."""
        shared = tied_names(layer)
        layer.to_empty(device=self.device or torch.get_default_device())
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
        return layer


def skeleton(name: str, layer: Deferred) -> Any:
    """Make a layer on the device meta: with shapes, without memory.

    Raises ExecutionError if it can't be made there.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            return _called(name, layer)
        except ExecutionError:
            raise
        except Exception as error:
            raise ExecutionError(
                f"layer {name} can't be made on the device meta, where schedir counts its "
                f"parameters ({type(error).__name__}: {error}); if making it needs a tensor's "
                "values, compute them outside, and pass the result as an argument",
                cause=error,
            ) from error


def _called(name: str, layer: Deferred) -> Any:
    """Make the layer."""
    made = layer.make(*layer.args, **layer.kwargs)
    if not callable(made):
        raise ExecutionError(
            f"layer {name}: {type_name(layer)} has made no layer, a module or function, but "
            f"{type(made).__name__}"
        )
    return made


def type_name(layer: object) -> str:
    """The name of a layer's class or function; of a deferred layer, the one that makes it."""
    if isinstance(layer, Deferred):
        layer = layer.make
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(layer, "__name__", type(layer).__name__)


def number_of(text: str) -> int:
    """Hash a text to a number, the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that a model has under several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


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
