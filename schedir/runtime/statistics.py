"""A module's buffers, such as BatchNorm's statistics, under activation recomputation.

A forward that is run again finds the buffers as they were, and what it does to them is forgotten:
so every statistic counts each forward once, in the order of the stage's forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_SMALL = 1 << 16


class Statistics:
    """The buffers of one stage's module."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (holder._buffers, name) for holder in module.modules() for name in holder._buffers
        ]
        self._tables: set[int] = set()  # large ones that no forward has been seen to change

    @contextmanager
    def keeping(self) -> Iterator[list[Tensor | None]]:
        """Run a forward inside; gives the buffers as they are before it.

        Small ones are always copied, since batch_norm changes its own without a trace in their
        version; large ones, such as masks, only as long as their version changes.
        """
        before = [holder[name] for holder, name in self._places]
        versions = [None if buffer is None else buffer._version for buffer in before]
        with torch.no_grad():
            kept = [
                buffer if buffer is None or index in self._tables else buffer.clone()
                for index, buffer in enumerate(before)
            ]
        yield kept
        for index, (buffer, version) in enumerate(zip(before, versions, strict=True)):
            if buffer is not None and buffer.numel() > _SMALL and buffer._version == version:
                kept[index] = buffer
                self._tables.add(index)
            else:
                self._tables.discard(index)

    @contextmanager
    def as_kept(self, kept: Sequence[Tensor | None]) -> Iterator[None]:
        """Run a forward again inside, on the buffers that `keeping` gave for it."""
        now = [holder[name] for holder, name in self._places]
        self._install(kept)
        try:
            yield
        finally:
            self._install(now)

    def _install(self, buffers: Sequence[Tensor | None]) -> None:
        for (holder, name), buffer in zip(self._places, buffers, strict=True):
            holder[name] = buffer
