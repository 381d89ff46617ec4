"""What a module holds beside its parameters, under activation recomputation.

A forward that is run again finds everything as it was, BatchNorm's statistics and an RNN's hidden
state, and what it does to it is forgotten: so everything counts each forward once, in the order of
the stage's forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from schedir.runtime.boundaries.standin import INTERNAL, State

_SMALL = 1 << 16
_ABSENT = object()


@attrs.frozen(eq=False)
class Kept:
    """What was there before a forward: the buffers, and the attributes that it may change."""

    buffers: Sequence[Tensor | None]
    attributes: Sequence[tuple[State, Any]]


class Statistics:
    """The buffers and attributes of one stage's module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = [
            (holder._buffers, name) for holder in module.modules() for name in holder._buffers
        ]
        self._unchanged: set[int] = set()  # large ones that no forward has been seen to change

    @contextmanager
    def keeping(self, states: Sequence[State] | None) -> Iterator[Kept]:
        """Run a forward inside; gives what is there before it.

        `states` are the attributes that it may change, None for any. Small buffers are always
        copied, since batch_norm changes its own without raising their version; large ones, such
        as masks, only as long as their version changes.
        """
        before = [holder[name] for holder, name in self._places]
        versions = [None if buffer is None else buffer._version for buffer in before]
        if states is None:
            states = self._all()
        with torch.no_grad():
            kept = [
                buffer if buffer is None or index in self._unchanged else buffer.clone()
                for index, buffer in enumerate(before)
            ]
            attributes = [(state, _snapshot(state)) for state in states]
        yield Kept(kept, attributes)
        for index, (buffer, version) in enumerate(zip(before, versions, strict=True)):
            if buffer is not None and buffer.numel() > _SMALL and buffer._version == version:
                kept[index] = buffer
                self._unchanged.add(index)
            else:
                self._unchanged.discard(index)

    @contextmanager
    def as_kept(self, kept: Kept) -> Iterator[None]:
        """Run a forward again inside, on what `keeping` gave for it."""
        now = [holder[name] for holder, name in self._places]
        attributes = [(state, _value(state)) for state, _ in kept.attributes]
        self._install(kept.buffers, kept.attributes)
        try:
            yield
        finally:
            self._install(now, attributes)

    def _install(
        self, buffers: Sequence[Tensor | None], attributes: Sequence[tuple[State, Any]]
    ) -> None:
        for (holder, name), buffer in zip(self._places, buffers, strict=True):
            holder[name] = buffer
        for state, value in attributes:
            if value is _ABSENT:
                vars(state.module).pop(state.name, None)
            else:
                vars(state.module)[state.name] = value

    def _all(self) -> list[State]:
        return [
            State(part, name, deep=True)
            for part in self._module.modules()
            for name in vars(part)
            if name not in INTERNAL
        ]


def _value(state: State) -> Any:
    return vars(state.module).get(state.name, _ABSENT)


def _snapshot(state: State) -> Any:
    """The attribute's value, which nothing that a forward does to it reaches."""
    value = _value(state)
    if isinstance(value, set):
        return value.copy()
    return pytree.tree_map(lambda leaf: _kept(leaf, state.deep), value)  # copies containers


def _kept(leaf: Any, deep: bool) -> Any:
    if deep and isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf
