# schedir check examples/broken/answers/5_waits_for_itself.py --ranks 2 --chunks 2 --microbatches 2
"""A rank runs the earlier stage first, as the later one needs its output."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


def in_a_v(pipe: Pipeline) -> list[int]:
    """Down the ranks and back up."""
    return [*range(pipe.ranks), *reversed(range(pipe.ranks))]


@schedule("waits-for-nobody", placement=in_a_v, chunks=2)
def waits_for_nobody(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """Microbatch by microbatch, each rank's earlier stage first."""
    early, late = pipe.stages_of(rank)
    for m in range(pipe.microbatches):
        yield forward(early, m)
        yield forward(late, m)
    for m in range(pipe.microbatches):
        yield backward(late, m)
        yield backward(early, m)
    yield optim_step(early)
    yield optim_step(late)
