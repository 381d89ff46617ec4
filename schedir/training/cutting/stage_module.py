"""The module of one stage: some of a model's layers, called one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedir.errors import ExecutionError
from schedir.runtime.boundaries.calling import CallingConvention, convention_of
from schedir.training.cutting.layers import Pop, Stash

_OF_THE_INPUT = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""The errors that layers raise for an input that they do not take."""


@attrs.frozen(eq=False)
class Link:
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
        links: tuple[Link, ...],
        modules: Mapping[str, nn.Module],
        before: str,
        enters: tuple[str, ...] = (),
        leaves: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self._links, self._before = links, before
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
        for link in self._links:
            if isinstance(link.skip, Stash):
                aside[link.skip.name] = value
                continue
            try:
                value = self._called(link, value, aside, taken.get(link))
            except torch.OutOfMemoryError:
                raise
            except _OF_THE_INPUT as error:
                raise ExecutionError(
                    f"layer {link.label} fails on what {before} gives, {_described(value)}: "
                    f"{type(error).__name__}: {error}{_hint(link, value)}",
                    cause=error,
                ) from error
            before = f"layer {link.label}"
        if self._leaves:
            return (value, *(aside[name] for name in self._leaves))
        return value

    def _called(
        self, link: Link, value: Any, aside: Mapping[str, Any], beside: Mapping[str, Any] | None
    ) -> Any:
        if isinstance(link.skip, Pop):
            return link.skip.join(value, aside[link.skip.name])
        layer = self._layer(link)
        if link.use is not None:
            return link.use(layer, value, **beside or {})
        if isinstance(value, Tensor) and not beside:
            return layer(value)
        # Finding out how a layer takes a value takes 30 µs, so it is kept by the value's form.
        form: object = None
        if isinstance(value, (Mapping, tuple, list)):
            form = tuple(value) if isinstance(value, Mapping) else len(value)
        key = link, type(layer), type(value), form, tuple(beside or ())
        if key not in self._conventions:
            self._conventions[key] = convention_of(layer, value, beside)
        return self._conventions[key](layer, value, beside)

    def _layer(self, link: Link) -> Callable[..., Any]:
        return self.get_submodule(link.name) if link.function is None else link.function

    def _takers(self, beside: Mapping[str, Any]) -> dict[Link, dict[str, Any]]:
        """Find the layers that take the values which the stage gets beside its input."""
        found = {}
        for link in self._links:
            if link.skip is None:
                layer = link.use or self._layer(link)
                if (key := (link, type(layer))) not in self._names:
                    self._names[key] = _parameters(layer)
                found[link] = {x: beside[x] for x in beside if x in self._names[key]}
        untaken = set(beside).difference(*found.values())
        if untaken:
            raise ExecutionError(
                f"no layer of this stage, {', '.join(link.label for link in self._links)}, has a "
                f"parameter named {' or '.join(sorted(untaken))}, which stage_inputs= gives it"
            )
        return found


def _hint(link: Link, value: Any) -> str:
    """What a function that uses a tied layer may have been written against."""
    if link.use is None or isinstance(value, Tensor):
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
