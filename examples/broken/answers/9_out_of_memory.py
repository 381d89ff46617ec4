# schedir check examples/broken/answers/9_out_of_memory.py --ranks 2 --microbatches 8 --max-activations 4
"""Batches of four microbatches, each drained before the next: the same step, less in flight."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("within-memory")
def within_memory(pipe: Pipeline, rank: int, *, at_once: int = 4) -> Iterator[Action]:
    """Fill-drain of `at_once` microbatches, again and again."""
    (stage,) = pipe.stages_of(rank)
    for start in range(0, pipe.microbatches, at_once):
        group = range(start, min(start + at_once, pipe.microbatches))
        for m in group:
            yield forward(stage, m)
        for m in reversed(group):
            yield backward(stage, m)
    yield optim_step(stage)
