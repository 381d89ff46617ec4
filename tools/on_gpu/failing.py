"""Three ranks, of which rank 1 fails in step 2, in some way: `python -m on_gpu.failing HOW`.

Nobody catches that, as in users' scripts. `on_gpu.failures` starts this and judges how ranks end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from threading import Event
from time import time

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

import schedir
from on_gpu.rank import arguments, begin
from schedir.runtime import Executor

RANKS, CULPRIT = 3, 1
MICROBATCHES = 3
TIMEOUT = 15.0  # seconds that a rank waits for another
BEGINS = "it begins at "  # rank 1 says when
STUCK = "a rank is stuck"  # a key of the store


class Does(nn.Linear):
    """From when it is armed on, does something in each forward, which it tells how many it is."""

    def __init__(self, does: Callable[[int], object]) -> None:
        super().__init__(4, 4)
        self.does, self.armed, self.forwards = does, False, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            self.forwards += 1
            self.does(self.forwards)
        return super().forward(x)


def raises(forwards: int) -> None:
    if forwards == 2:
        begins()
        raise ValueError("no more of this")


def dies(forwards: int) -> None:
    if forwards == 2:
        begins()
        os.kill(os.getpid(), signal.SIGKILL)


def raises_beside_a_stuck_rank(forwards: int) -> None:
    if forwards == 2:
        _get_default_store().wait([STUCK])
    raises(forwards)


def gets_stuck(forwards: int) -> None:
    """Wait for a microbatch that never comes, on another stream; at the second one at the latest.

    The CPU has no streams: there it just waits for ever.
    """
    _get_default_store().set(STUCK, "")
    print("waits for all of its device", flush=True)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    else:
        Event().wait()


def begins() -> None:
    print(f"{BEGINS}{time()}", flush=True)


HOW: dict[str, dict[int, Callable[[int], object]]] = {
    "raises": {CULPRIT: raises},
    "dies": {CULPRIT: dies},
    "never-calls": {},
    "leaves": {},
    "beside-a-stuck-rank": {CULPRIT: raises_beside_a_stuck_rank, CULPRIT + 1: gets_stuck},
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("how", choices=HOW)
    args = parser.parse_args()
    begin(args.device)
    rank = int(os.environ["RANK"])
    x, y = torch.randn(2, 2 * MICROBATCHES, 4).to(args.device)
    stage = Does(HOW[args.how].get(rank, int)).to(args.device)
    schedule = schedir.build("fill-drain", ranks=RANKS, microbatches=MICROBATCHES)
    sgd = torch.optim.SGD
    executor = Executor(schedule, {rank: stage}, nn.functional.mse_loss, sgd, timeout=TIMEOUT)
    executor.step(x, target=y)
    print("step 1 is done", flush=True)
    stage.armed = True
    if rank == CULPRIT and args.how == "never-calls":
        begins()
        Event().wait()
    if rank == CULPRIT and args.how == "leaves":
        begins()
        sys.exit()
    executor.step(x, target=y)
    print("step 2 is done", flush=True)
    executor.close()


if __name__ == "__main__":
    main()
