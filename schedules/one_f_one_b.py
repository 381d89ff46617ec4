"""1F1B: PipeDream's order with a flush (PipeDream-Flush, arXiv 2006.09503)."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("1f1b", aliases=("one-f-one-b",))
def one_f_one_b(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """One forward, one backward: at most `ranks - rank` microbatches in flight.

    4 microbatches on 4 ranks, a backward twice as long as a forward, `*` the optimiser's step:

        rank 0  F0 F1 F2 F3                   B0---    B1---    B2---    B3---*
        rank 1     F0 F1 F2             B0--- F3 B1---    B2---    B3---*
        rank 2        F0 F1       B0--- F2 B1--- F3 B2---    B3---*
        rank 3           F0 B0--- F1 B1--- F2 B2--- F3 B3---*

    Bubble: (P - 1) / (M + P - 1)
    Memory: min(M, P)
    Choose it first: one stage a rank, few messages, and memory that does not grow with the
    microbatches. It is what the others are measured against.
    """
    (stage,) = pipe.stages_of(rank)
    warmup = min(pipe.ranks - rank - 1, pipe.microbatches)
    for m in range(warmup):
        yield forward(stage, m)
    for m in range(warmup, pipe.microbatches):
        yield forward(stage, m)
        yield backward(stage, m - warmup)
    for m in range(pipe.microbatches - warmup, pipe.microbatches):
        yield backward(stage, m)
    yield optim_step(stage)
