"""Times the cost of tracing: executors with and without trace=True, in the same processes.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tools/bench_trace.py [--json FILE]

Both run in turn in blocks A B B A of `--steps` steps each, without a pause within a block and with
a barrier between blocks. The tool prints the median ratio over the blocks with its bootstrap
interval, and the median difference per action of the longest list, in microseconds. Two executors
without tracing come first; their figures are the noise. It also prints the time of gathering the
timelines, per step, and how far the clocks of two ranks may differ.

    OMP_NUM_THREADS=1 python tools/bench_trace.py --alone

measures the difference per action with all ranks in one process, in which no rank waits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import bench_step
import torch
import torch.distributed as dist
from torch import nn

import schedir
from schedir.files import write_text
from schedir.runtime import Executor


def executor_of(
    model: bench_step.Model, label: str, trace: bool
) -> tuple[bench_step.Step, Executor]:
    """A step, and its executor."""
    name, _, chunks = bench_step.SCHEDULES[label]
    schedule = schedir.build(
        name,
        ranks=dist.get_world_size(),
        microbatches=bench_step.MICROBATCHES,
        chunks=chunks if chunks > 1 else None,
    )
    stages = bench_step.local_stages(model, chunks)
    executor = Executor(schedule, stages, model.loss, trace=trace)
    x, y = model.batch()

    def step() -> None:
        executor.step(x, target=y)
        bench_step.clear(stages)

    return step, executor


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its bootstrap interval."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], statistics.median(values), medians[-51]


def compare(
    one: bench_step.Step, other: bench_step.Step, blocks: int, steps: int, actions: int
) -> dict[str, Any]:
    """How much longer one step takes than the other."""
    for step in (one, other):  # shapes are agreed on, and sizes measured, at the first
        bench_step.block(step, 3)
    ratios, differences, others = [], [], []
    for _ in range(blocks):
        a, b, c, d = (bench_step.block(step, steps) for step in (one, other, other, one))
        ratios.append((a + d) / (b + c))
        differences.append(1e6 * (a + d - b - c) / 2 / actions)
        others += [b, c]
    return {
        "ms": 1e3 * statistics.median(others),
        "ratio": interval(ratios),
        "us per action": interval(differences),
    }


def measure(model: bench_step.Model, label: str, blocks: int, steps: int) -> dict[str, Any]:
    """What recording costs the steps of a model."""
    plain, first = executor_of(model, label, trace=False)
    again, second = executor_of(model, label, trace=False)
    traced, third = executor_of(model, label, trace=True)
    actions = max(map(len, first.schedule.flat))
    noise = compare(again, plain, blocks, steps, actions)
    found = compare(traced, plain, blocks, steps, actions)
    started = perf_counter()
    timelines = third.timelines()
    took = perf_counter() - started
    for executor in (first, second, third):
        executor.close()
    measured = timelines[-1].measured if timelines else None
    return {
        "model": model.name,
        "schedule": label,
        "actions": actions,
        "noise": noise,
        **found,
        "gathered ms per step": 1e3 * took / max(len(timelines), 1),
        "clock error us": 1e6 * measured.clock_error if measured else None,
    }


def alone(ranks: int, chunks: int, pairs: int = 300, steps: int = 5) -> dict[str, Any]:
    """Microseconds per action that recording adds, all ranks in one process on trivial modules."""
    options = {"chunks": chunks} if chunks > 1 else {}
    name = "interleaved-1f1b" if chunks > 1 else "1f1b"
    schedule = schedir.build(name, ranks=ranks, microbatches=bench_step.MICROBATCHES, **options)
    x, y = torch.randn(2, 2 * bench_step.MICROBATCHES, 4)
    executors = []
    for trace in (True, False):
        stages: dict[int, nn.Module] = {s: nn.Linear(4, 4) for s in range(schedule.stages)}
        loss_fn = nn.functional.mse_loss
        executors.append(Executor(schedule, stages, loss_fn, in_process=True, trace=trace))

    def seconds(executor: Executor) -> float:
        started = perf_counter()
        for _ in range(steps):
            executor.step(x, target=y)
        return (perf_counter() - started) / steps

    times = [[seconds(executor) for executor in executors] for _ in range(pairs)][2:]
    actions = len(executors[0].schedule.columns)
    differences = [1e6 * (traced - plain) / actions for traced, plain in times]
    quickest = [1e6 * min(column) / actions for column in zip(*times, strict=True)]
    return {
        "ranks": ranks,
        "chunks": chunks,
        "actions": actions,
        "us per action": interval(differences),
        "us per action, of the quickest steps": quickest[0] - quickest[1],
    }


HEAD = (
    "| model | schedule | step ms | traced / plain | plain / plain | µs per action | noise | "
    "gathering a step, ms | clock error, µs |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def row(r: dict[str, Any]) -> str:
    """A row of the table."""

    def shown(values: Sequence[float], digits: int) -> str:
        low, middle, high = (f"{value:.{digits}f}" for value in values)
        return f"{middle} ({low} to {high})"

    noise = r["noise"]
    return (
        f"| {r['model']} | {r['schedule']} | {r['ms']:.2f} | {shown(r['ratio'], 3)} | "
        f"{shown(noise['ratio'], 3)} | {shown(r['us per action'], 2)} | "
        f"{shown(noise['us per action'], 2)} | {r['gathered ms per step']:.2f} | "
        f"{r['clock error us']:.0f} |"
    )


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models, schedules = bench_step.MODELS, bench_step.SCHEDULES
    parser.add_argument("--models", nargs="+", choices=models, default=["tiny", "gpt"])
    parser.add_argument(
        "--schedules", nargs="+", choices=schedules, default=["1f1b", "interleaved-2"]
    )
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of a block: 100, of the GPT 5")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--alone", action="store_true", help="per action, in one process")
    args = parser.parse_args()
    if args.alone:
        for shape in ((1, 1), (1, 4), (2, 1), (4, 2)):
            print(alone(*shape))
        return
    dist.init_process_group("gloo")
    speaks = dist.get_rank() == 0
    if speaks:
        print(HEAD)
    found = []
    for name in args.models:
        for label in args.schedules:
            steps = args.steps or (5 if name == "gpt" else 100)
            found.append(measure(models[name], label, args.blocks, steps))
            if speaks:
                print(row(found[-1]), flush=True)
    if args.json and speaks:
        write_text(args.json, json.dumps(found, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
