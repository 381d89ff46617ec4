# schedir check examples/broken/answers/3_half_the_batch.py --ranks 2 --microbatches 4
"""Every gradient has a step behind it."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("the-whole-batch")
def the_whole_batch(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """All forwards, all backwards, a step."""
    (stage,) = pipe.stages_of(rank)
    for m in range(pipe.microbatches):
        yield forward(stage, m)
    for m in range(pipe.microbatches):
        yield backward(stage, m)
    yield optim_step(stage)
