"""From a building block to a schedule: repeat the block, squeeze it, and fill its gaps."""

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
    """The compute of every rank, without updates, from the actions of one microbatch.

    The method is that of Qi et al. (building blocks and squeezing, arXiv 2405.15362). `block` holds
    the slot in which microbatch 0 runs the FORWARD and the BACKWARD or BACKWARD_INPUT of every
    stage. A FORWARD takes one slot, a BACKWARD two, and a BACKWARD_INPUT one; its BACKWARD_WEIGHT
    takes one slot later on. Microbatch m runs m intervals later. An interval is the number of slots
    that the busiest rank works for a microbatch.

    Then the repeated block is squeezed. One by one, in the order of their slots, actions move to
    the earliest slot that is free, after their inputs, and within the activations that the repeated
    block holds at its peak. Last, the BACKWARD_WEIGHTs are put off: each runs when its rank would
    otherwise wait, or when the rank lacks memory for its next FORWARD. `costs` decide when a rank
    waits; without them the slots do.

    Raises ValueError for a block with missing or other actions, an action before its input is
    there, two actions in one slot of a rank once the block is repeated, and a stage on several
    ranks. Raises SchedirError for costs of other stages or links.

    >>> import schedir
    >>> pipe = schedir.Pipeline(ranks=2, microbatches=2, chunks=1, placement=((0,), (1,)))
    >>> forwards = {schedir.forward(0, 0): 0, schedir.forward(1, 0): 1}
    >>> backwards = {schedir.backward(1, 0): 2, schedir.backward(0, 0): 4}
    >>> for actions in schedir.repeat_block(pipe, forwards | backwards):
    ...     print(*actions)
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    one = block_of(pipe, block)
    order, limit = _squeezed(one, pipe.microbatches)
    return weights_put_off(one, order, limit, costs)


def _squeezed(block: Block, microbatches: int) -> tuple[list[list[Run]], int]:
    """What each rank runs, in the order of its slots, and the most activations that a rank holds.

    `slots[n][m]` is the slot in which microbatch m runs action n; a BACKWARD_WEIGHT starts in the
    first free slot. `taken` has a byte for each slot of a rank, not 0 if the rank works there.
    `live` is the number of activations that a rank holds in a slot, which may not exceed `limit`.
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
