"""V-Min: the least memory of a V, a third of 1F1B's (arXiv 2405.15362)."""

from collections.abc import Iterator
from functools import lru_cache

from schedir import (
    Action,
    Pipeline,
    backward_input,
    forward,
    optim_step,
    repeat_block,
    schedule,
    wave,
)


@schedule("v-min", placement=wave, chunks=2)
def v_min(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """A V without detours: the least memory, about a third of 1F1B's.

    Every rank holds a stage of the way down and one of the way up. A microbatch takes one slot for
    each rank on both ways, in its forwards and in its backwards, and is done before others pile up.
    1F1B holds the activations of `ranks` stages, and V-Min of (ranks + 4) // 3. The next microbatch
    follows 6 slots later. 4 microbatches on 3 ranks, `W` the gradient of the weights:

        rank 0  0F0 0F1 0F2         5F0 5I0 5W0 5F1 5I1 5W1 0I0 0F3 0W0     5F2 5I2 0I1 5W2 0W1 ...
        rank 1      1F0 1F1     4F0     4F1 4I0 4W0 1F2 1I0 4I1 1W0 4W1 4F2 1F3 1I1 4I2 1W1 4W2 ...
        rank 2          2F0 3F0 2F1 3F1         3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2F3 2W1 3F3 ...

    It idles about two thirds as long as 1F1B.

    Bubble: at most (4 * P - 5) / (6 * M + 4 * P - 5) if M >= P
    Memory: min(M, (P + 4) // 3)
    Choose it for the least memory without recomputation: about a third of `1f1b`, and two thirds of
    its idle time.
    """
    yield from _plan(pipe)[rank]
    for stage in pipe.stages_of(rank):
        yield optim_step(stage)


@lru_cache(maxsize=1)
def _plan(pipe: Pipeline) -> tuple[tuple[Action, ...], ...]:
    """The lists of all ranks, without updates."""
    if pipe.chunks != 2:
        raise ValueError(f"v-min takes 2 chunks, the two arms of its V, not {pipe.chunks}")
    turn = 2 * pipe.stages - 1
    # Without a pause, a multiple of 3 ranks would have I's where the next microbatches' F's are.
    turn += 2 if pipe.ranks % 3 == 0 else 0
    block = {forward(s, 0): s for s in range(pipe.stages)}
    block |= {backward_input(s, 0): turn - s for s in range(pipe.stages)}
    return repeat_block(pipe, block)
