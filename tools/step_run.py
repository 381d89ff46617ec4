"""Measures 1F1B's steps for `bench_drift.py`, under torchrun: `step_run.py`.

It prints figures as `drift_run.py` does. The model fits in a cache, so almost all time is
schedir's. The step is compared with torch's schedule and with a loop written by hand.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from time import perf_counter

import torch
import torch.distributed as dist
from bench_step import MODELS, compare, loop_step, schedir_step, torch_step


def slowest(ms: float) -> float:
    """The most of all ranks' times."""
    most = torch.tensor([ms])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def figures(blocks: int, steps: int) -> Iterator[tuple[str, float]]:
    model = MODELS["tiny"]
    dist.barrier()
    start = perf_counter()
    step, executor, _ = schedir_step(model, "1f1b")
    yield "start-up, ms", slowest(1e3 * (perf_counter() - start))
    dist.barrier()
    start = perf_counter()
    step()
    yield "first step, ms", slowest(1e3 * (perf_counter() - start))
    beside_torch = compare(step, torch_step(model, "1f1b"), blocks, steps)
    yield "µs a step", 1e3 * beside_torch["schedir_ms"]
    actions = max(map(len, executor.schedule.actions))
    yield "µs an action", 1e3 * beside_torch["schedir_ms"] / actions
    yield "a step ÷ torch's", beside_torch["ratio"]
    loop = loop_step(model, executor.schedule)
    yield "a step ÷ a hand-written loop's", compare(step, loop, blocks, steps)["ratio"]
    executor.close()


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for figure in figures(blocks=4, steps=40):
        if dist.get_rank() == 0:
            print(json.dumps(figure), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
