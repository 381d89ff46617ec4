"""Two pipelines in opposite directions, as in Chimera (Li and Hoefler, arXiv 2107.06925)."""

from collections.abc import Iterator, Sequence

from schedir import Action, Pipeline, backward, forward, optim_step, reduce_grad, schedule


def mirrored(pipe: Pipeline) -> Sequence[Sequence[int]]:
    """Each stage twice: on rank s for the way down, on the one opposite for the way up."""
    return [(s, pipe.ranks - 1 - s) for s in range(pipe.ranks)]


@schedule("both-ways", placement=mirrored)
def both_ways(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """Two pipelines through the same ranks: even microbatches go down, odd ones up."""
    down, up = rank, pipe.ranks - 1 - rank
    slots: list[tuple[int, Action]] = []
    for m in range(pipe.microbatches):
        stage = up if m % 2 else down
        start = 2 * pipe.ranks * (m // pipe.ranks) + 2 * (m % pipe.ranks // 2)
        slots.append((start + stage, forward(stage, m)))
        slots.append((start + 2 * pipe.ranks - 1 - stage, backward(stage, m)))
    for _, action in sorted(slots, key=lambda slot: slot[0]):
        yield action
    for stage in pipe.stages_of(rank):
        yield reduce_grad(stage)
    for stage in pipe.stages_of(rank):
        yield optim_step(stage)
