"""Run by torchrun: stages split over tp; process 1 ends, as its argument says, in a forward."""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir.runtime import Executor
from tests.runtime.layouts import blocks, split_up


class Fails(nn.Module):
    """A stage that stops or ends its process at its third forward in training."""

    def __init__(self, stage: nn.Module, how: signal.Signals) -> None:
        super().__init__()
        self.stage, self.how, self.calls = stage, how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), self.how)
        y: Tensor = self.stage(x)
        return y


def main(how: str) -> None:
    # torchrun ends all when one has failed, also those that have not said yet what they have to.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pp, tp = mesh["pp"].get_local_rank(), mesh["tp"].get_local_rank()
    stage = split_up(blocks(2)[pp], mesh["tp"])
    if (pp, tp) == (0, 1):
        stage = Fails(stage, signal.Signals[how])
    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    x = torch.ones(4, 4)
    with Executor(
        schedule, {pp: stage}, nn.functional.mse_loss, torch.optim.SGD, mesh=mesh, timeout=8
    ) as executor:
        for _ in range(3):
            executor.step(x, target=x)


if __name__ == "__main__":
    main(sys.argv[1])
