"""PipeDream: asynchronous 1F1B with weight stashing (SOSP 2019, sections 3.2 and 3.3)."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("pipedream")
def pipedream(pipe: Pipeline, rank: int, *, vertical_sync: bool = False) -> Iterator[Action]:
    """1F1B that updates after every backward: no flush, so no bubble once the pipeline is full.

    A microbatch is one of PipeDream's minibatches: each has an update (`*`). 6 microbatches on 4
    ranks, a backward twice as long as a forward:

        rank 0  F0 F1 F2 F3                   B0---*F4 B1---*F5 B2---*   B3---*   B4---*   B5---*
        rank 1     F0 F1 F2             B0---*F3 B1---*F4 B2---*F5 B3---*   B4---*   B5---*
        rank 2        F0 F1       B0---*F2 B1---*F3 B2---*F4 B3---*F5 B4---*   B5---*
        rank 3           F0 B0---*F1 B1---*F2 B2---*F3 B3---*F4 B4---*F5 B5---*

    A backward differentiates at the weight version that its forward read. Stage s runs minibatch m
    at version max(0, m - (stages - 1 - s)). With `vertical_sync` every stage runs minibatch m at
    the version that stage 0 has for it: max(0, m - stages + 1).

    Bubble: (P - 1) / (M + P - 1)
    Bubble once full: 0
    Memory: min(M, P)
    Choose it to train asynchronously with an update for every microbatch. Rank r keeps up to P
    - r versions of its weights, and gradients are up to P - 1 updates old.
    """
    (stage,) = pipe.stages_of(rank)
    warmup = min(pipe.ranks - rank - 1, pipe.microbatches)

    def run(m: int) -> Action:
        return forward(stage, m, max(0, m - pipe.stages + 1) if vertical_sync else None)

    for m in range(warmup):
        yield run(m)
    for m in range(warmup, pipe.microbatches):
        yield run(m)
        yield backward(stage, m - warmup)
        yield optim_step(stage)
    for m in range(pipe.microbatches - warmup, pipe.microbatches):
        yield backward(stage, m)
        yield optim_step(stage)
