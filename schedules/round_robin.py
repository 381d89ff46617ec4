"""1F1B-RR: PipeDream's schedule for stages with replicas (SOSP 2019, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from schedir import Action, Pipeline, backward, forward, optim_step, reduce_grad, schedule

if TYPE_CHECKING:
    from schedir import CostModel


def replicated(
    pipe: Pipeline, *, costs: CostModel, replicas: str | int | None = None
) -> Sequence[Sequence[int]]:
    """Every stage on `replicas` ranks, by default as PipeDream's planner finds best."""
    if pipe.chunks > 1:
        raise ValueError("1f1b-rr runs one stage on each rank: leave chunks out")
    if replicas is None:
        from schedir import plan_replicas  # the search, which no other schedule needs

        plan = plan_replicas(costs, pipe.ranks, costs.stages or min(2, pipe.ranks))
        numbers = [*plan.replicas]
    else:
        words = str(replicas).split(",")
        numbers = [int(word) if word.strip().isdecimal() else 0 for word in words]
        if 0 in numbers or sum(numbers) != pipe.ranks:
            raise ValueError(
                f"replicas are a number >= 1 for each stage, as in 2,1, that add up to "
                f"{pipe.ranks} ranks, not {replicas!r}"
            )
    return [range(first, after) for first, after in pairwise([0, *accumulate(numbers)])]


@schedule("1f1b-rr", aliases=("round-robin",), placement=replicated)
def round_robin(pipe: Pipeline, rank: int, *, flush: bool = True) -> Iterator[Action]:
    """1F1B for stages of unequal length: the replicas of a stage take microbatches in turn.

    `replicas=2,1` gives the first stage two ranks and the second stage one. Without it the replicas
    are planned from the costs, as PipeDream does: one stage for each cost, or two equal stages.
    6 microbatches on 3 ranks, a backward twice as long as a forward:

        rank 0 stage 0  F0 F2       B0--- F4          B2---             B4---         *
        rank 1 stage 0  F1 F3                B1--- F5          B3---             B5---*
        rank 2 stage 1     F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---*

    Microbatch m runs on replica m mod r of a stage with r replicas. A replica of the first stage
    has ceil(ranks / r) microbatches in flight (NOAM in the paper). A replica of a later stage has
    as many as if the ranks before it were not there. With `flush=false` the schedule is that of the
    paper: the replicas of a stage sum their gradients and update after each round, a stage on one
    rank updates after every microbatch, and a backward differentiates at the version that its
    forward read.

    Bubble: P / (2 * M + P) if P % 2 == 0 and M % (P // 2) == 0
    Memory: P if P % 2 == 0 and M >= P
    Choose it if one stage takes much longer than the others and cannot be cut further: several
    ranks share it. The formulas are those of two equal stages, each on half of the ranks.
    """
    (stage,) = pipe.stages_of(rank)
    held = pipe.placement[stage]
    own = range(held.index(rank), pipe.microbatches, len(held))
    in_flight = -(-sum(map(len, pipe.placement[stage:])) // len(held))
    warmup = min(in_flight - 1, len(own))
    rounds = -(-pipe.microbatches // len(held))  # in the last, some replicas may have nothing
    for m in own[:warmup]:
        yield forward(stage, m)
    for turn in range(rounds):
        if turn + warmup < len(own):
            yield forward(stage, own[turn + warmup])
        if turn < len(own):
            yield backward(stage, own[turn])
        if turn == rounds - 1 or not flush:
            if len(held) > 1:
                yield reduce_grad(stage)
            yield optim_step(stage)
