"""From a building block to a program: it is repeated, squeezed, and its gaps are filled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from schedir.ir import Action, Ints, Kind
from schedir.library.authoring import Pipeline
from schedir.library.blocks import Block, Number, Run, block_of
from schedir.library.bubble_filling import weights_put_off

if TYPE_CHECKING:
    from schedir.simulator import CostModel


def repeat_block(
    pipe: Pipeline, block: Mapping[Action, int], costs: CostModel | None = None
) -> tuple[tuple[Action, ...], ...]:
    """The compute of every rank, without updates, from that of one microbatch (Qi et al., arXiv
    2405.15362, building blocks and squeezing).

    `block` holds the slot in which microbatch 0 runs the FORWARD, and the BACKWARD or
    BACKWARD_INPUT, of every stage. A FORWARD takes one slot, as does a BACKWARD_INPUT, for which
    there is a BACKWARD_WEIGHT of one slot later on; a BACKWARD takes two. Microbatch m runs m
    intervals later, an interval being the slots that the busiest rank works for a microbatch.

    The repeated block is squeezed: one by one, in the order of their slots, actions move to the
    earliest slot that is free and after their inputs, and that does not raise the most activations
    that a rank holds at once above what the repeated block needs. Then the BACKWARD_WEIGHTs are put
    off: one runs where its rank would wait otherwise, or lacks the memory for its next FORWARD.
    Where a rank waits is told from `costs`, without them from the slots.

    Raises ValueError for a block that has not just these actions, in which one runs before its
    input is there or meets another one in a slot of its rank once it is repeated, and for a stage
    on several ranks; and for costs of other stages or links.
    """
    one = block_of(pipe, block)
    program = _Squeezed(one, pipe.microbatches)
    program.squeeze()
    return tuple(
        tuple(Action(one.actions[n].kind, one.actions[n].stage, m) for n, m in runs)
        for runs in weights_put_off(one, program.order(), program.limit, costs)
    )


class _Squeezed:
    """The repeated block, in slots: `slots[n][m]` is the one in which microbatch m runs action n.

    `taken` has a byte for each slot of a rank, not 0 where the rank works; `live` the activations
    that a rank holds in a slot, of which none may become more than `limit`.
    """

    def __init__(self, block: Block, microbatches: int) -> None:
        """The block as it is, each BACKWARD_WEIGHT in the first slot that is free."""
        self.block = block
        self.slots: dict[Number, list[int]] = {
            n: [start + m * block.interval for m in range(microbatches)]
            for n, start in enumerate(block.starts)
        }
        # Whatever is put off to the end finds room there.
        end = max(block.starts) + (microbatches + 1) * block.interval
        self.taken = [bytearray(end) for _ in range(block.ranks)]
        for n, slots in self.slots.items():
            for slot in slots:
                self._take(n, slot)
        for n, m in self._runs():
            if block.actions[n].kind is Kind.BACKWARD_INPUT:
                weights = n + block.stages
                slot = self._free(weights, self.slots[n][m] + 1, end)
                self.slots.setdefault(weights, []).append(slot)
                self._take(weights, slot)
        self.live: Ints = np.zeros((block.ranks, end), np.int64)
        for n, m in self._runs():
            self._count(n, self.slots[n][m], end)
        self.limit = int(self.live.max())

    def squeeze(self) -> None:
        """Move every action to the earliest slot that it can have."""
        for n, m in self._runs():
            slot = self.slots[n][m]
            earliest = self._earliest(n, m)
            if earliest < slot and self.block.is_forward(n):
                full = self.live[self.block.rank[n], earliest:slot] >= self.limit
                if full.any():
                    earliest += len(full) - int(full[::-1].argmax())
            if earliest < slot:
                self._take(n, slot, 0)
                self.slots[n][m] = self._free(n, earliest, slot + self.block.length[n])
                self._take(n, self.slots[n][m])
                self._count(n, self.slots[n][m], slot)

    def order(self) -> list[list[Run]]:
        """What each rank runs, in the order of the slots."""
        lists: list[list[Run]] = [[] for _ in range(self.block.ranks)]
        for run in self._runs():
            lists[self.block.rank[run[0]]].append(run)
        return lists

    def _runs(self) -> list[Run]:
        """All actions, in the order of the slots that they now have."""
        return sorted(
            ((n, m) for n, slots in self.slots.items() for m in range(len(slots))),
            key=lambda run: self.slots[run[0]][run[1]],
        )

    def _earliest(self, n: Number, m: int) -> int:
        """The first slot after the input of action n, and after action n of microbatch m - 1."""
        block = self.block
        after_input = 0
        if n:
            need = block.need_of(n)
            after_input = self.slots[need][m] + block.length[need]
        return max(after_input, self.slots[n][m - 1] + block.length[n] if m else 0)

    def _free(self, n: Number, low: int, high: int) -> int:
        return self.taken[self.block.rank[n]].find(bytes(self.block.length[n]), low, high)

    def _take(self, n: Number, slot: int, byte: int = 1) -> None:
        length = self.block.length[n]
        self.taken[self.block.rank[n]][slot : slot + length] = bytes([byte] * length)

    def _count(self, n: Number, slot: int, until: int) -> None:
        """Count action n in `slot` and no longer, or not yet, in `until`."""
        block = self.block
        if block.is_forward(n):
            self.live[block.rank[n], slot:until] += 1
        elif block.actions[n].kind is not Kind.BACKWARD_INPUT:
            after = block.length[n]
            self.live[block.rank[n], slot + after : until + after] -= 1
