"""Compares the results of `schedir search` with bounds, published figures and built-in schedules.

    python tools/bench_search.py                  # the A100 rows of zero bubble's paper
    python tools/bench_search.py --exact 200      # random work of up to 40 actions, beside `exact`
    python tools/bench_search.py --large          # 64 ranks × 256 microbatches, with seconds
    python tools/bench_search.py --hard 5         # 13 hard terms, 5 seeds: the gap to the bound

The rows are those of Qi et al., arXiv 2401.10241: the bubble of the longest span, limits from P to
3 P activations, which count until the W, or until the I as in the paper's memory model.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import schedir
from schedir import CostModel, SchedirError
from schedir.finder import exact, find

# ranks, microbatches, F, I, W, latency in microseconds; the bubble of ZB-1p and of ZB-2p.
ROWS = (
    (8, 24, 18522, 18086, 9337, 601, 0.1585, 0.0433),
    (8, 32, 18513, 18086, 9331, 626, 0.1242, 0.0039),
    (8, 64, 18546, 18097, 9321, 762, 0.0674, 0.0026),
    (16, 48, 11347, 11248, 8132, 377, 0.1397, 0.0066),
    (32, 96, 10419, 10207, 7715, 408, 0.1421, 0.0038),
)
MOST_ACTIONS = 40


def main() -> None:
    """Print the table that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--exact", type=int, metavar="N", help="N random pieces of work")
    parser.add_argument("--large", action="store_true", help="64 ranks × 256 microbatches")
    parser.add_argument("--hard", type=int, metavar="N", help="13 hard terms, N seeds")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each search")
    args = parser.parse_args()
    if args.hard:
        hard(args.hard)
    elif args.exact:
        beside_exact(args.exact, args.seconds)
    elif args.large:
        large(args.seconds)
    else:
        published(args.seconds)


def _zero_bubble(f: int, i: int, w: int, latency: int) -> CostModel:
    return CostModel(
        forward=f, backward=i + w, backward_input=i, backward_weight=w, latency=latency
    )


def _uneven(times: tuple[int, ...], latency: int) -> CostModel:
    """Stages of which each half of a backward takes as long as the forward."""
    whole = tuple(2 * each for each in times)
    return CostModel(
        forward=times, backward=whole, backward_input=times, backward_weight=times, latency=latency
    )


_EIGHT = (10, 12, 9, 11, 10, 13, 8, 14)
_SIXTEEN = (*_EIGHT, 9, 10, 12, 11, 10, 9, 13, 12)
_BYTES = CostModel(
    forward=2,
    backward=4,
    backward_input=2,
    backward_weight=2,
    activation_bytes=8,
    input_bytes=1,
    deferred_bytes=4,
    boundary_bytes=1,
    weight_bytes=4,
    gradient_bytes=4,
    bandwidth=10,
)
# Ranks, microbatches and chunks, and what else is asked for.
HARD: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
    ((4, 8, 2), {"placement": "wave", "max_activations": 5}),
    (
        (5, 10, 2),
        {
            "max_activations": 5,
            "objective": "span",
            "costs": _zero_bubble(9256, 9043, 4668, 601),
        },
    ),
    (
        (8, 24, 1),
        {
            "max_activations": 7,
            "objective": "span",
            "costs": _zero_bubble(18522, 18086, 9337, 601),
        },
    ),
    (
        (16, 48, 1),
        {
            "max_activations": 32,
            "objective": "span",
            "costs": _zero_bubble(11347, 11248, 8132, 377),
        },
    ),
    ((8, 16, 2), {"split": False, "max_activations": 11, "costs": CostModel(latency=0.25)}),
    ((4, 12, 1), {"max_activations": 3, "costs": _uneven((10, 12, 9, 11), 1)}),
    ((8, 16, 1), {"max_activations": 6, "costs": _uneven(_EIGHT, 2)}),
    ((4, 8, 2), {"memory_limit": 60, "costs": _BYTES}),
    ((4, 8, 1), {"max_activations": 2, "recompute": True}),
    ((8, 32, 2), {"max_activations": 12}),
    ((8, 16, 1), {"max_activations": 6, "objective": "span", "costs": _uneven(_EIGHT, 2)}),
    ((8, 16, 2), {"max_activations": 11, "costs": _uneven(_SIXTEEN, 1)}),
    ((16, 64, 1), {"max_activations": 14, "costs": _uneven(_SIXTEEN, 1)}),
)


def hard(seeds: int) -> None:
    """What is found for each of the hard terms, by seed, and the mean gap to the bound."""
    gaps = []
    for shape, terms in HARD:
        found = [find(*shape, **terms, seed=seed) for seed in range(seeds)]
        gaps.append(sum(each.distance for each in found) / seeds)
        values = " ".join(f"{each.value:g}" for each in found)
        print(
            f"{shape}: bound {found[0].lower_bound:g}, found {values}: {gaps[-1]:.2%}", flush=True
        )
    print(f"mean gap {sum(gaps) / len(gaps):.2%}")


def published(seconds: float) -> None:
    """The bubbles of the rows under each limit, beside those published."""
    print("ranks  microbatches  limit  until   found  bound  published  seconds")
    for ranks, microbatches, f, i, w, latency, one, two in ROWS:
        costs = CostModel(
            forward=f, backward=i + w, backward_input=i, backward_weight=w, latency=latency
        )
        work = microbatches * (f + i + w)
        for times, until, known in (
            (1, "W", one),
            (1, "I", one),
            (2, "I", two),
            (2, "W", None),
            (3, "W", None),
        ):
            begun = time.perf_counter()
            found = find(
                ranks,
                microbatches,
                costs=costs,
                max_activations=times * ranks,
                held_until=until,
                objective="span",
                seconds=seconds,
            )
            took = time.perf_counter() - begun
            print(
                f"{ranks:5}  {microbatches:12}  {times:4}P  {until:>5}  "
                f"{1 - work / found.value:.4f} {1 - work / found.lower_bound:.4f}  "
                f"{known or '':>9}  {took:7.1f}",
                flush=True,
            )


def beside_exact(many: int, seconds: float) -> None:
    """How often a search finds the optimum of random work of up to 40 actions."""
    tried = missed = 0
    for seed in range(many):
        shape, options = work_of(random.Random(seed))
        if shape[0] * shape[1] * shape[2] * (3 if options["split"] else 2) > MOST_ACTIONS:
            continue
        try:
            found = find(*shape, seconds=seconds, **options)
            best = schedir.simulate(exact(*shape, **options), options["costs"])
        except SchedirError as error:
            print(f"seed {seed}: {error}")
            continue
        spans = max(rank.span for rank in best.ranks)
        optimum = best.makespan if options["objective"] == "makespan" else spans
        tried += 1
        if found.value > optimum + 1e-9:
            missed += 1
            print(f"seed {seed}: {shape} found {found.value}, optimum {optimum}", flush=True)
    print(f"{tried - missed} of {tried} optimal")


def work_of(draw: random.Random) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Random work: ranks, microbatches and chunks, and what else there is to say of it."""
    shape = draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 3)

    def each(most: int) -> int | tuple[int, ...]:
        several = tuple(draw.randint(1, most) for _ in range(shape[0] * shape[2]))
        return draw.choice((several[0], several))

    costs = CostModel()
    if draw.random() < 0.6:
        costs = CostModel(
            forward=each(4),
            backward=each(8),
            backward_input=each(4),
            backward_weight=each(4),
            latency=draw.choice((0, 0, 1, 2)),
        )
    options: dict[str, Any] = {
        "costs": costs,
        "placement": draw.choice(("wrapped", "wave")),
        "split": draw.random() < 0.7,
        "objective": draw.choice(("makespan", "span")),
    }
    if draw.random() < 0.7:
        again = draw.random() < 0.3
        least = 1 if again else shape[2]
        options |= {
            "recompute": again,
            "max_activations": draw.randint(least, 2 * shape[0] * shape[2]),
            "held_until": draw.choice("WI"),
        }
    return shape, options


def large(seconds: float) -> None:
    """64 ranks × 256 microbatches: what is found, and in what time."""
    costs = CostModel(
        forward=10.4, backward=17.9, backward_input=10.2, backward_weight=7.7, latency=0.4
    )
    for chunks in (1, 2):
        begun, used = time.perf_counter(), time.process_time()
        found = find(64, 256, chunks, costs=costs, max_activations=100, seconds=seconds)
        print(
            f"64 × 256 × {chunks}: {found.distance:.2%} above the bound, {found.candidates} tried, "
            f"{time.perf_counter() - begun:.1f} s, {time.process_time() - used:.1f} s of a core"
        )


if __name__ == "__main__":
    main()
