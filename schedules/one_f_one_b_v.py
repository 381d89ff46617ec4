"""1F1B on a V: whole backwards, two thirds of 1F1B's memory (arXiv 2405.15362, appendix)."""

from collections.abc import Iterator
from functools import lru_cache

from schedir import Action, Pipeline, backward, forward, optim_step, repeat_block, schedule, wave


@schedule("1f1b-v", placement=wave, chunks=2)
def one_f_one_b_v(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """V-Min with whole backwards: two thirds of 1F1B's memory.

    Every rank holds a stage of the way down and one of the way up. A microbatch takes one slot for
    each rank in its forwards and two in its backwards. After every third backward it pauses for
    three slots, in which forwards of other microbatches run. 1F1B holds the activations of `ranks`
    stages, and this schedule of 2 * ranks // 3 + 1. The next microbatch follows 6 slots later.
    4 microbatches on 3 ranks:

        rank 0  0F0 0F1 0F2 0F3     5F0 5B0---- 5F1 5B1---- 5F2 5B2----             5F3 0B0---- ...
        rank 1      1F0 1F1 1F2 4F0 1F3 4F1     4B0---- 4F2 4B1----     1B0---- 4F3 4B2---- ...
        rank 2          2F0 3F0 2F1 3F1 2F2 3F2         3B0---- 2B0---- 2F3 3F3 3B1---- 2B1---- ...

    Bubble: at most 5 * (P - 1) / (6 * M + 5 * (P - 1)) if M >= P
    Memory: min(M, 2 * P // 3 + 1)
    Choose it for two thirds of the memory of `1f1b` if backwards cannot be split.
    """
    yield from _plan(pipe)[rank]
    for stage in pipe.stages_of(rank):
        yield optim_step(stage)


@lru_cache(maxsize=1)
def _plan(pipe: Pipeline) -> tuple[tuple[Action, ...], ...]:
    """The lists of all ranks, without updates."""
    if pipe.chunks != 2:
        raise ValueError(f"1f1b-v takes 2 chunks, the two arms of its V, not {pipe.chunks}")
    stages, pause = pipe.stages, 0 if pipe.ranks % 3 else 3
    block = {forward(s, 0): s for s in range(stages)}
    for n in range(stages):
        gaps = (n + (1 - pipe.ranks) % 3) // 3
        block[backward(stages - 1 - n, 0)] = stages + pause + 2 * n + 3 * gaps
    return repeat_block(pipe, block)
