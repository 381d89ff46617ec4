"""Run by torchrun: a module that fails at its second microbatch on rank 1."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.real_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # not while shapes are found
            self.real_calls += 1
            if self.real_calls == 2:
                raise ValueError("no more of this")
        y: Tensor = self.layer(x)
        return y


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)  # the same batches on every rank
    schedule = schedir.build("fill-drain", ranks=2, microbatches=3)
    stage = Failing() if rank == 1 else nn.Linear(4, 4)
    with Executor(schedule, {rank: stage}, nn.functional.mse_loss, torch.optim.SGD) as executor:
        executor.step(torch.randn(6, 4), target=torch.randn(6, 4))


if __name__ == "__main__":
    main()
