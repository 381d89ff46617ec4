"""One measurement of the code base that PYTHONPATH names: `drift_run.py WHAT`.

It prints each figure as a line of JSON, [name, value], and [null, reason] if it must stop.
`bench_drift.py` starts it. It uses only public names, which older code bases have too.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import process_time
from typing import Any, TypeAlias

import schedir
from schedir import CostModel, Schedule

Figures: TypeAlias = Iterator[tuple[str, float]]
Lists: TypeAlias = list[list[str]]
"""Each rank's list, as tokens."""

INTERLEAVED = partial(schedir.build, "interleaved-1f1b", chunks=2)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """How long a call keeps the processor busy, in ms, and what it returns."""
    start = process_time()
    result = call()
    return 1e3 * (process_time() - start), result


def cycle(build: Callable[[], Schedule], costs: CostModel | None = None) -> Figures:
    """What a user waits for: the list built, proved under all models, and simulated."""
    gc.collect()
    took, schedule = timed(build)
    yield "build", took
    took, report = timed(partial(schedir.check, schedule))
    if not report.ok or report.clean_channels != schedir.CHANNELS:
        raise ValueError(f"not clean under every model: {report}")
    yield "check", took
    # The bubble is worked out where it is asked for.
    yield "simulate", timed(lambda: schedir.simulate(schedule, costs).bubble_fraction)[0]


def interleaved(ranks: int, microbatches: int, times: int = 1) -> Figures:
    """The cycle at the textbook's costs and at others: medians, after one that warms up."""
    build = partial(INTERLEAVED, ranks=ranks, microbatches=microbatches)
    dict(cycle(build))
    runs = [dict(cycle(build)) for _ in range(times)]
    for part in runs[0]:
        yield f"{part}, ms", median(run[part] for run in runs)
    yield "in all, ms", median(sum(run.values()) for run in runs)
    stages = range(2 * ranks)
    costs = CostModel(
        forward=tuple(1 + stage % 3 / 4 for stage in stages),
        backward=tuple(2 + stage % 5 / 4 for stage in stages),
        latency=0.25,
        boundary_bytes=3,
        bandwidth=8,
    )
    runs = [dict(cycle(build, costs)) for _ in range(times)]
    yield "simulate at other costs, ms", median(run["simulate"] for run in runs)
    yield "in all at other costs, ms", median(sum(run.values()) for run in runs)


def alone(build: Callable[[], Schedule]) -> Figures:
    """The first cycle of a process, and the memory that it needs."""
    parts = dict(cycle(build))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    for part, ms in parts.items():
        yield f"{part}, ms", ms
    yield "in all, µs an action", 1e3 * sum(parts.values()) / sum(map(len, build().actions))
    yield "memory, MB", peak


def tokens_of(schedule: Schedule) -> tuple[str, Lists]:
    """The head of a schedule's text, and its lists."""
    head, *rows = schedir.dumps(schedule).split("\nrank ")
    return head, [row.partition(":")[2].split() for row in rows]


def is_compute(token: str) -> bool:
    return "_" not in token


def shuffled(lists: Lists, chosen: Callable[[str], bool]) -> Lists:
    """The chosen actions in any order, on each rank."""
    chance = random.Random(0)
    found = []
    for own in lists:
        places = [i for i, token in enumerate(own) if chosen(token)]
        other = own.copy()
        for place, source in zip(places, chance.sample(places, len(places)), strict=True):
            other[place] = own[source]
        found.append(other)
    return found


def at_their_compute(lists: Lists) -> Lists:
    """Each send right after its maker, each receive right before its user: a deadlock at once."""
    found = []
    for own in lists:
        listed, other = set(own), []
        for token in own:
            for kind, come, go in (("F", "RECV_ACT", "SEND_ACT"), ("B", "RECV_GRAD", "SEND_GRAD")):
                if is_compute(token) and kind in token:
                    around = token.replace(kind, come), token, token.replace(kind, go)
                    other += [each for each in around if each in listed]
            if token.endswith("STEP"):
                other.append(token)
        if Counter(other) != Counter(own):
            raise ValueError("an action has got lost")
        found.append(other)
    return found


def wrong(ranks: int, microbatches: int) -> Figures:
    """How long the check of lists takes that are wrong in many places, beside the right one's."""
    head, lists = tokens_of(INTERLEAVED(ranks=ranks, microbatches=microbatches))

    def check(those: Lists) -> float:
        rows = (f"\nrank {rank}: {' '.join(own)}" for rank, own in enumerate(those))
        schedule = schedir.loads("".join((head, *rows, "\n")))
        gc.collect()
        return timed(partial(schedir.check, schedule, "rank"))[0]

    check(lists)  # warms up
    right = check(lists)
    yield "all receives shuffled", check(shuffled(lists, lambda token: "RECV" in token)) / right
    yield "all sends shuffled", check(shuffled(lists, lambda token: "SEND" in token)) / right
    yield "all compute shuffled", check(shuffled(lists, is_compute)) / right
    yield "no receives", check([[t for t in own if "RECV" not in t] for own in lists]) / right
    yield "a rank is missing", check([own * (rank != 1) for rank, own in enumerate(lists)]) / right
    yield "deadlock everywhere", check(at_their_compute(lists)) / right


def torch_cycle(ranks: int, microbatches: int) -> Figures:
    """What torch takes for the same."""
    from bench_static import run_torch

    yield "ms", timed(partial(run_torch, ranks, 2, microbatches))[0]


MEASURED: dict[str, Callable[[], Figures]] = {
    "3k": partial(interleaved, 8, 32, times=40),
    "391k": partial(interleaved, 64, 512),
    "torch": partial(torch_cycle, 64, 512),
    "988k": partial(alone, partial(schedir.build, "1f1b", ranks=64, microbatches=2600)),
    "10M": partial(alone, partial(INTERLEAVED, ranks=128, microbatches=6560)),
    "wrong": partial(wrong, 32, 1024),
}


def main(arguments: Sequence[str]) -> None:
    try:
        for figure in MEASURED[arguments[0]]():
            print(json.dumps(figure), flush=True)
    except Exception as error:
        print(json.dumps([None, f"{type(error).__name__}: {error}"]))


if __name__ == "__main__":
    main(sys.argv[1:])
