"""Interleaved 1F1B: several model chunks per rank (Megatron-LM, arXiv 2104.04473, section 2.2)."""

from collections.abc import Iterator
from functools import lru_cache

from schedir import (
    Action,
    Pipeline,
    backward,
    backward_input,
    backward_weight,
    equal_groups,
    forward,
    optim_step,
    schedule,
    slots_in_groups,
)


@schedule("interleaved-1f1b", chunks=2)
def interleaved_1f1b(
    pipe: Pipeline, rank: int, *, group_size: int | None = None
) -> Iterator[Action]:
    """1F1B over `chunks` stages per rank: a bubble `chunks` times smaller, more communication.

    2 chunks on 2 ranks, stages 0 and 2 on the first, 1 and 3 on the second; 4 microbatches, a
    backward twice as long as a forward:

        rank 0  0F0 0F1 2F0 2F1 0F2     2B0---- 0F3 2B1---- 2F2 0B0---- 2F3 0B1----     2B2---- ...
        rank 1      1F0 1F1 3F0 3B0---- 3F1 3B1---- 1F2 1B0---- 1F3 1B1---- 3F2 3B2---- 3F3 ...

    Forwards go in groups of `group_size` microbatches, and within a group chunk by chunk. Backwards
    do the same, the last chunk first. By default there are max(1, microbatches // ranks) equal
    groups, or, if that does not divide the microbatches, groups of `ranks` microbatches and a
    shorter last one. The order is that of Megatron-LM's schedule table for all groups that Megatron
    accepts: `ranks` microbatches or more, also in the last group.

    Groups of fewer than `ranks` microbatches hold fewer activations: at most
    (chunks - 1) * group_size + ranks. Their ranks run half as far ahead and split backwards, so
    that the rank before does not wait for the gradient of the weights (grouped interleaving, in
    Qi et al.'s code of arXiv 2405.15362). Groups below ranks / 2 save no more memory.

    Bubble: (P - 1) / (V * M + P - 1) if M % P == 0
    Memory: min(M, ((V + 1) * P - 1) / V) if M % P == 0
    Choose it over `1f1b` if links are quick: V chunks divide the bubble by V, and multiply the
    messages by V.
    """
    group_size = equal_groups(pipe) if group_size is None else group_size
    small = type(group_size) is int and group_size < min(pipe.ranks, pipe.microbatches)
    yield from _in_groups(pipe, rank, group_size, small)


@schedule("grouped-interleaved-1f1b", chunks=2)
def grouped_interleaved_1f1b(
    pipe: Pipeline, rank: int, *, group_size: int | None = None
) -> Iterator[Action]:
    """Interleaved 1F1B that runs half as far ahead: less memory, and a smaller bubble.

    2 chunks on 2 ranks, 4 microbatches, I the gradient of the input and W that of the weights:

        rank 0  0F0 0F1 2F0 2F1     2I0 2W0 0F2 2I1 2W1 0F3 0B0---- 2F2 0B1---- 2F3 2I2 2W2 ...
        rank 1      1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1F2 1I0 1W0 1F3 1I1 1W1 3F2 3I2 3W2 3F3 ...

    It does for groups of any size what `interleaved-1f1b` does for small ones (grouped
    interleaving, in Qi et al.'s code of arXiv 2405.15362). By default a group is `ranks`
    microbatches.

    Bubble: 2 * (P - 1) / (3 * V * M + 2 * (P - 1)) if M % P == 0
    Memory: min(M, P)
    Choose it over `interleaved-1f1b` if backwards can be split: two thirds of its idle time, at
    the memory of `1f1b`.
    """
    group_size = pipe.ranks if group_size is None else group_size
    yield from _in_groups(pipe, rank, group_size, small=True)


def _in_groups(pipe: Pipeline, rank: int, group_size: int, small: bool) -> Iterator[Action]:
    """The list of a rank; `small` groups run ahead by half as much, and split backwards."""
    chunks, order = pipe.stages_of(rank), _order(pipe, group_size, small)
    last = next(slot for slot, chunk, _ in order if chunk == len(chunks) - 1)
    ahead = last + (pipe.ranks - rank - 1) * (1 if small else 2)
    forwards = [(slot, 0, chunks[chunk], m) for slot, chunk, m in order]
    backwards = [(ahead + slot, 1, chunks[-1 - chunk], m) for slot, chunk, m in order]
    for _, is_backward, stage, m in sorted(forwards + backwards):
        if not is_backward:
            yield forward(stage, m)
        elif small and stage > 0:
            yield backward_input(stage, m)
            yield backward_weight(stage, m)
        else:
            yield backward(stage, m)
    for stage in chunks:
        yield optim_step(stage)


@lru_cache(maxsize=1, typed=True)
def _order(pipe: Pipeline, group_size: int, small: bool) -> list[tuple[int, int, int]]:
    """The (slot, chunk, microbatch) of every forward, the same on all ranks."""
    # The chunks of a microbatch are at least half the way around the ranks apart, if groups are
    # smaller than that.
    slot = slots_in_groups(pipe, group_size, apart=(pipe.ranks + 1) // 2 if small else 1)
    pairs = [(chunk, m) for m in range(pipe.microbatches) for chunk in range(pipe.chunks)]
    order = sorted((slot(chunk, m), chunk, m) for chunk, m in pairs)
    if small or 0 < pipe.microbatches % group_size < pipe.ranks:
        return order
    # As in Megatron's table, a short last group leaves no slot empty. One of fewer microbatches
    # than ranks must, because its chunks may wait for each other forever; Megatron refuses it.
    return [(at, chunk, m) for at, (_, chunk, m) in enumerate(order)]
