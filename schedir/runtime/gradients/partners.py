"""Which stages' gradients are summed in one process group.

A group costs a communicator, and on a GPU multiprocessors. Stages share one where their sums run
over the same ranks, which come to them in the same order:

    rank 0   … 0REDUCE_GRAD 3REDUCE_GRAD        stages 0 and 3 share a group of ranks 0 and 3
    rank 3   … 0REDUCE_GRAD 3REDUCE_GRAD        in the other order on one of them, each has its own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from schedir.graph.compile import graph_of
from schedir.ir import Schedule


def partners(schedule: Schedule) -> list[tuple[int, ...]]:
    """The stages with sums, together with those that they share a group with."""
    places = graph_of(schedule).collectives_of
    found: list[list[int]] = []
    for stage in places:
        for others in found:
            if _in_one_order([places[one] for one in (*others, stage)]):
                others.append(stage)
                break
        else:
            found.append([stage])
    return [tuple(stages) for stages in found]


def _in_one_order(places: Sequence[Mapping[int, Sequence[int]]]) -> bool:
    """Whether all ranks come to the sums of these stages, each at its places by rank, in the same
    order."""
    ranks = set(places[0])
    if any(set(by_rank) != ranks for by_rank in places):
        return False
    orders = {
        tuple(stage for _, stage in sorted((p, s) for s, own in enumerate(places) for p in own[r]))
        for r in ranks
    }
    return len(orders) == 1
