"""1F1B-RR: PipeDream's schedule for a stage with replicas (SOSP 2019, section 3.2), flushed.

The first stage lives on all ranks but the last, and its replicas take the microbatches in turn: for
a model whose first layers compute the most. Their gradients are summed before the update, so the
weights stay the same on all of them. With 2 replicas of a stage that takes twice as long as the
next one:

    rank 0  F0---F2---      B0--------F4---B2--------F6---B4-------- ...
    rank 1  F1---F3---      B1--------F5---B3-------- ...
    rank 2       F0 B0---F1 B1---F2 B2--- ...

    schedir check examples/round_robin.py --ranks 3
"""

from collections.abc import Iterator, Sequence

from schedir import Action, Pipeline, backward, forward, optim_step, reduce_grad, schedule


def replicated_first(pipe: Pipeline) -> Sequence[int | Sequence[int]]:
    """Stage 0 on all ranks but the last, stage 1 on that."""
    if pipe.ranks < 2:
        raise ValueError("two stages take 2 ranks or more")
    return [range(pipe.ranks - 1), pipe.ranks - 1]


@schedule("1f1b-rr", placement=replicated_first)
def round_robin(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """1F1B over two stages: the replicas of the first one take the microbatches in turn."""
    (stage,) = pipe.stages_of(rank)
    replicas = pipe.ranks - 1
    own = range(rank, pipe.microbatches, replicas) if stage == 0 else range(pipe.microbatches)
    warmup = min(1 if stage == 0 else 0, len(own))
    for m in own[:warmup]:
        yield forward(stage, m)
    for ahead, m in zip(own[warmup:], own, strict=False):
        yield forward(stage, ahead)
        yield backward(stage, m)
    for m in own[len(own) - warmup :]:
        yield backward(stage, m)
    yield reduce_grad(stage)
    yield optim_step(stage)
