"""Deferred layers, which are made later, and only where they are owned."""

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
        """Tie the layer to others: all with the same `key` share all their parameters.

        They are made alike, and their weights are those of the seed for the key. `use(layer, x)`
        is what is called instead of `layer(x)`: an embedding's transposed weight for a head, say.
        """
        if not isinstance(key, str) or not key:
            raise ExecutionError(f"a tied layer's key must be a string, not {key!r}")
        return attrs.evolve(self, key=key, use=use)


def deferred(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Deferred:
    """A layer for `partition` that is made on the rank that owns it, and on no other.

    `make(*args, **kwargs)` gives the layer: `deferred(nn.Linear, 8, 8)`. Everywhere it is made on
    the device meta, one layer at a time, to count its parameters; where it is owned also for good,
    from random numbers of torch seeded by `partition(seed=…)` and its name, so that its weights do
    not depend on the cut. DeepSpeed's LayerSpec; with `.tied("key")` its TiedLayerSpec.

    Raises ExecutionError where `make` is not callable.
    """
    if not callable(make):
        raise ExecutionError(
            f"deferred takes what makes the layer and its arguments, not {type(make).__name__}"
        )
    if isinstance(make, nn.Module):
        raise ExecutionError(
            "deferred takes what makes the layer, such as nn.Linear, but this "
            f"{type(make).__name__} is made already; list it as it is"
        )
    return Deferred(make, args, kwargs)


@attrs.frozen
class Making:
    """Makes layers for good: on which device, from which seed, and with which initial values.

    Where there is an `init`, layers are made on the device meta, get memory on `device`, and
    `init` is called with every module in them.
    """

    seed: int = 0
    device: torch.device | None = None
    init: Callable[[nn.Module], object] | None = None

    def made(self, name: str, layer: Deferred) -> Any:
        """Make a layer, whatever random numbers were drawn before."""
        with rng(self.seed, number_of(layer.key or name), 0, 0):
            if self.init is not None:
                made = skeleton(name, layer)
                return self._filled(name, made, self.init) if isinstance(made, nn.Module) else made
            with self.device or nullcontext():
                made = _called(name, layer)
            return self._moved(made) if isinstance(made, nn.Module) else made

    def settled(self, name: str, layer: nn.Module) -> nn.Module:
        """Move a layer that was made before to the device; one on meta gets values."""
        if self.init is not None and any(tensor.is_meta for tensor in _tensors(layer).values()):
            with rng(self.seed, number_of(name), 0, 0):
                return self._filled(name, layer, self.init)
        return self._moved(layer)

    def _moved(self, layer: nn.Module) -> nn.Module:
        return layer if self.device is None else layer.to(self.device)

    def _filled(
        self, name: str, layer: nn.Module, init: Callable[[nn.Module], object]
    ) -> nn.Module:
        """Give a layer on meta memory and values, and raise where one is left unset."""
        shared = tied_names(layer)
        layer.to_empty(device=self.device or torch.get_default_device())
        for first, *others in shared:  # to_empty parts what is one parameter
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
                f"layer {name}: init has given no values to {', '.join(left)}, which has none of "
                "its own as it was made on the device meta"
            )
        return layer


def skeleton(name: str, layer: Deferred) -> Any:
    """Make a layer on the device meta: it has shapes, and no memory.

    Raises ExecutionError where it can't be made there.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            return _called(name, layer)
        except ExecutionError:
            raise
        except Exception as error:
            raise ExecutionError(
                f"layer {name} can't be made on the device meta, which is how its parameters are "
                f"counted ({type(error).__name__}: {error}); compute what it needs values for "
                "outside, and pass it as an argument",
                cause=error,
            ) from error


def _called(name: str, layer: Deferred) -> Any:
    """Make the layer."""
    made = layer.make(*layer.args, **layer.kwargs)
    if not callable(made):
        raise ExecutionError(
            f"layer {name}: {type_name(layer)} has made no layer but {type(made).__name__}"
        )
    return made


def type_name(layer: object) -> str:
    """The name of a layer's class, or of its function, or of what makes it."""
    if isinstance(layer, Deferred):
        layer = layer.make
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(layer, "__name__", type(layer).__name__)


def number_of(text: str) -> int:
    """Give each text a number of its own; `hash` differs from process to process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def tied_names(model: nn.Module) -> list[list[str]]:
    """The parameters that a model has under several names, by these."""
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
    # Masks may well be all False; nothing tells.
    return tensor.dtype != torch.bool and bool((tensor == _unset(tensor)).all())
