"""ZBV: no bubble within the span of a rank, at 1F1B's memory (arXiv 2405.15362)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from schedir import CostModel


@schedule("zbv", aliases=("v-zb",), placement=wave, chunks=2)
def zbv(pipe: Pipeline, rank: int, *, costs: CostModel) -> Iterator[Action]:
    """Zero bubble on a V: at 1F1B's memory, no rank waits once it has begun.

    Every rank holds a stage of the way down and one of the way up. A microbatch takes four slots
    for each rank on its way down and two on its way up, in its forwards and in its backwards. The
    next microbatch follows 6 slots later, and enough are under way to fill every gap. Every rank
    holds the activations of `ranks` stages, as 1F1B's first rank does. 5 microbatches on 3 ranks,
    `W` the gradient of the weights:

        rank 0  0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 0I0 5W2 0W0 5F3 5I3 0I1 5W3 ...
        rank 1      1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4I1 1I0 4W1 1F4 1W0 4F3 4I2 1I1 4W2 1W1 ...
        rank 2          2F0 3F0 2F1 3F1 2F2 3F2 3I0 2I0 3W0 2F3 2W0 3F3 3I1 2I1 3W1 2F4 2W1 3F4 ...

    If I and W each take as long as F, and there are 2 * ranks - 1 microbatches or more, a rank
    idles only before its first forward and after its last action. With other costs the weight
    gradients move to the gaps that these costs leave.

    Bubble: (P - 1) / (6 * M + P - 1) if M >= P
    Bubble of the longest span: 0 if M >= 2 * P - 1
    Memory: min(M, P)
    Choose it for no bubble between steps at the memory of `1f1b`, if backwards can be split and
    one rank may hold both the first stage and the last.
    """
    yield from _plan(pipe, costs)[rank]
    for stage in pipe.stages_of(rank):
        yield optim_step(stage)


@lru_cache(maxsize=1)
def _plan(pipe: Pipeline, costs: CostModel) -> tuple[tuple[Action, ...], ...]:
    """The lists of all ranks, without updates."""
    if pipe.chunks != 2:
        raise ValueError(f"zbv takes 2 chunks, the two arms of its V, not {pipe.chunks}")
    ranks, last = pipe.ranks, pipe.stages - 1
    turn = 6 * ranks - 4
    block = {}
    for s in range(ranks):
        block[forward(s, 0)] = 4 * s
        block[forward(ranks + s, 0)] = 4 * ranks - 3 + 2 * s
        block[backward_input(last - s, 0)] = turn + 4 * s
        block[backward_input(ranks - 1 - s, 0)] = turn + 4 * ranks - 3 + 2 * s
    return repeat_block(pipe, block, costs)
