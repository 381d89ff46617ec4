"""Eager 1F1B: more forwards ahead, to hide communication (Zhuang et al., arXiv 2211.05322)."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("eager-1f1b")
def eager_1f1b(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """1F1B with more warmup: rank r runs 2 (ranks - r) - 1 forwards before its first backward.

    6 microbatches on 4 ranks, a backward twice as long as a forward:

        rank 0  F0 F1 F2 F3 F4 F5             B0---    B1---    B2---    B3---    B4---    B5---*
        rank 1     F0 F1 F2 F3 F4       B0--- F5 B1---    B2---    B3---    B4---    B5---*
        rank 2        F0 F1 F2    B0--- F3 B1--- F4 B2--- F5 B3---    B4---    B5---*
        rank 3           F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---*

    A rank runs one more action between receiving a tensor and using it. So transfers that take no
    longer than a forward hide behind compute. Rank r holds up to 2 (ranks - r) - 1 activations,
    1F1B only ranks - r. alpa calls this schedule `1f1b_overlap_friendly`, jaxpp `Eager1F1B`.
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
