# schedir check examples/broken/answers/6_reads_the_future.py --ranks 2 --microbatches 4
"""Every stage reads the version that the first stage has (vertical sync)."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("reads-what-there-is")
def reads_what_there_is(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """1F1B with an update after every backward; microbatch m at the first stage's version."""
    (stage,) = pipe.stages_of(rank)
    warmup = min(pipe.ranks - rank - 1, pipe.microbatches)
    for m in range(warmup):
        yield forward(stage, m, max(0, m - pipe.stages + 1))
    for m in range(warmup, pipe.microbatches):
        yield forward(stage, m, max(0, m - pipe.stages + 1))
        yield backward(stage, m - warmup)
        yield optim_step(stage)
    for m in range(pipe.microbatches - warmup, pipe.microbatches):
        yield backward(stage, m)
        yield optim_step(stage)
