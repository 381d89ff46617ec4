"""The schedules that torch.distributed.pipelining builds, with two stages on each rank."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from schedir import Schedule, from_torch

CHUNKS = 2  # stages on each rank: a V has no other number
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
GENERATORS = (
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    *V_SHAPED,
)


def stages_of(rank: int, ranks: int, name: str) -> list[int]:
    """Down the ranks and back up for a V, else round and round."""
    return [rank, CHUNKS * ranks - 1 - rank if name in V_SHAPED else ranks + rank]


def made(name: str, ranks: int, microbatches: int, deferred: bool = False) -> Any:
    """torch's schedule, of the class of that name; `deferred` is its option `defer_pp_recv`."""
    held = {stage: rank for rank in range(ranks) for stage in stages_of(rank, ranks, name)}
    # A schedule is bound to the stages of one rank, but makes the lists of all ranks.
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(held),
            group_size=ranks,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == len(held) - 1,
            has_backward=True,
            submod=None,
            stage_index_to_group_rank=dict(sorted(held.items())),
        )
        for stage in stages_of(0, ranks, name)
    ]
    generator = getattr(torch_schedules, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of torch's schedules warn that they are new
        return generator(stages, microbatches, loss_fn=lambda *_: None, defer_pp_recv=deferred)


def written(order: dict[int, list[Any]]) -> str:
    """One of the two dicts of lists that torch's schedules hold, as torch's CSV."""
    rows = [
        ",".join("" if action is None else str(action) for action in actions)
        for _, actions in sorted(order.items())
    ]
    return "\n".join(rows) + "\n"


def dumped(name: str, ranks: int, microbatches: int, deferred: bool = False) -> str:
    """torch's schedule with its communication, as torch's CSV."""
    return written(made(name, ranks, microbatches, deferred).pipeline_order_with_comms)


def lowered(name: str, ranks: int, microbatches: int, deferred: bool = False) -> Schedule:
    """The same, read."""
    theirs = made(name, ranks, microbatches, deferred)
    return from_torch(theirs, communication=True, steps=False)


def computed(name: str, ranks: int, microbatches: int) -> Schedule:
    """What torch's schedule computes, without its communication."""
    theirs = getattr(torch_schedules, name)
    return from_torch(theirs, ranks=ranks, microbatches=microbatches, chunks=CHUNKS, steps=False)
