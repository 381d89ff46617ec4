"""Eager 1F1B: more forwards ahead, to hide communication (Zhuang et al., arXiv 2211.05322)."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("eager-1f1b")
def eager_1f1b(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """1F1B that runs further ahead: rank r does 2 * (ranks - r) - 1 forwards before a backward.

    6 microbatches on 4 ranks, a backward twice as long as a forward:

        rank 0  F0 F1 F2 F3 F4 F5             B0---    B1---    B2---    B3---    B4---    B5---*
        rank 1     F0 F1 F2 F3 F4       B0--- F5 B1---    B2---    B3---    B4---    B5---*
        rank 2        F0 F1 F2    B0--- F3 B1--- F4 B2--- F5 B3---    B4---    B5---*
        rank 3           F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---*

    Each rank has the time of one action between a receive and the compute that needs it. Transfers
    that take no longer than a forward therefore hide behind compute. Rank r holds up to
    2 * (ranks - r) - 1 activations. alpa calls it `1f1b_overlap_friendly`, and jaxpp `Eager1F1B`.

    Bubble: (P - 1) / (M + P - 1)
    Memory: min(M, 2 * P - 1)
    Choose it over `1f1b` if links are slow and memory is left: once the pipeline is full, a
    transfer that takes no longer than a forward costs no time.
    """
    (stage,) = pipe.stages_of(rank)
    microbatches = pipe.microbatches
    warmup = min(2 * (pipe.ranks - rank) - 1, microbatches)
    for m in range(warmup):
        yield forward(stage, m)
    for m in range(microbatches):
        yield backward(stage, m)
        if m + warmup < microbatches:
            yield forward(stage, m + warmup)
    yield optim_step(stage)
