"""What many steps take at their peak, with few and with many microbatches.

    python -m on_gpu.memory [--steps 200]

The device's peak must not depend on the number of microbatches, nor the allocator ever have to
wait, give back and try again.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import schedir
from on_gpu.rank import begin, end, left, rank, say
from schedir.runtime import Executor

ROWS, WIDTH = 1024, 1024  # a boundary takes 4 MiB
SLACK = 1.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    begin(args.device)
    few, many = (peak(args.device, args.steps, number) for number in (8, 64))
    mebibytes = f"{few / 2**20:.0f} MiB at 8 microbatches, {many / 2**20:.0f} MiB at 64"
    if many > SLACK * few:
        raise SystemExit(f"the peak grows with the microbatches: {mebibytes}")
    say(f"{args.steps} steps each, no retry of the allocator; peak of rank 0 {mebibytes}")
    end()


def peak(device: str, steps: int, microbatches: int) -> int:
    """The bytes that are allocated at most, by steps whose shapes are known."""
    torch.cuda.empty_cache()
    own = rank()
    schedule = schedir.build("1f1b", ranks=2, microbatches=microbatches)
    here = range(2) if own is None else schedule.stages_of(own)
    stages: dict[int, nn.Module] = {s: nn.Linear(WIDTH, WIDTH, device=device) for s in here}
    x, y = torch.randn(2, ROWS, WIDTH, device=device)
    # One tensor for all: the batch itself must not grow.
    inputs, target = [x] * microbatches, [y] * microbatches

    def sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)  # type: ignore[arg-type]

    options = {"in_process": own is None, "timeout": left() / 2}
    with Executor(schedule, stages, nn.functional.mse_loss, sgd, **options) as executor:  # type: ignore[arg-type]
        executor.step(inputs, target=target)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        for _ in range(steps):
            executor.step(inputs, target=target)
        torch.cuda.synchronize()
        retries = torch.cuda.memory_stats()["num_alloc_retries"] - before
        if retries:
            raise SystemExit(f"the allocator had to try again {retries} times")
    return torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    main()
