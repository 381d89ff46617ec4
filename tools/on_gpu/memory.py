"""What many steps take at their peak, with few and with many microbatches.

    python -m on_gpu.memory [--steps 200] [--rows 1024]

The device's peak must not depend on the number of microbatches, nor the allocator ever have to
wait, give back and try again.
"""

from __future__ import annotations

import torch
from torch import nn

import schedir
from on_gpu.rank import arguments, begin, end, left, rank, say
from schedir.runtime import Executor

RANKS, WIDTH = 2, 1024
FEW, MANY = 8, 64  # microbatches
SLACK = 1.05


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=1024, help="1024: a boundary takes 4 MiB")
    args = parser.parse_args()
    begin(args.device)
    few, many = (peak(args.device, number, args.steps, args.rows) for number in (FEW, MANY))
    found = f"{few / 2**20:.1f} MiB at {FEW} microbatches, {many / 2**20:.1f} MiB at {MANY}"
    if many > SLACK * few:
        raise SystemExit(f"the peak grows with the microbatches: {found}")
    say(f"{args.steps} steps each, no retry of the allocator; peak beside what stays {found}")
    end()


def peak(device: str, microbatches: int, steps: int, rows: int) -> int:
    """The bytes that steps of known shapes allocate at most, beside what is there between them:
    weights and cuBLAS's workspaces would blur the comparison."""
    own = rank()
    schedule = schedir.build("1f1b", ranks=RANKS, microbatches=microbatches)
    here = range(RANKS) if own is None else schedule.stages_of(own)
    stages: dict[int, nn.Module] = {s: nn.Linear(WIDTH, WIDTH, device=device) for s in here}
    x, y = torch.randn(2, rows, WIDTH, device=device)
    # One tensor for all: the batch itself must not grow.
    inputs, target = [x] * microbatches, [y] * microbatches

    def sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)  # type: ignore[arg-type]

    options = {"in_process": own is None, "timeout": left() / 2}
    with Executor(schedule, stages, nn.functional.mse_loss, sgd, **options) as executor:  # type: ignore[arg-type]
        executor.step(inputs, target=target)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        stays = torch.cuda.memory_allocated()
        retries = _retries()
        for _ in range(steps):
            executor.step(inputs, target=target)
        torch.cuda.synchronize()
        if (more := _retries() - retries) > 0:
            raise SystemExit(f"the allocator had to try again {more} times")
        return torch.cuda.max_memory_allocated() - stays


def _retries() -> int:
    return int(torch.cuda.memory_stats()["num_alloc_retries"])


if __name__ == "__main__":
    main()
