# schedir check examples/broken/answers/1_hangs_on_nccl.py --ranks 2 --microbatches 4
"""The communication is left to schedir, which lists it in one order that all ranks share."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("runs-on-nccl")
def runs_on_nccl(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """1F1B, compute only."""
    (stage,) = pipe.stages_of(rank)
    warmup = min(pipe.ranks - rank - 1, pipe.microbatches)
    for m in range(warmup):
        yield forward(stage, m)
    for m in range(warmup, pipe.microbatches):
        yield forward(stage, m)
        yield backward(stage, m - warmup)
    for m in range(pipe.microbatches - warmup, pipe.microbatches):
        yield backward(stage, m)
    yield optim_step(stage)
