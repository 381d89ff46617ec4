"""Run by torchrun on four processes: two pass a mesh of themselves alone, two a mesh of all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import schedir
from schedir.runtime import Executor

DIMS = ("pp", "tp")


def main() -> None:
    dist.init_process_group("gloo")
    some = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=DIMS)
    every = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=DIMS)
    mesh = every if dist.get_rank() > 1 else some
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    stage = {mesh["pp"].get_local_rank(): nn.Linear(4, 4)}
    x = torch.ones(4, 4)
    options = {"mesh": mesh, "timeout": 2}
    try:
        with Executor(schedule, stage, nn.functional.mse_loss, torch.optim.SGD, **options) as made:  # type: ignore[arg-type]
            print(f"{made.step(x, target=x).loss >= 0}")
    except schedir.ExecutionError as error:
        print(error)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
