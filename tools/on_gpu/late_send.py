"""What a matrix product takes beside a receive whose send comes late.

    rank 0   F0   post the receive of 0's gradient   F1: a product is timed     B0 …
    rank 1        F0: waits until it has been timed, B0: so the receive's kernel spins meanwhile

A receive that waits is a kernel that takes multiprocessors from compute.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

import schedir
from on_gpu.rank import arguments, begin, end, left, say
from schedir.runtime import Executor

LISTS = (
    "0F0 0SEND_ACT0 0RECV_GRAD0 0F1 0SEND_ACT1 0B0 0RECV_GRAD1 0B1 0OPTIM_STEP",
    "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1 1OPTIM_STEP",
)
STEPS = 10
PRODUCTS = 20


class Timed(nn.Linear):
    """Times products in each forward: alone at microbatch 0, beside a receive at microbatch 1."""

    def __init__(self, size: int, device: str) -> None:
        super().__init__(4, 4, device=device)
        self.square = torch.randn(size, size, device=device)
        self.found: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(_milliseconds(lambda: self.square @ self.square, str(x.device)))
        if len(self.found) % 2 == 0:
            _get_default_store().set(f"timed/{len(self.found) // 2}", "")
        return super().forward(x)


class Late(nn.Linear):
    """Has its first forward of a step wait until the other rank has timed."""

    def __init__(self, device: str) -> None:
        super().__init__(4, 4, device=device)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.forwards % 2 == 0:
            _get_default_store().wait([f"timed/{self.forwards // 2 + 1}"])
        self.forwards += 1
        return super().forward(x)


def main() -> None:
    args = arguments(__doc__).parse_args()
    begin(args.device)
    x, y = torch.randn(2, 4, 4).to(args.device)
    rank = dist.get_rank()
    size = 256 if args.device == "cpu" else 4096
    stage = Late(args.device) if rank else Timed(size, args.device)
    text = "".join(f"rank {rank}: {one}\n" for rank, one in enumerate(LISTS))
    schedule = schedir.loads(f"schedir 1\nname late\nmicrobatches 2\nplacement 0 1\n{text}")
    loss_fn, sgd = nn.functional.mse_loss, torch.optim.SGD
    with Executor(schedule, {rank: stage}, loss_fn, sgd, timeout=left() / 2) as executor:
        for _ in range(STEPS):
            executor.step(x, target=y)
    if isinstance(stage, Timed):
        warm = stage.found[4:]  # the first step has its receives elsewhere
        alone, beside = statistics.median(warm[::2]), statistics.median(warm[1::2])
        say(
            f"a product of {size}×{size} takes {alone:.3f} ms alone, {beside:.3f} ms beside a "
            f"receive that waits: {beside / alone:.2f} times as long"
        )
    end()


def _milliseconds(product: Callable[[], object], device: str) -> float:
    """Of one of several products, while the device does nothing else on this stream."""
    if device == "cpu":
        begun = perf_counter()
        product()
        return 1e3 * (perf_counter() - begun)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(PRODUCTS):
        product()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / PRODUCTS


if __name__ == "__main__":
    main()
