"""Times build, check and simulate beside torch's counterparts, on the same shapes in one process.

    python tools/bench_static.py                  # prints a table
    python tools/bench_static.py --json FILE      # and writes the figures
    python tools/bench_static.py --show           # the time of `schedir show` per microbatch

schedir: `build`, `check` (under all channel models) and `simulate`, as a user calls them.
torch:   generate and `_add_send_recv`, `_validate_schedule`, `_simulate_comms_compute`.
Both build interleaved 1F1B. The runs alternate, and each figure is the median of its runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import schedules as torch_schedules

import schedir
from schedir.files import write_text
from schedir.render import timeline_text

SHAPES = ((4, 2, 8), (16, 2, 512), (32, 2, 512), (64, 2, 512))
WIDTHS = (20_000, 40_000, 80_000)
STEPS = ("build", "check", "simulate")


def timed(steps: list[Callable[[Any], Any]], result: Any = None) -> tuple[list[float], Any]:
    """Run each step on the result of the one before: the seconds of each, and the last result."""
    seconds = []
    for step in steps:
        start = time.perf_counter()
        result = step(result)
        seconds.append(time.perf_counter() - start)
    return seconds, result


def run_schedir(ranks: int, chunks: int, microbatches: int) -> tuple[list[float], int]:
    def check(schedule: schedir.Schedule) -> schedir.Schedule:
        report = schedir.check(schedule)
        if report.clean_channels != schedir.CHANNELS or report.diagnostics:
            raise SystemExit(f"not clean under every model: {report}")
        return schedule

    def simulate(schedule: schedir.Schedule) -> schedir.Timeline:
        line = schedir.simulate(schedule)
        if not 0 < line.bubble_fraction < 1:  # it is worked out where it is asked for
            raise SystemExit(f"no bubble: {line}")
        return line

    seconds, line = timed(
        [
            lambda _: schedir.build(
                "interleaved-1f1b", ranks=ranks, chunks=chunks, microbatches=microbatches
            ),
            check,
            simulate,
        ]
    )
    return seconds, len(line.schedule.columns)


def run_torch(ranks: int, chunks: int, microbatches: int) -> tuple[list[float], int]:
    stages = ranks * chunks
    # The constructor wants the stages' modules; the lists need these four numbers only.
    generator: Any = torch_schedules.ScheduleInterleaved1F1B.__new__(
        torch_schedules.ScheduleInterleaved1F1B
    )
    generator.pp_group_size = ranks
    generator.n_local_stages = chunks
    generator._n_microbatches = microbatches
    generator.number_of_rounds = max(1, microbatches // ranks)
    generator.microbatches_per_round = microbatches // generator.number_of_rounds

    def rank_of(stage: int) -> int:
        return stage % ranks

    def validate(order: Any) -> Any:
        torch_schedules._validate_schedule(order, ranks, stages, microbatches)
        return order

    def simulate(order: Any) -> Any:
        torch_schedules._simulate_comms_compute(order, rank_of, stages)
        return order

    seconds, order = timed(
        [
            lambda _: {r: generator._calculate_single_rank_operations(r) for r in range(ranks)},
            validate,
            lambda order: torch_schedules._add_send_recv(order, rank_of, stages),
            simulate,
        ]
    )
    # torch validates before it lowers.
    generate, check, communicate, simulated = seconds
    actions = sum(action is not None for row in order.values() for action in row)
    return [generate + communicate, check, simulated], actions


def measure(shape: tuple[int, int, int], runs: int) -> dict[str, Any]:
    """Both on one shape, in turns: seconds by step, and the ratio of each pair's totals."""
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    actions = 0
    for turn in range(runs):
        for side in (0, 1) if turn % 2 else (1, 0):
            gc.collect()
            if side:
                seconds, actions = run_schedir(*shape)
                ours.append(seconds)
            else:
                theirs.append(run_torch(*shape)[0])
    ratios = sorted(sum(t) / sum(o) for o, t in zip(ours, theirs, strict=True))
    return {
        "ranks": shape[0],
        "chunks": shape[1],
        "microbatches": shape[2],
        "actions": actions,
        "schedir": dict(zip(STEPS, map(statistics.median, zip(*ours, strict=True)), strict=True)),
        "torch": dict(zip(STEPS, map(statistics.median, zip(*theirs, strict=True)), strict=True)),
        "schedir_total": [round(sum(o), 6) for o in ours],
        "torch_total": [round(sum(t), 6) for t in theirs],
        "ratio": statistics.median(ratios),
        "ratio_least": ratios[0],
        "ratio_most": ratios[-1],
    }


def table(results: list[dict[str, Any]]) -> str:
    head = [
        f"torch {torch.__version__}, Python {platform.python_version()}; milliseconds, medians",
        "",
        "| ranks × chunks × microbatches | actions | | build | check | simulate | total |"
        " torch / schedir |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = []
    for r in results:
        shape = f"{r['ranks']} × {r['chunks']} × {r['microbatches']} | {r['actions']:,}"
        spread = f"{r['ratio']:.1f} ({r['ratio_least']:.1f} to {r['ratio_most']:.1f})"
        for side, last in (("schedir", spread), ("torch", "")):
            total = statistics.median(r[f"{side}_total"])
            times = " | ".join(f"{1e3 * x:,.1f}" for x in (*r[side].values(), total))
            rows.append(f"| {shape if last else ' | '} | {side} | {times} | {last} |")
    return "\n".join([*head, *rows])


def show(runs: int) -> Iterator[str]:
    """How long the drawing of ever longer timelines takes, in a pipe and on a terminal."""
    for microbatches in WIDTHS:
        line = schedir.simulate(schedir.build("fill-drain", microbatches=microbatches))
        for width in (None, 100):
            seconds = [
                timed([partial(timeline_text, width=width)], line)[0][0] for _ in range(runs)
            ]
            median = statistics.median(seconds)
            yield (
                f"{microbatches} microbatches, width {width}: {median:.2f} s, "
                f"{1e6 * median / microbatches:.0f} µs each"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs per shape")
    parser.add_argument(
        "--shape",
        type=lambda text: tuple(map(int, text.split(","))),
        help="ranks,chunks,microbatches of one shape to measure alone",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--show", action="store_true", help="the drawing of long timelines")
    args = parser.parse_args()
    if args.show:
        for figure in show(args.runs):
            print(figure, flush=True)
        return
    shapes = [args.shape] if args.shape else SHAPES
    results = [measure(shape, args.runs) for shape in shapes]
    print(table(results))
    if args.json:
        write_text(args.json, json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
