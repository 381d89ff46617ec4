"""The batches of a call that has several: the places in a rank's list where each is applied.

microbatches of a batch: 2     1F1B that steps after each backward, rank 0 of 2

0F0 0F1 0B0 0OPTIM_STEP 0F2 0B1 0OPTIM_STEP │ 0F3 0B2 0OPTIM_STEP 0B3 0OPTIM_STEP │
                                batch 0 is in the weights               batch 1 is
"""

from __future__ import annotations

from schedir.errors import ExecutionError
from schedir.ir import COMPLETES_GRADIENTS, Kind, Schedule, flat


def batches_of(microbatches: int, size: int) -> list[range]:
    """The microbatches of each batch, `size` a batch."""
    return [range(first, first + size) for first in range(0, microbatches, size)]


def ends_of_batches(schedule: Schedule, rank: int, size: int) -> list[int]:
    """For each batch but the last, of `size` microbatches, the number of entries in the rank's list
    up to the last OPTIM_STEP that applies any of it."""
    number = -(-schedule.microbatches // size)
    ends = [0] * number
    for index, _, batches in _steps(schedule, rank, size):
        for batch in batches:
            ends[batch] = index + 1
    for batch in range(1, number):  # a replica may have nothing of one
        ends[batch] = max(ends[batch], ends[batch - 1])
    return ends[:-1]


def check_batches(schedule: Schedule, size: int) -> None:
    """Raise ExecutionError unless a list applies its batches one after the other: each OPTIM_STEP
    applies microbatches of one batch, and each rank applies a batch before the next one."""
    for rank in range(schedule.ranks):
        latest = 0
        for index, stage, batches in _steps(schedule, rank, size):
            if len(batches) > 1 or min(batches, default=latest) < latest:
                first, *others = sorted({*batches, latest})
                what = (
                    f"applies microbatches of batches {first} and {others[-1]} at once"
                    if len(batches) > 1
                    else f"applies batch {first} after another stage's has applied {others[-1]}"
                )
                raise ExecutionError(
                    f"{schedule.name}: OPTIM_STEP of stage {stage} {what}, {size} microbatches "
                    "each, so the batches could not have different learning rates; take batches of "
                    "another number of microbatches, or a schedule= whose updates fit them",
                    rank=rank,
                    index=index,
                )
            latest = max(batches, default=latest)


def _steps(schedule: Schedule, rank: int, size: int) -> list[tuple[int, int, set[int]]]:
    """The OPTIM_STEPs of a rank: the index, the stage and the applied batches of each."""
    pending: dict[int, set[int]] = {}
    found = []
    for index, entry in enumerate(schedule.actions[rank]):
        for action in flat([entry]):
            if action.kind in COMPLETES_GRADIENTS and action.microbatch is not None:
                pending.setdefault(action.stage, set()).add(action.microbatch // size)
            elif action.kind is Kind.OPTIM_STEP:
                found.append((index, action.stage, pending.pop(action.stage, set())))
    return found
