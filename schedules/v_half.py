"""V-Half: zero bubble's V at half of 1F1B's memory (arXiv 2405.15362)."""

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


@schedule("v-half", placement=wave, chunks=2)
def v_half(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """A V that is slower on its way down: half of 1F1B's memory, and about half of its idle time.

    Every rank holds a stage of the way down and one of the way up. A microbatch takes two slots for
    each rank on its way down and one on its way up, in its forwards and in its backwards. More
    microbatches are under way than in V-Min, and fill more of the bubble. 1F1B holds the
    activations of `ranks` stages, and V-Half of (ranks + 2) // 2. The next microbatch follows 6
    slots later. 4 microbatches on 3 ranks, `W` the gradient of the weights:

        rank 0  0F0 0F1 0F2         5F0 5I0 5W0 5F1 5I1 5W1 0F3 0I0 0W0     5F2 5I2 0I1 5W2 0W1 ...
        rank 1      1F0 1F1     4F0     4F1 4I0 4W0 1F2 4I1 1I0 4W1 1W0 4F2 1F3 1I1 4I2 1W1 4W2 ...
        rank 2          2F0 3F0 2F1 3F1         3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2F3 2W1 3F3 ...

    Bubble: at most (3 * P - 4) / (6 * M + 3 * P - 4) if M >= P
    Memory: min(M, (P + 2) // 2)
    Choose it if the activations of `1f1b` do not fit and half of them do: it idles about half as
    long as `1f1b` too.
    """
    yield from _plan(pipe)[rank]
    for stage in pipe.stages_of(rank):
        yield optim_step(stage)


@lru_cache(maxsize=1)
def _plan(pipe: Pipeline) -> tuple[tuple[Action, ...], ...]:
    """The lists of all ranks, without updates."""
    if pipe.chunks != 2:
        raise ValueError(f"v-half takes 2 chunks, the two arms of its V, not {pipe.chunks}")
    ranks, last = pipe.ranks, pipe.stages - 1
    # Without a pause, an even number of ranks would have I's where other microbatches' F's are.
    turn = 3 * ranks - 1 + (0 if ranks % 2 else 3)
    block = {}
    for s in range(ranks):
        block[forward(s, 0)] = 2 * s
        block[forward(ranks + s, 0)] = 2 * ranks - 1 + s
        block[backward_input(last - s, 0)] = turn + 2 * s
        block[backward_input(ranks - 1 - s, 0)] = turn + 2 * ranks + s
    return repeat_block(pipe, block)
