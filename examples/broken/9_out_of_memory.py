# schedir check examples/broken/9_out_of_memory.py --ranks 2 --microbatches 8 --max-activations 4
"""A rank's memory holds the activations of four microbatches. This one runs out of it.

No order of the communication helps. Which order of the compute does?
"""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("out-of-memory")
def out_of_memory(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """All forwards, then all backwards, the latest first."""
    (stage,) = pipe.stages_of(rank)
    for m in range(pipe.microbatches):
        yield forward(stage, m)
    for m in reversed(range(pipe.microbatches)):
        yield backward(stage, m)
    yield optim_step(stage)
