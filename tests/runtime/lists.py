"""Lists with entries that run together, as they are written elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import schedir
from schedir import Action, Kind, Together, backward, forward, optim_step, together
from schedir.ir import flat
from schedir.passes import strip_communication
from tests.literals import listed

STALE_REPLICAS = schedir.insert_communication(
    listed(
        4,
        "0,1 2 0",
        "0F0 2F0 2B0 2F1 2B1 0B0 0REDUCE_GRAD 0F2 2F2 0OPTIM_STEP 2OPTIM_STEP "
        "2B2 2F3 2B3 0B2 0REDUCE_GRAD 0OPTIM_STEP 2OPTIM_STEP",
        "0F1 0B1 0REDUCE_GRAD 0OPTIM_STEP 0F3 0B3 0REDUCE_GRAD 0OPTIM_STEP",
        "1F0 1F1 1B0 1B1 1F2 1OPTIM_STEP 1B2 1F3 1B3 1OPTIM_STEP",
        name="stale-replicas",
    )
)
"""Replicas that read different versions meanwhile: rank 0 the first, rank 1 has stepped."""

ROUNDS = schedir.insert_communication(
    listed(
        4,
        "0,1 2",
        "0F0 0B0 0REDUCE_GRAD 0OPTIM_STEP 0F2 0B2 0REDUCE_GRAD 0OPTIM_STEP",
        "0F1 0B1 0REDUCE_GRAD 0OPTIM_STEP 0F3 0B3 0REDUCE_GRAD 0OPTIM_STEP",
        "1F0 1B0 1OPTIM_STEP 1F1 1B1 1OPTIM_STEP 1F2 1B2 1OPTIM_STEP 1F3 1B3 1OPTIM_STEP",
        name="rounds",
    )
)
"""Replicas that step once a round, before a stage that steps after every microbatch."""


def megatron(ranks: int, microbatches: int) -> schedir.Schedule:
    """Megatron-LM's 1F1B: in the steady state what goes one way is posted with what comes back.

    rank 0   F0 SEND0  F1 (SEND1 RECV0) B0  F2 (SEND2 RECV1) B1 …
    rank 1   RECV0 F0  B0 (SEND0 RECV1)  F1 B1 (SEND1 RECV2) …
    """
    placement = [(rank,) for rank in range(ranks)]
    lists = [_megatron(rank, ranks, microbatches) for rank in range(ranks)]
    return schedir.Schedule("megatron", microbatches, placement, lists)


def _megatron(rank: int, ranks: int, number: int) -> Iterator[Action | Together]:
    warmup = min(ranks - rank - 1, number)

    def post(*actions: tuple[Kind, int]) -> Iterator[Action | Together]:
        absent = {Kind.RECV_ACT, Kind.SEND_GRAD} if rank == 0 else set()
        absent |= {Kind.SEND_ACT, Kind.RECV_GRAD} if rank == ranks - 1 else set()
        found = [Action(k, rank, m) for k, m in actions if k not in absent and m < number]
        if found:
            yield together(*found) if len(found) > 1 else found[0]

    for m in range(warmup):
        yield from post((Kind.RECV_ACT, m))
        yield forward(rank, m)
        yield from post((Kind.SEND_ACT, m))
    yield from post((Kind.RECV_ACT, warmup))
    for m in range(warmup, number):
        yield forward(rank, m)
        yield from post((Kind.SEND_ACT, m), (Kind.RECV_GRAD, m - warmup))
        yield backward(rank, m - warmup)
        yield from post((Kind.SEND_GRAD, m - warmup), (Kind.RECV_ACT, m + 1))
    for m in range(number - warmup, number):
        yield from post((Kind.RECV_GRAD, m))
        yield backward(rank, m)
        yield from post((Kind.SEND_GRAD, m))
    yield optim_step(rank)


def stepping(sizes: Sequence[int], microbatches: int) -> schedir.Schedule:
    """One microbatch after the other; stage s on rank s steps after each `sizes[s]`, and last."""

    def listed(pipe: schedir.Pipeline, rank: int) -> Iterator[Action]:
        for m in range(pipe.microbatches):
            yield forward(rank, m)
            yield backward(rank, m)
            if (m + 1) % sizes[rank] == 0 or m + 1 == pipe.microbatches:
                yield optim_step(rank)

    return schedir.build(listed, ranks=len(sizes), microbatches=microbatches)


def bidirectional_v(ranks: int, microbatches: int) -> schedir.Schedule:
    """DualPipeV: each rank has a stage of the way down and one of the way up, and overlaps the
    forward of one with the backward of the other. Takes 2 microbatches a rank at least."""
    return schedir.build("dualpipev", ranks=ranks, microbatches=microbatches)


def recomputed_early(schedule: schedir.Schedule, stages: Collection[int]) -> schedir.Schedule:
    """Every second microbatch of these stages is recomputed, one action before that is needed."""
    lists = []
    for entries in strip_communication(schedule).actions:
        own: list[Action] = []
        for action in flat(entries):
            own.append(action)
            m, starts = action.microbatch, action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
            if starts and action.stage in stages and m is not None and m % 2 == 0:
                key = Kind.FORWARD, action.stage, m
                made = [(a.kind, a.stage, a.microbatch) for a in own].index(key)
                own.insert(max(made + 1, len(own) - 2), schedir.recompute_forward(action.stage, m))
        lists.append(own)
    name, placement = f"recomputed {schedule.name}", schedule.placement
    return schedir.insert_communication(
        schedir.Schedule(name, schedule.microbatches, placement, lists)
    )
