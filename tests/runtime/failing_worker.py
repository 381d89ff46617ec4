"""Run by torchrun: rank 1 fails, or leaves, as its argument says; nobody catches it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor


class Failing(nn.Module):
    """Fails at its second microbatch."""

    def __init__(self, fail: Callable[[], NoReturn]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fail = fail
        self.real_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # not while shapes are found
            self.real_calls += 1
            if self.real_calls == 2:
                self.fail()
        y: Tensor = self.layer(x)
        return y


def raise_error() -> NoReturn:
    raise ValueError("no more of this\nand what else there is to say")


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit


def main(how: str) -> None:
    # torchrun ends all when one has failed, also those that have not said yet what they have to.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)  # the same batches on every rank
    x, y = torch.randn(2, 6, 4)
    schedule = schedir.build("fill-drain", ranks=ranks, microbatches=3)
    fails = rank == 1 and how in ("raise", "die")
    stage = Failing(die if how == "die" else raise_error) if fails else nn.Linear(4, 4)
    with Executor(schedule, {rank: stage}, nn.functional.mse_loss, torch.optim.SGD) as executor:
        if rank == 1 and how == "leave":
            raise SystemExit
        if rank == 1 and how == "call":
            executor.evaluate(x, target=y)
        executor.step(x, target=y)


if __name__ == "__main__":
    main(sys.argv[1])
