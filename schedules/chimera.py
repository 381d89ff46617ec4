"""Chimera: two pipelines, down and up the ranks (Li and Hoefler, SC 2021, arXiv 2107.06925)."""

from collections.abc import Iterator

from schedir import (
    Action,
    Pipeline,
    backward,
    forward,
    mirrored,
    optim_step,
    reduce_grad,
    schedule,
)


@schedule("chimera", placement=mirrored)
def chimera(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """Two 1F1B pipelines, one down the ranks and one up, each filling the gaps of the other.

    4 microbatches on 4 ranks, a backward twice as long as a forward, `*` the optimiser's step:

        rank 0 stage 0  F0 F1                         B0---       B1---*
        rank 0 stage 3           F2 B2--- F3 B3---                     *
        rank 1 stage 1     F0    F1             B0---       B1---*
        rank 1 stage 2        F2    F3    B2---       B3---      *
        rank 2 stage 1     F2    F3             B2---       B3---*
        rank 2 stage 2        F0    F1    B0---       B1---      *
        rank 3 stage 0  F2 F3                         B2---       B3---*
        rank 3 stage 3           F0 B0--- F1 B1---                     *

    Stage s is on two ranks, s and ranks - 1 - s. (With an odd number of ranks, the middle stage is
    on one.) A unit is as many microbatches as ranks: the first half goes down the ranks, the second
    half up. Units follow each other (the paper's direct concatenation), and the forwards of a unit
    fill the gaps at the end of the unit before. The last unit may be shorter. For an even number
    of ranks and K whole units, a rank idles for (ranks - 2) (B + (K - 1) (B - F)).

    Bubble: (P - 2) * (M + P) / (3 * M * P + (P - 2) * (M + P)) if P % 2 == 0 and M % P == 0
    Memory: min(M, P)
    Choose it for about as many microbatches as ranks, if backwards cannot be split and every rank
    has room for the weights of two stages. Its bubble grows with every unit of P microbatches.
    """
    if pipe.chunks > 1:
        raise ValueError(f"chimera takes one chunk, not {pipe.chunks}")
    last, microbatches = pipe.ranks - 1, pipe.microbatches
    slots: list[tuple[int, Action]] = []
    for start in range(0, microbatches, pipe.ranks):
        unit = range(start, min(start + pipe.ranks, microbatches))
        half = (len(unit) + 1) // 2
        for m in unit:
            down = m - start < half
            stage = rank if down else last - rank
            entered = 2 * start + 2 * (m - start if down else m - start - half)
            slots.append((entered + stage, forward(stage, m)))
            slots.append((entered + 2 * last + 1 - stage, backward(stage, m)))
    for _, action in sorted(slots, key=lambda slot: slot[0]):
        yield action
    stages = pipe.stages_of(rank)
    for stage in stages:
        if len(pipe.placement[stage]) > 1:
            yield reduce_grad(stage)
    for stage in stages:
        yield optim_step(stage)
