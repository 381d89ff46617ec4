"""Times the figures that are derived from a timeline, and its saving and loading.

    python tools/bench_timeline.py                # a small one, 100,000 actions and a million

Each figure is the median of its runs. No derived figure is cached from one run to the next; the
schedule's dataflow and plan are.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import attrs

import schedir
from schedir import CostModel, Timeline

SHAPES = ((8, 1, 32), (32, 2, 256), (64, 2, 1310))
COSTS = CostModel(
    latency=0.1,
    boundary_bytes=1,
    activation_bytes=10,
    weight_bytes=100,
    gradient_bytes=100,
    optimizer_bytes=200,
)


def steps(path: Path) -> dict[str, Callable[[Timeline], object]]:
    """What is timed, by name."""
    return {
        "statistics, with bytes": lambda line: line.ranks,
        "idle time": lambda line: line.idle_columns,
        "critical path": lambda line: line.critical_path,
        "bytes over time": lambda line: [line.memory(r) for r in range(line.schedule.ranks)],
        "save": lambda line: line.save(path),
        "load": lambda line: Timeline.load(path),
    }


def measure(shape: tuple[int, int, int], runs: int, path: Path) -> list[str]:
    """A row: the actions of a shape, and the milliseconds of each step."""
    ranks, chunks, microbatches = shape
    schedule = schedir.build(
        "interleaved-1f1b", ranks=ranks, chunks=chunks, microbatches=microbatches
    )
    line = schedir.simulate(schedule, COSTS)
    row = [f"{len(schedule.columns):,}"]
    for step in steps(path).values():
        seconds = []
        for _ in range(runs):
            fresh = attrs.evolve(line)
            gc.collect()
            start = time.perf_counter()
            step(fresh)
            seconds.append(time.perf_counter() - start)
        row.append(f"{1e3 * statistics.median(seconds):,.1f}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.json")
        print(f"| actions | {' | '.join(steps(path))} |")
        print("| --- " * (1 + len(steps(path))) + "|")
        for shape in SHAPES:
            print(f"| {' | '.join(measure(shape, args.runs, path))} |", flush=True)


if __name__ == "__main__":
    main()
