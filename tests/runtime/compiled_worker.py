"""Run by torchrun: stages compiled to machine code, whose kernels would end the process if they
took the memory of a fake tensor."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

import schedir
from schedir.runtime import Executor


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    stage: Any = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    if rank:
        stage = torch.compile(stage)
    else:
        stage.forward = torch.compile(stage.forward)
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    x = torch.randn(8, 64)
    with Executor(schedule, {rank: stage}, nn.functional.mse_loss, torch.optim.SGD) as executor:
        losses = [executor.step(x, target=x).loss for _ in range(2)]
    if not losses[1] < losses[0]:
        raise RuntimeError(f"nothing is learnt: {losses}")


if __name__ == "__main__":
    main()
