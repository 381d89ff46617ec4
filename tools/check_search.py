"""Compares the results of search with the exact optimum, over all small shapes.

    python tools/check_search.py [--actions 40] [--seconds 5] [--part 0/4]

It tries every shape up to a number of actions, in which a backward that may be split counts as two.
Each shape gets several costs, both objectives, and all limits from the least that works to the
first that changes nothing. It prints the cases in which search misses the optimum, and the number
of cases.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

import attrs

import schedir
from schedir import CostModel, SchedirError
from schedir.finder import exact, find
from schedir.finder.terms import Objective


def _uneven(least: int, stages: int) -> tuple[int, ...]:
    return tuple(least + (7 * s + 3 * least) % 4 for s in range(stages))


COSTS: dict[str, Callable[[int], CostModel]] = {
    "textbook": lambda stages: CostModel(),
    "equal": lambda stages: CostModel(backward=1),
    "latency": lambda stages: CostModel(
        forward=10, backward=19, backward_input=10, backward_weight=9, latency=2
    ),
    "uneven": lambda stages: CostModel(
        forward=_uneven(3, stages),
        backward=_uneven(7, stages),
        backward_input=_uneven(4, stages),
        backward_weight=_uneven(2, stages),
        optim_step=1,
        latency=1,
    ),
}


@attrs.frozen
class Case:
    """One search: its arguments but for the costs, which are named."""

    costs: str
    arguments: dict[str, Any]

    @property
    def model(self) -> CostModel:
        return COSTS[self.costs](self.arguments["ranks"] * self.arguments["chunks"])


def cases(actions: int) -> Iterator[Case]:
    """All cases, limits left open."""
    for stages in range(1, actions // 2 + 1):
        for ranks in (p for p in range(1, stages + 1) if stages % p == 0):
            for split in (False, True):
                for microbatches in range(1, actions // ((2 + split) * stages) + 1):
                    shape = {
                        "ranks": ranks,
                        "microbatches": microbatches,
                        "chunks": stages // ranks,
                        "split": split,
                    }
                    for placement in ("wrapped", "wave")[: 1 + (stages > ranks > 1)]:
                        for objective in get_args(Objective):
                            own = {**shape, "placement": placement, "objective": objective}
                            yield from (Case(costs, own) for costs in COSTS)


def limited(case: Case) -> Iterator[Case]:
    """The case with all limits, recomputation not allowed, and allowed where they are felt."""
    yield case
    chunks, microbatches = case.arguments["chunks"], case.arguments["microbatches"]
    for most in range(chunks, chunks * microbatches):
        for recompute in (False, True):
            limit = {"max_activations": most, "recompute": recompute}
            yield attrs.evolve(case, arguments={**case.arguments, **limit})


def value(schedule: schedir.Schedule, case: Case) -> float:
    line = schedir.simulate(schedule, case.model)
    if case.arguments["objective"] == "makespan":
        return line.makespan
    return max(rank.span for rank in line.ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actions", type=int, default=40, help="the most of a shape (40)")
    parser.add_argument("--seconds", type=float, default=5, help="that search may take (5)")
    parser.add_argument("--limit", type=float, default=60, help="seconds of the exact one (60)")
    parser.add_argument("--part", default="0/1", help="0/4: the first of four parts (all)")
    parser.add_argument("--no-recompute", action="store_true", help="leave recomputation out")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    tried = missed = unproved = 0
    spent = [0.0, 0.0]
    everything = (each for case in cases(args.actions) for each in limited(case))
    for number, case in enumerate(everything):
        if number % parts != part:
            continue
        if args.no_recompute and case.arguments.get("recompute"):
            continue
        began = time.perf_counter()
        try:
            best = exact(costs=case.model, seconds=args.limit, **case.arguments)
        except SchedirError as error:
            unproved += 1
            print(f"unproved: {case}: {error}", file=sys.stderr, flush=True)
            continue
        between = time.perf_counter()
        found = find(costs=case.model, seconds=args.seconds, **case.arguments)
        spent = [spent[0] + between - began, spent[1] + time.perf_counter() - between]
        tried += 1
        if found.value > value(best, case) * (1 + 1e-9):
            missed += 1
            print(f"{found.value:g} and not {value(best, case):g}: {case}", flush=True)
    print(
        f"{tried} cases, {missed} missed, {unproved} not proved; "
        f"exact {spent[0]:.0f} s, search {spent[1]:.0f} s"
    )


if __name__ == "__main__":
    main()
