# schedir check examples/broken/6_reads_the_future.py --ranks 2 --microbatches 4
"""PipeDream, with every stage told which weight version to read.

The formula is that of the last stage. Whose is it not?
"""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("reads-the-future")
def reads_the_future(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """1F1B with an update after every backward; microbatch m at version m."""
    (stage,) = pipe.stages_of(rank)
    warmup = min(pipe.ranks - rank - 1, pipe.microbatches)
    for m in range(warmup):
        yield forward(stage, m, m)
    for m in range(warmup, pipe.microbatches):
        yield forward(stage, m, m)
        yield backward(stage, m - warmup)
        yield optim_step(stage)
    for m in range(pipe.microbatches - warmup, pipe.microbatches):
        yield backward(stage, m)
        yield optim_step(stage)
