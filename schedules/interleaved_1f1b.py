"""Interleaved 1F1B: several model chunks per rank (Megatron-LM, arXiv 2104.04473, section 2.2)."""

from collections.abc import Iterator
from itertools import zip_longest

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("interleaved-1f1b", chunks=2)
def interleaved_1f1b(
    pipe: Pipeline, rank: int, *, group_size: int | None = None
) -> Iterator[Action]:
    """1F1B over `chunks` stages per rank: a bubble `chunks` times smaller, more communication.

    2 chunks on 2 ranks, stages 0 and 2 on the first, 1 and 3 on the second; 4 microbatches, a
    backward twice as long as a forward:

        rank 0  0F0 0F1 2F0 2F1 0F2     2B0---- 0F3 2B1---- 2F2 0B0---- 2F3 0B1----     2B2---- ...
        rank 1      1F0 1F1 3F0 3B0---- 3F1 3B1---- 1F2 1B0---- 1F3 1B1---- 3F2 3B2---- 3F3 ...

    Forwards go group by group of `group_size` microbatches, within a group chunk by chunk;
    backwards likewise, the last chunk first. By default the microbatches are split into
    max(1, microbatches // ranks) equal groups; where that does not divide, into groups of `ranks`
    microbatches with a shorter last one. Groups smaller than `ranks` deadlock for most shapes.
    """
    microbatches = pipe.microbatches
    if group_size is None:
        rounds = max(1, microbatches // pipe.ranks)
        group_size = pipe.ranks if microbatches % rounds else microbatches // rounds
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size must be an int >= 1, not {group_size!r}")
    group_size = min(group_size, microbatches)  # beyond, the lists stay the same
    chunks = pipe.stages_of(rank)

    # A short last group is laid out as if it were full, and what it lacks is left out at the end:
    # pairing forwards with backwards across the gap would deadlock for some shapes.
    padded = range(0, microbatches, group_size)

    def in_order(stages: tuple[int, ...]) -> list[tuple[int, int]]:
        return [
            (stage, m)
            for start in padded
            for stage in stages
            for m in range(start, start + group_size)
        ]

    forwards = in_order(chunks)
    backwards = in_order(chunks[::-1])
    warmup = 2 * (pipe.ranks - rank - 1) + (len(chunks) - 1) * group_size
    warmup = min(warmup, len(forwards))
    for stage, m in forwards[:warmup]:
        if m < microbatches:
            yield forward(stage, m)
    for ahead, (stage, m) in zip_longest(forwards[warmup:], backwards):
        if ahead is not None and ahead[1] < microbatches:
            yield forward(*ahead)
        if m < microbatches:
            yield backward(stage, m)
    for stage in chunks:
        yield optim_step(stage)
