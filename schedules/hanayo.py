"""Hanayo: waves down the ranks and up again (Liu et al., SC 2023, arXiv 2308.15762)."""

from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush

from schedir import Action, Pipeline, backward, forward, optim_step, schedule, wave


@schedule("hanayo", aliases=("wave",), placement=wave, chunks=2)
def hanayo(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """Waves down the ranks and up again, two chunks each: more waves, smaller bubble.

    One wave on 3 ranks, stages 0 and 5 on the first, 1 and 4 on the second, 2 and 3 on the third; 3
    microbatches, a backward twice as long as a forward:

        rank 0  0F0 0F1 0F2         5F0 5B0---- 5F1 5B1---- 5F2 5B2----         0B0---- ...
        rank 1      1F0 1F1 1F2 4F0     4F1     4B0---- 4F2 4B1----     1B0---- 4B2---- 1B1---- ...
        rank 2          2F0 3F0 2F1 3F1 2F2 3F2         3B0---- 2B0---- 3B1---- 2B1---- 3B2---- ...

    Microbatches go in groups of `ranks`. A rank holds the activations of one group, as many as with
    1F1B. It runs a backward if it can, and otherwise the forward that is furthest along. With two
    chunks or more, a rank idles for 2 * (ranks - 1) * (k + 1) forwards of a stage in k whole
    groups. A short last group takes almost as long as a whole one.

    Bubble: 2 * (P - 1) * (M + P) / (3 * V * M * P + 2 * (P - 1) * (M + P)) if M % P == 0
    Memory: min(M, P)
    Choose it for few microbatches and several chunks, if backwards cannot be split and
    `interleaved-1f1b` holds too much. Its bubble grows with every group of P microbatches.
    """
    yield from _plan(pipe)[rank]
    for stage in pipe.stages_of(rank):
        yield optim_step(stage)


@lru_cache(maxsize=1)
def _plan(pipe: Pipeline) -> tuple[tuple[Action, ...], ...]:
    """The lists of all ranks without updates, made as if forward and backward took equally long."""
    last, room = 2 * pipe.stages - 1, pipe.ranks * pipe.chunks
    lists: list[list[Action]] = [[] for _ in range(pipe.ranks)]
    # What a rank could run, sorted by group, number of following steps, and microbatch.
    forwards: list[list[tuple[int, int, int]]] = [[] for _ in lists]
    backwards: list[list[tuple[int, int, int]]] = [[] for _ in lists]
    begun, live = [0] * pipe.ranks, [0] * pipe.ranks
    coming = [(m // pipe.ranks, last, m) for m in range(pipe.microbatches)]
    while coming or any(forwards) or any(backwards):
        for group, left, m in coming:
            ready, stage = (backwards, left) if left < pipe.stages else (forwards, last - left)
            heappush(ready[pipe.placement[stage][0]], (group, left, m))
        coming = []
        for rank, actions in enumerate(lists):
            ahead = forwards[rank]
            if backwards[rank]:
                group, left, m = heappop(backwards[rank])
                actions.append(backward(left, m))
                live[rank] -= 1
            # A group begins only when all of the one before has begun, whose room it could take.
            elif ahead and live[rank] < room and ahead[0][0] == begun[rank] // room:
                group, left, m = heappop(ahead)
                actions.append(forward(last - left, m))
                live[rank] += 1
                begun[rank] += 1
            else:
                continue
            if left:
                coming.append((group, left - 1, m))
    return tuple(map(tuple, lists))
