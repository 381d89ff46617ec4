# schedir check examples/broken/3_half_the_batch.py --ranks 2 --microbatches 4
"""Fill-drain that steps as soon as it can, to save the memory of the gradients.

With half the batch size it would train just the same. Why?
"""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("half-the-batch")
def half_the_batch(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """All forwards, half of the backwards, a step, and the other half."""
    (stage,) = pipe.stages_of(rank)
    for m in range(pipe.microbatches):
        yield forward(stage, m)
    for m in range(pipe.microbatches):
        if m == pipe.microbatches // 2:
            yield optim_step(stage)
        yield backward(stage, m)
