"""Times schedir's static side beside torch's, on the same shapes, paired in one process.

    python tools/bench_static.py                  # prints a table
    python tools/bench_static.py --json FILE      # and writes the figures
    python tools/bench_static.py --large          # schedir alone on 10 million actions, with memory
    python tools/bench_static.py --show           # what `schedir show` takes per microbatch
    python tools/bench_static.py --wrong          # check of wrong lists beside that of a right one
    python tools/bench_static.py --price          # simulate alone: a million actions, and a few

schedir: `build`, `check` (under all channel models) and `simulate`, as a user calls them.
torch:   generate and `_add_send_recv`, `_validate_schedule`, `_simulate_comms_compute`.
Both build interleaved 1F1B. The runs alternate, and each figure is the median of its runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.pipelining import schedules as torch_schedules

import schedir
from schedir.checker import prove
from schedir.files import write_text
from schedir.ir import COMPUTE, RECEIVES, SENDS, Bools, Columns, Kind
from schedir.library import load
from schedir.passes import strip_communication
from schedir.render import timeline_text

SHAPES = ((4, 2, 8), (16, 2, 512), (32, 2, 512), (64, 2, 512))
LARGE = (128, 2, 6560)
MILLION = (64, 2, 1312)
SMALL = (8, 2, 32)
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


def large() -> str:
    """schedir alone on a list that torch would take hours for."""
    seconds, actions = run_schedir(*LARGE)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    steps = ", ".join(f"{name} {s:.1f} s" for name, s in zip(STEPS, seconds, strict=True))
    return f"{actions:,} actions: {steps}; {sum(seconds):.1f} s, {peak:.1f} GiB at the peak"


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


def without(columns: Columns, dropped: Bools) -> Columns:
    """The lists without some of their actions."""
    places = np.flatnonzero(~dropped)
    starts = np.searchsorted(columns.rank[places], np.arange(columns.ranks + 1))
    return columns.take(places, starts)


def shuffled(columns: Columns, kinds: Iterable[Kind]) -> Columns:
    """The actions of some kinds in any order, on each rank."""
    chance = np.random.default_rng(0)
    places = np.arange(len(columns))
    for rank in range(columns.ranks):
        own = np.flatnonzero(columns.is_kind(*kinds) & (columns.rank == rank))
        places[own] = chance.permutation(own)
    return columns.take(places, columns.starts)


def at_their_compute(schedule: schedir.Schedule) -> Columns:
    """Each send right after its maker, each receive right before its user: a deadlock at once."""
    columns, transfers = schedule.columns, schedule.dataflow.transfers
    place = 4 * np.arange(len(columns))
    place[transfers.send] = place[transfers.maker] + 1
    place[transfers.receive] = place[transfers.user] - 1
    return columns.take(np.lexsort((place, columns.rank)), columns.starts)


def wrong_lists(schedule: schedir.Schedule) -> dict[str, Columns]:
    """Lists that are wrong in many places, by what is wrong."""
    columns = schedule.columns
    return {
        "nothing": columns,
        "all receives shuffled": shuffled(columns, RECEIVES),
        "all sends shuffled": shuffled(columns, SENDS),
        "all compute shuffled": shuffled(columns, COMPUTE),
        "no receives": without(columns, columns.is_kind(*RECEIVES)),
        "a rank is missing": without(columns, columns.rank == 1),
        "deadlock everywhere": at_their_compute(schedule),
    }


def wrong(runs: int) -> str:
    """How long the check of wrong lists takes, in turns, and beside that of a right one."""
    schedule = load("interleaved-1f1b", ranks=32, chunks=2, microbatches=1024)
    schedule = schedir.insert_communication(schedule)
    lists = wrong_lists(schedule)
    seconds: dict[str, list[float]] = {name: [] for name in lists}
    found = {}
    for _ in range(runs):
        for name, columns in lists.items():
            gc.collect()
            # A schedule of its own, so that nothing is known of it yet.
            fresh = schedir.Schedule(name, schedule.microbatches, schedule.placement, columns)
            start = time.perf_counter()
            report = schedir.check(fresh, "rank")
            seconds[name].append(time.perf_counter() - start)
            found[name] = sum(1 + each.more for each in report.diagnostics)
    rows = [
        "| what is wrong | findings | check | beside a right list |",
        "| --- | --- | --- | --- |",
    ]
    right = statistics.median(seconds["nothing"])
    for name, own in seconds.items():
        median = statistics.median(own)
        rows.append(f"| {name} | {found[name]:,} | {median:.2f} s | {median / right:.1f} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    head = f"{len(schedule.columns):,} actions; medians of {runs}; {peak:.0f} MiB at the peak"
    return "\n".join([head, "", *rows])


def price(runs: int) -> Iterator[str]:
    """How long `simulate` takes: of a schedule that is built and proved, and of one that nobody has
    seen, as a search asks it, with its communication and without."""
    costs = schedir.CostModel(
        forward=1.5, backward=2.75, latency=0.25, boundary_bytes=3, bandwidth=8
    )
    for shape, times in ((MILLION, 1), (SMALL, 100)):
        ranks, chunks, microbatches = shape
        seconds: dict[str, list[float]] = {}
        for _ in range(runs):
            built = schedir.build(
                "interleaved-1f1b", ranks=ranks, chunks=chunks, microbatches=microbatches
            )
            compute = strip_communication(built)
            for _ in range(times):
                gc.collect()
                proved = unseen(built)
                prove(proved)
                for what, schedule in (
                    ("proved", proved),
                    ("again", proved),
                    ("new", unseen(built)),
                    ("new, compute alone", unseen(compute)),
                ):
                    start = time.perf_counter()
                    schedir.simulate(schedule, costs)
                    seconds.setdefault(what, []).append(time.perf_counter() - start)
        yield f"{' × '.join(map(str, shape))}, {len(built.columns):,} actions:"
        for what, each in seconds.items():
            least, median = (1e3 * of(each) for of in (min, statistics.median))
            yield f"    {what + ':':20} {median:10,.2f} ms, at least {least:,.2f}"


def unseen(schedule: schedir.Schedule) -> schedir.Schedule:
    """The same lists, of which nothing is known yet."""
    columns = schedule.columns
    same = columns.take(np.arange(len(columns)), columns.starts)
    return schedir.Schedule(schedule.name, schedule.microbatches, schedule.placement, same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs per shape")
    parser.add_argument(
        "--shape",
        type=lambda text: tuple(map(int, text.split(","))),
        help="ranks,chunks,microbatches of one shape to measure alone",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--large", action="store_true", help="10 million actions, schedir alone")
    parser.add_argument("--show", action="store_true", help="the drawing of long timelines")
    parser.add_argument("--wrong", action="store_true", help="wrong lists, schedir alone")
    parser.add_argument("--price", action="store_true", help="simulate alone")
    args = parser.parse_args()
    if args.price:
        for figure in price(args.runs):
            print(figure, flush=True)
        return
    if args.show:
        for figure in show(args.runs):
            print(figure, flush=True)
        return
    if args.large or args.wrong:
        print(large() if args.large else wrong(args.runs))
        return
    shapes = [args.shape] if args.shape else SHAPES
    results = [measure(shape, args.runs) for shape in shapes]
    print(table(results))
    if args.json:
        write_text(args.json, json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
