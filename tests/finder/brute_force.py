"""The best makespan and span of small work, by trying every order: what `exact` is held against.

Nothing is left out for being hopeless: microbatches in any order, each backward split or not, each
forward run again or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TypeAlias

import attrs

from schedir import CostModel

Act: TypeAlias = tuple[str, int, int]
"""A kind, a stage and a microbatch."""
Lists: TypeAlias = Sequence[Sequence[Act]]


@attrs.frozen
class Small:
    """Work that is small enough."""

    placement: tuple[int, ...]
    microbatches: int
    costs: CostModel
    split: bool = True
    recompute: bool = False
    most: int | None = None
    until: str = "W"

    def cost(self, kind: str, stage: int) -> float:
        costs = self.costs
        again = costs.forward if costs.recompute is None else costs.recompute
        values = {"F": costs.forward, "B": costs.backward, "R": again, "S": costs.optim_step}
        value = (values | {"I": costs.backward_input, "W": costs.backward_weight})[kind]
        return value[stage] if isinstance(value, tuple) else value


def least(work: Small) -> tuple[float, float] | None:
    """The least makespan and the least longest span, None where no order is within the limit."""
    of_ranks = [list(_lists(work, rank)) for rank in range(1 + max(work.placement))]
    times = [time for lists in product(*of_ranks) if (time := timed(work, lists)) is not None]
    return (min(t[0] for t in times), min(t[1] for t in times)) if times else None


def _lists(work: Small, rank: int) -> Iterator[list[Act]]:
    """Every list of a rank, were it alone."""
    stages = [s for s, at in enumerate(work.placement) if at == rank]
    cells = list(product(stages, range(work.microbatches)))
    ways = [["F", "B"]] + [["F", "I", "W"]] * work.split
    if work.recompute:
        ways += [["F", "R", *way[1:]] for way in ways]
    for chosen in product(ways, repeat=len(cells)):
        chains = [[(kind, *cell) for kind in way] for way, cell in zip(chosen, cells, strict=True)]
        yield from filter(_may_run, _merged(chains, [0] * len(chains), work.most, work.until))


def _may_run(acts: list[Act]) -> bool:
    """Whether each microbatch goes up the rank's stages, and down again."""
    there = [
        [stage for kind, stage, of in acts if kind in kinds and of == m]
        for m in {m for _, _, m in acts}
        for kinds in ("F", "BI")
    ]
    down, up = there[::2], there[1::2]
    return all(d == sorted(d) and u == d[::-1] for d, u in zip(down, up, strict=True))


def _merged(
    chains: list[list[Act]], reached: list[int], room: float | None, until: str
) -> Iterator[list[Act]]:
    """Every order that keeps that of each chain and holds no more than there is room for."""
    if all(place == len(chain) for place, chain in zip(reached, chains, strict=True)):
        yield []
        return
    for number, chain in enumerate(chains):
        if (place := reached[number]) == len(chain):
            continue
        kind = chain[place][0]
        holds = kind == "R" or (kind == "F" and chain[1][0] != "R")
        left = room
        if room is not None:
            left = room - holds + (kind in ("B", until))
            if left < 0:
                continue
        after = [*reached[:number], place + 1, *reached[number + 1 :]]
        for rest in _merged(chains, after, left, until):
            yield [chain[place], *rest]


def timed(work: Small, lists: Lists) -> tuple[float, float] | None:
    """The makespan and the longest span of lists; None where they block."""
    last = len(work.placement) - 1
    arrived: dict[Act, float] = {("F", 0, m): 0 for m in range(work.microbatches)}
    free: dict[tuple[int, int], float] = {}
    clocks, places, begun = [0.0] * len(lists), [0] * len(lists), [-1.0] * len(lists)
    costs, placement = work.costs, work.placement
    assert isinstance(costs.latency, (int, float))
    assert isinstance(costs.bandwidth, (int, float))
    sizes = costs.boundary_bytes
    boundaries = sizes if isinstance(sizes, tuple) else (sizes,) * last

    def start(rank: int) -> float | None:
        kind, stage, m = lists[rank][places[rank]]
        if kind in "RW":
            return clocks[rank]
        there = arrived.get(("F" if kind == "F" else "B", stage, m))
        return None if there is None else max(clocks[rank], there)

    left = sum(map(len, lists))
    while left:
        # What starts next of all, so that a channel's transfers come in the order of their making.
        able = [
            (at + work.cost(*lists[r][places[r]][:2]), at, r)
            for r in range(len(lists))
            if places[r] < len(lists[r]) and (at := start(r)) is not None
        ]
        if not able:
            return None
        end, at, rank = min(able)
        kind, stage, m = lists[rank][places[rank]]
        begun[rank] = at if begun[rank] < 0 else begun[rank]
        places[rank], clocks[rank], left = places[rank] + 1, end, left - 1
        if kind == "F" and stage == last:
            arrived["B", last, m] = end
        elif kind in "FBI" and (kind == "F" or stage):
            to = stage + 1 if kind == "F" else stage - 1
            target = placement[to]
            if target != rank:
                ends = rank, target
                begin = max(end, free.get(ends, 0))
                free[ends] = begin + boundaries[min(stage, to)] / costs.bandwidth
                end = free[ends] + costs.latency
            arrived["F" if kind == "F" else "B", to, m] = end
    for stage, rank in enumerate(placement):
        clocks[rank] += work.cost("S", stage)
    spans = [end - since for end, since in zip(clocks, begun, strict=True)]
    return max(clocks), max(spans)
