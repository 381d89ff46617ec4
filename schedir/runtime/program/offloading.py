"""OFFLOAD and RELOAD as bound calls: they move a forward's saved tensors to the host and back.

    rank's stream     F0 ─mark─┐   F1 …      ┌─ new memory ─mark─┐  F2   ┌─ B0
    copies' stream             └─ out 0 ─────┘                   └─ in 0 ─┘

The memory that a copy out reads is held until the next copy out, or the end of the call. Then the
rank's stream waits for the copy, so the memory is not reused too early. The host's memory is reused
as soon as the copy back is queued, because one stream makes all copies of a rank.

Some tensors never move: parameters and buffers, the user's tensors, and the stage's input, a leaf
that stays until the backward is over because autograd accumulates its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from schedir.runtime.accelerator import Accelerator, Mark
from schedir.runtime.memory import Held, Saved
from schedir.runtime.program.instruction import Bound
from schedir.runtime.stage.stage import Cell, Stage


class Copier:
    """The copies of one rank, in the order of its list, and the host's memory for them.

    It keeps as many buffers of each size as are in use at the same time.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._stream = accelerator.stream()
        self._buffers: dict[int, list[Tensor]] = {}
        self._taken: set[int] = set()
        self._latest = accelerator.mark()
        self._leaving: tuple[Mark, Sequence[Tensor]] | None = None

    def out(self, memories: Sequence[Tensor]) -> list[Tensor]:
        """Copies of these bytes on the host."""
        if self._leaving is not None:
            self._leaving[0].wait()
        copies = [self._take(memory.numel()) for memory in memories]
        self._copy(zip(copies, memories, strict=True))
        # A host that does the copies itself has done them.
        self._leaving = (self._latest, memories) if self.accelerator.queues else None
        return copies

    def back(self, copies: Sequence[Tensor]) -> tuple[list[Tensor], Mark]:
        """These bytes on the device again, and when they are there; the copies are given back."""
        device = self.accelerator.device
        memories = [torch.empty(copy.numel(), dtype=torch.uint8, device=device) for copy in copies]
        self._copy(zip(memories, copies, strict=True))
        for copy in copies:
            self._buffers[copy.numel()].append(copy)
        return memories, self._latest

    def end(self) -> None:
        """Forget what has left: the current stream comes after all copies."""
        self._latest.wait()
        self._leaving = None

    def trim(self) -> None:
        """Let go of sizes that were not asked for: a call is over."""
        self.end()
        taken, self._taken = self._taken, set()
        self._buffers = {size: own for size, own in self._buffers.items() if size in taken}

    def _take(self, size: int) -> Tensor:
        self._taken.add(size)
        buffers = self._buffers.setdefault(size, [])
        return buffers.pop() if buffers else self.accelerator.host_memory(size)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """On the copies' stream, after all that the current one was told."""
        ready = self.accelerator.mark()
        with self.accelerator.on(self._stream):
            ready.wait()
            for to, of in pairs:
                to.copy_(of, non_blocking=True)
            self._latest = self.accelerator.mark()


def saving(cell: Cell, run: Bound) -> Bound:
    """The forward of a cell, so that what it saves can be moved."""

    def saved() -> None:
        cell.saved = Saved()
        with cell.saved.hooks():
            run()

    return saved


def offload_activation(cell: Cell, stage: Stage, copier: Copier) -> Bound:
    """OFFLOAD: move what the cell's forward has saved to the host."""

    def call() -> None:
        saved = cell.saved
        assert saved is not None  # the F or R before it has left that
        beside = cell.batch, cell.extra, cell.target, cell.loss_keywords
        held_elsewhere = [
            *(tensor for module in stage.modules for tensor in module.buffers()),
            *(*stage.weights.newest, *stage.weights.copies),
            *(*cell.leaves, *tree_leaves(beside)),
        ]
        together = saved.movable(held_elsewhere, copier.accelerator.device)
        copies = copier.out([_bytes_of(each[0]) for each in together])
        saved.away = list(zip(copies, together, strict=True))
        for copy, each in saved.away:
            for held in each:
                held.move(copy, away=True)

    return call


def reload_activation(cell: Cell, copier: Copier) -> Bound:
    """RELOAD: move it back to the device, to memory of its own; the backward waits for that."""

    def call() -> None:
        saved = cell.saved
        assert saved is not None  # its OFFLOAD has left that
        away, saved.away = saved.away, []
        memories, saved.arrived = copier.back([copy for copy, _ in away])
        saved.memories = memories
        for memory, (_, together) in zip(memories, away, strict=True):
            for held in together:
                held.move(memory, away=False)

    return call


def using(cell: Cell, accelerator: Accelerator, run: Bound) -> Bound:
    """The backward of a cell, once what its forward has saved is back."""

    def used() -> None:
        saved = cell.saved
        assert saved is not None  # its RELOAD has left that
        if saved.arrived is not None:
            saved.arrived.wait()
        for memory in saved.memories:
            accelerator.used(memory)  # it may run beside the rank's stream
        saved.memories = []
        run()
        cell.saved = None

    return used


def _bytes_of(held: Held) -> Tensor:
    """All of the memory that a tensor lies in."""
    tensor = held.tensor
    assert tensor is not None  # asked of what is there
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    with torch.no_grad():
        return tensor.as_strided((length,), (1,), 0).view(torch.uint8)
