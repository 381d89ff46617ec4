"""Measures 1F1B's steps for `bench_drift.py`, under torchrun: `step_run.py`.

Prints figures as `drift_run.py` does. Of a step that fits in a cache, nearly all is schedir's own
time; it is held against torch's own schedule and against a loop written by hand.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from time import perf_counter

import torch
import torch.distributed as dist
from bench_step import (
    MICROBATCHES,
    MODELS,
    Model,
    Step,
    clear,
    compare,
    local_stages,
    schedir_step,
    torch_step,
)
from torch import Tensor


def posted(work: dist.Work | None) -> dist.Work:
    assert work is not None  # it is on ranks that are in no group alone
    return work


def loop_step(model: Model) -> Step:
    """1F1B as one would write it for this model: one stage a rank, boundaries of known shape, and
    all receives posted before the first forward."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = local_stages(model, 1)
    first, last = rank == 0, rank == ranks - 1
    x, y = model.batch()

    def step() -> None:
        inputs, targets = list(x.chunk(MICROBATCHES)), y.chunk(MICROBATCHES)
        grads = [torch.empty_like(each) for each in inputs]
        arrivals, returns, sent, loss = [], [], [], torch.zeros(())
        if not first:
            inputs = [torch.empty_like(each, requires_grad=True) for each in inputs]
            arrivals = [posted(dist.irecv(each.detach(), rank - 1)) for each in inputs]
        if not last:
            returns = [posted(dist.irecv(each, rank + 1)) for each in grads]
        outputs: list[Tensor] = []

        def forward(m: int) -> None:
            nonlocal loss
            if not first:
                arrivals[m].wait()
            output = stages[rank](inputs[m])
            if last:
                output = model.loss(output, targets[m]) / MICROBATCHES
                loss += output.detach()
            else:
                sent.append(posted(dist.isend(output.detach(), rank + 1)))
            outputs.append(output)

        def backward(m: int) -> None:
            if last:
                outputs[m].backward()
            else:
                returns[m].wait()
                outputs[m].backward(grads[m])
            if not first:
                grad = inputs[m].grad
                assert grad is not None
                sent.append(posted(dist.isend(grad, rank - 1)))

        warmup = min(ranks - rank - 1, MICROBATCHES)
        for m in range(warmup):
            forward(m)
        for m in range(warmup, MICROBATCHES):
            forward(m)
            backward(m - warmup)
        for m in range(MICROBATCHES - warmup, MICROBATCHES):
            backward(m)
        for work in sent:
            work.wait()
        clear(stages)

    return step


def slowest(ms: float) -> float:
    """The most of all ranks' times."""
    most = torch.tensor([ms])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def figures(blocks: int, steps: int) -> Iterator[tuple[str, float]]:
    model = MODELS["tiny"]
    dist.barrier()
    start = perf_counter()
    step, executor, _ = schedir_step(model, "1f1b", 1)
    yield "start-up, ms", slowest(1e3 * (perf_counter() - start))
    dist.barrier()
    start = perf_counter()
    step()
    yield "first step, ms", slowest(1e3 * (perf_counter() - start))
    beside_torch = compare(step, torch_step(model, "Schedule1F1B", 1), blocks, steps)
    yield "µs a step", 1e3 * beside_torch["schedir_ms"]
    actions = max(map(len, executor.schedule.actions))
    yield "µs an action", 1e3 * beside_torch["schedir_ms"] / actions
    yield "a step ÷ torch's", beside_torch["ratio"]
    yield "a step ÷ a hand-written loop's", compare(step, loop_step(model), blocks, steps)["ratio"]
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
