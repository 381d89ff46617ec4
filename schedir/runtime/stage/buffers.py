"""A module's buffers and attributes, under activation recomputation.

A forward that runs again finds these (BatchNorm's statistics, an RNN's hidden state) as they were
before its first run, and its changes to them are dropped. So they count each forward once, in the
order of the stage's forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedir.runtime.memory import INTERNAL

_SMALL = 1 << 16
_ABSENT = object()


@attrs.frozen
class State:
    """An attribute of a module that a forward changes."""

    module: nn.Module
    name: str


@attrs.frozen(eq=False)
class Kept:
    """The state before a forward: the buffers, and the attributes that it may change."""

    buffers: list[Tensor | None]
    attributes: dict[State, Any]


class Buffers:
    """The buffers and attributes of one stage's module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = [
            (holder._buffers, name) for holder in module.modules() for name in holder._buffers
        ]
        self._unchanged: set[int] = set()  # large ones that no forward has been seen to change
        self._changing: dict[State, bool] = {}  # attributes that one has; True where in place

    @contextmanager
    def keeping(self, all_attributes: bool) -> Iterator[Kept]:
        """Run a forward inside; gives what is there before it.

        Of the attributes `all_attributes` are kept, to see which the forward changes, or those that
        an earlier one has been seen to change. Small buffers are always copied, since batch_norm
        changes its own without raising their version; large ones, such as masks, only as long as
        their version changes.
        """
        before = [holder[name] for holder, name in self._places]
        versions = [None if buffer is None else buffer._version for buffer in before]
        found = {state: _value(state) for state in self._all()} if all_attributes else {}
        looks = {state: _look(value) for state, value in found.items()}
        deep = dict.fromkeys(found, True) if all_attributes else self._changing
        with torch.no_grad():
            buffers = [
                buffer if buffer is None or index in self._unchanged else buffer.clone()
                for index, buffer in enumerate(before)
            ]
            kept = Kept(buffers, {state: _snapshot(_value(state), deep[state]) for state in deep})
            as_found = {state: _snapshot(value, deep=False) for state, value in found.items()}
        yield kept
        self._unchanged.clear()
        for index, (buffer, version) in enumerate(zip(before, versions, strict=True)):
            if buffer is not None and buffer.numel() > _SMALL and buffer._version == version:
                buffers[index] = buffer
                self._unchanged.add(index)
        for state in self._all() if all_attributes else ():
            if state not in looks:  # the forward has made it
                kept.attributes[state] = _ABSENT
                self._changing.setdefault(state, False)
            elif looks[state] == _look(_value(state)):
                del kept.attributes[state]
            else:
                in_place = looks[state] != _look(as_found[state])
                self._changing[state] = in_place or self._changing.get(state, False)
                if not in_place:
                    kept.attributes[state] = as_found[state]

    @contextmanager
    def as_kept(self, kept: Kept) -> Iterator[None]:
        """Run a forward again inside, on what `keeping` gave for it."""
        now = [holder[name] for holder, name in self._places]
        attributes = {state: _value(state) for state in kept.attributes}
        self._install(kept.buffers, kept.attributes)
        try:
            yield
        finally:
            self._install(now, attributes)

    def _install(self, buffers: Sequence[Tensor | None], attributes: Mapping[State, Any]) -> None:
        for (holder, name), buffer in zip(self._places, buffers, strict=True):
            holder[name] = buffer
        for state, value in attributes.items():
            if value is _ABSENT:
                vars(state.module).pop(state.name, None)
            else:
                vars(state.module)[state.name] = value

    def _all(self) -> list[State]:
        return [
            State(part, name)
            for part in self._module.modules()
            for name in vars(part)
            if name not in INTERNAL
        ]


def _value(state: State) -> Any:
    return vars(state.module).get(state.name, _ABSENT)


def _look(value: Any) -> list[tuple[int, int]]:
    """What an attribute holds, and the tensors' versions, to tell whether it has changed."""
    leaves = sorted(value, key=id) if isinstance(value, set) else pytree.tree_leaves(value)
    return [(id(leaf), leaf._version if isinstance(leaf, Tensor) else 0) for leaf in leaves]


def _snapshot(value: Any, deep: bool) -> Any:
    """A copy of an attribute's containers; with `deep`, of its tensors too."""
    if isinstance(value, set):
        return value.copy()
    return pytree.tree_map(_copy_of if deep else lambda leaf: leaf, value)  # copies containers


def _copy_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf
