"""PipeDream-2BW: asynchronous 1F1B with two weight versions (arXiv 2006.09503)."""

from collections.abc import Iterator

from schedir import Action, Pipeline, backward, forward, optim_step, schedule


@schedule("pipedream-2bw", aliases=("2bw",))
def pipedream_2bw(
    pipe: Pipeline, rank: int, *, gradient_accumulation: int | None = None
) -> Iterator[Action]:
    """1F1B without a flush: one update a batch, and every gradient is one update late.

    A batch is `gradient_accumulation` microbatches, and their mean gradient makes one update (`*`).
    Batch t runs at version max(0, t - 1) on every stage. At most two versions are alive. 6
    microbatches on 2 ranks, 2 in each batch, a backward twice as long as a forward:

        rank 0  F0 F1       B0--- F2 B1---*F3 B2--- F4 B3---*F5 B4---    B5---*
        rank 1     F0 B0--- F1 B1---*F2 B2--- F3 B3---*F4 B4--- F5 B5---*

    By default the size of a batch is the smallest divisor of the number of microbatches that is at
    least the number of ranks, as the paper asks for, or all of them. If the size does not divide
    the microbatches, the last batch is shorter.

    Bubble: (P - 1) / (M + P - 1)
    Bubble once full: 0
    Memory: min(M, P)
    Choose it to train asynchronously with few weight versions: two on every rank, and every
    gradient one update old.
    """
    (stage,) = pipe.stages_of(rank)
    microbatches, size = pipe.microbatches, gradient_accumulation
    if size is None:
        divisors = (n for n in range(pipe.ranks, microbatches) if microbatches % n == 0)
        size = next(divisors, microbatches)
    elif type(size) is not int or size < max(1, pipe.ranks - 1):
        # With fewer, batch t would begin before the update that it waits for.
        raise ValueError(
            f"gradient_accumulation must be an int >= {max(1, pipe.ranks - 1)}, as {pipe.ranks} "
            f"ranks need that many microbatches a batch, not {size!r}"
        )
    warmup = min(pipe.ranks - rank - 1, microbatches)

    def run(m: int) -> Action:
        return forward(stage, m, max(0, m // size - 1))

    for m in range(warmup):
        yield run(m)
    for m in range(microbatches):
        if m + warmup < microbatches:
            yield run(m + warmup)
        yield backward(stage, m)
        if m % size == size - 1 or m == microbatches - 1:
            yield optim_step(stage)
