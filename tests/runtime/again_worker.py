"""Run by torchrun: several executors in turn, each of which makes and gives back its group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import schedir
from schedir.runtime import Executor


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)  # the same batches on every rank
    schedule = schedir.build("1f1b", ranks=2, microbatches=3)
    for _ in range(4):
        stages = {rank: nn.Linear(4, 4)}
        with Executor(schedule, stages, nn.functional.mse_loss, torch.optim.SGD) as executor:
            executor.step(torch.randn(6, 4), target=torch.randn(6, 4))
        if dist.is_initialized():
            raise RuntimeError("the executor has kept the process group that it made")
    print(f"rank {rank} is done")


if __name__ == "__main__":
    main()
