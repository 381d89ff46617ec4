"""From a building block to a program: it is repeated, squeezed, and its gaps are filled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from schedir.ir import Action, Ints
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
    order, limit = _squeezed(one, pipe.microbatches)
    return weights_put_off(one, order, limit, costs)


def _squeezed(block: Block, microbatches: int) -> tuple[list[list[Run]], int]:
    """What each rank runs, in the order of its slots, and the most activations that a rank holds.

    `slots[n][m]` is the slot in which microbatch m runs action n, a BACKWARD_WEIGHT at first in the
    first one that is free. `taken` has a byte for each slot of a rank, not 0 where the rank works;
    `live` the activations that a rank holds in a slot, of which none may become more than `limit`.
    """
    rank, length, change = block.rank, block.length, block.change
    # Whatever is put off to the end finds room there.
    end = max(block.starts) + (microbatches + 1) * block.interval
    taken = [bytearray(end) for _ in range(block.ranks)]
    live: Ints = np.zeros((block.ranks, end), np.int64)
    slots: dict[Number, list[int]] = {
        n: [start + m * block.interval for m in range(microbatches)]
        for n, start in enumerate(block.starts)
    }

    def runs() -> list[Run]:
        every = ((n, m) for n in slots for m in range(len(slots[n])))
        return sorted(every, key=lambda run: slots[run[0]][run[1]])

    def take(n: Number, slot: int, byte: bytes = b"\1") -> None:
        taken[rank[n]][slot : slot + length[n]] = byte * length[n]

    def take_free(n: Number, low: int, high: int) -> int:
        slot = taken[rank[n]].find(bytes(length[n]), low, high)
        take(n, slot)
        return slot

    def count(n: Number, slot: int, until: int) -> None:
        """Count action n in `slot` and no longer, or not yet, in `until`."""
        after = 0 if change[n] > 0 else length[n]  # an activation is held to the end of its last
        live[rank[n], slot + after : until + after] += change[n]

    listed = runs()
    for n, m in listed:
        take(n, slots[n][m])
    for n, m in listed:
        if not change[n]:
            weight = n + block.stages
            slots.setdefault(weight, []).append(take_free(weight, slots[n][m] + 1, end))
    for n, m in runs():
        count(n, slots[n][m], end)
    limit = int(live.max())
    for n, m in runs():
        slot = slots[n][m]
        need = n - (1 if n < 2 * block.stages else block.stages)
        after_input = slots[need][m] + length[need] if n else 0
        earliest = max(after_input, slots[n][m - 1] + length[n] if m else 0)
        if earliest < slot and change[n] > 0:
            full = live[rank[n], earliest:slot] >= limit
            if full.any():
                earliest += len(full) - int(full[::-1].argmax())
        if earliest < slot:
            take(n, slot, b"\0")
            slots[n][m] = take_free(n, earliest, slot + length[n])
            count(n, slots[n][m], slot)
    order: list[list[Run]] = [[] for _ in range(block.ranks)]
    for n, m in runs():
        order[rank[n]].append((n, m))
    return order, limit
