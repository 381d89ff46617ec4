"""A module for the time of a fake run: what that changes never reaches the user's module.

A forward may count its calls, cache a mask, keep a hidden state or update a buffer; and what it
does, it may do through names that lead to the very module (a method that was replaced, a closure).
So the module's own attributes are exchanged, and given back afterwards:

* tensors, the buffers among them, for fake ones, since an operation on real ones alone, such as
  BatchNorm's `num_batches_tracked.add_(1)`, would run for real; the parameters are read only;
* containers for copies;
* hooks for none, since they are the user's, and would see fake data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import attrs
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Fake: TypeAlias = Callable[[Tensor], Tensor]

INTERNAL = frozenset(vars(nn.Module()))
"""What every module has; all else is its own."""


@attrs.frozen(eq=False)
class State:
    """An attribute that a forward leaves another than it has found; `deep` where it is changed in
    place."""

    module: nn.Module
    name: str
    deep: bool


class StandIn:
    """The attributes of a module and its children while a fake run goes on.

    `fake` gives the fake tensor of a real one.
    """

    def __init__(self, module: nn.Module, fake: Fake) -> None:
        self._real = {part: part.__dict__ for part in module.modules()}
        self._fake = {part: _exchanged(real, fake) for part, real in self._real.items()}
        self._found = {
            (part, name): _look(value)
            for part, fake in self._fake.items()
            for name, value in fake.items()
            if name not in INTERNAL
        }

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The module runs on fake attributes inside."""
        self._install(self._fake)
        try:
            yield
        finally:
            self._install(self._real)

    def _install(self, attributes: dict[nn.Module, dict[str, Any]]) -> None:
        for part, own in attributes.items():
            object.__setattr__(part, "__dict__", own)  # past what modules do to an attribute

    def held(self) -> Iterator[Tensor]:
        """The tensors that the module holds, but for its parameters."""
        for fake in self._fake.values():
            for name, value in fake.items():
                if name == "_buffers" or name not in INTERNAL:
                    yield from _tensors(value)

    def changed(self) -> list[State]:
        """What the runs inside have left another than it was, buffers apart."""
        found = []
        for part, fake in self._fake.items():
            for name, value in fake.items():
                if name in INTERNAL:
                    continue
                before, now = self._found.get((part, name)), _look(value)
                if before is None or [id for id, _ in before] != [id for id, _ in now]:
                    found.append(State(part, name, deep=False))
                elif before != now:
                    found.append(State(part, name, deep=True))
        return found


def _exchanged(real: dict[str, Any], fake: Fake) -> dict[str, Any]:
    def of(tensor: Tensor) -> Tensor:
        # A module may hold a parameter in a list as well, as nn.LSTM does.
        return tensor if isinstance(tensor, nn.Parameter) else fake(tensor)

    found: dict[str, Any] = {}
    for name, value in real.items():
        if name.endswith("_hooks") and isinstance(value, OrderedDict):
            found[name] = OrderedDict()
        elif name in ("_modules", "_parameters"):
            found[name] = value.copy()
        else:
            copied = value.copy() if isinstance(value, set) else value  # pytree copies all others
            found[name] = pytree.tree_map_only(Tensor, of, copied)
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _look(value: Any) -> list[tuple[int, int]]:
    """What an attribute holds, and the tensors' versions, to tell whether it has changed."""
    leaves = sorted(value, key=id) if isinstance(value, set) else pytree.tree_leaves(value)
    return [(id(leaf), leaf._version if isinstance(leaf, Tensor) else 0) for leaf in leaves]
