"""Interleaved zero bubble: ZB-H1 over several chunks (torch, after Qi et al., arXiv 2401.10241)."""

from collections.abc import Iterator

from schedir import (
    Action,
    Pipeline,
    backward_input,
    backward_weight,
    equal_groups,
    forward,
    optim_step,
    schedule,
    slots_in_groups,
)


@schedule("interleaved-zb", aliases=("interleaved-zero-bubble",), chunks=2)
def interleaved_zb(pipe: Pipeline, rank: int, *, group_size: int | None = None) -> Iterator[Action]:
    """Interleaved 1F1B with split backwards: rank r keeps r weight gradients for its drain.

    2 chunks on 2 ranks, stages 0 and 2 on the first, 1 and 3 on the second; 4 microbatches, I the
    gradient of the input and W that of the weights:

        rank 0  0F0 0F1 2F0 2F1     2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 ...
        rank 1      1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 ...

    `group_size` and its default are those of `interleaved-1f1b`. The order is torch's for all
    numbers of microbatches that torch accepts. Every rank holds at most
    (chunks - 1) * group_size + ranks activations, in groups of ranks / 2 or more. Smaller groups
    save no more memory.

    Bubble: (P - 1) / (3 * V * M + P - 1) if M % P == 0
    Memory: P if M % P == 0
    Choose it over `interleaved-1f1b` if backwards can be split: a third of its idle time, at the
    memory of `1f1b`. Other numbers of microbatches may take longer.
    """
    ranks, microbatches, chunks = pipe.ranks, pipe.microbatches, pipe.stages_of(rank)
    group_size = equal_groups(pipe) if group_size is None else group_size
    # Each F, I and W has a slot. The chunks of a microbatch are at least half the way around the
    # ranks apart, unless one group holds all.
    whole = type(group_size) is int and group_size >= microbatches
    slot = slots_in_groups(pipe, group_size, apart=1 if whole else (ranks + 1) // 2)
    ahead = slot(len(chunks) - 1, 0) + ranks - rank - 1
    listed = []
    for m in range(microbatches):
        for chunk, stage in enumerate(chunks):
            listed.append((slot(chunk, m), 0, forward(stage, m)))
            done = ahead + slot(len(chunks) - 1 - chunk, m)
            listed.append((done, 1, backward_input(stage, m)))
            listed.append((done + rank, 2, backward_weight(stage, m)))
    for _, _, action in sorted(listed, key=lambda one: one[:2]):
        yield action
    for stage in chunks:
        yield optim_step(stage)
