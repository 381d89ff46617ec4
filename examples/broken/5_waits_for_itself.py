# schedir check examples/broken/5_waits_for_itself.py --ranks 2 --chunks 2 --microbatches 2
"""Four stages in a V: rank 0 holds the first and the last, rank 1 those between.

No transport runs this, since no communication is even needed to see why.
"""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


def in_a_v(pipe: Pipeline) -> list[int]:
    """Down the ranks and back up."""
    return [*range(pipe.ranks), *reversed(range(pipe.ranks))]


@schedule("waits-for-itself", placement=in_a_v, chunks=2)
def waits_for_itself(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """Microbatch by microbatch; the last stage goes first, as its backward can follow at once."""
    early, late = pipe.stages_of(rank)
    order = (late, early) if rank == 0 else (early, late)
    for m in range(pipe.microbatches):
        for stage in order:
            yield forward(stage, m)
    for m in range(pipe.microbatches):
        yield backward(late, m)
        yield backward(early, m)
    yield optim_step(early)
    yield optim_step(late)
