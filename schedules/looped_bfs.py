"""Breadth-first: fill-drain over several chunks (Lamy-Poirier, arXiv 2211.05953)."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("looped-bfs", chunks=2)
def looped_bfs(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """All microbatches go through one chunk, and then through the next.

    With data parallelism, the gradients of a stage are summed once a step, while other chunks
    compute.

    2 chunks on 2 ranks, stages 0 and 2 on the first, 1 and 3 on the second; 4 microbatches, a
    backward twice as long as a forward:

        rank 0  0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3             2B3---- 2B2---- 2B1---- 2B0---- ...
        rank 1      1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3---- 3B2---- 3B1---- 3B0---- 1B3---- ...

    Backwards go in the opposite order, the last microbatch first, as in torch. The bubble is that
    of interleaved 1F1B. Every microbatch is in flight at once.

    Bubble: (P - 1) / (V * M + P - 1) if M >= P
    Memory: M
    Choose it with data parallelism, if every activation fits: a stage sums its gradients while
    other chunks still compute.
    """
    chunks = pipe.stages_of(rank)
    microbatches = range(pipe.microbatches)
    for stage in chunks:
        for m in microbatches:
            yield forward(stage, m)
    for stage in reversed(chunks):
        for m in reversed(microbatches):
            yield backward(stage, m)
    for stage in chunks:
        yield optim_step(stage)
