"""Times stages wrapped by FSDP2 in schedir and in torch.distributed.pipelining, in the same launch.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tools/bench_fsdp.py

Two pipelines of two ranks train the same model by 1F1B, with AdamW. Both run in turn in blocks
A B B A; the tool prints the median ratio of a step with its bootstrap interval. torch keeps weights
gathered between microbatches (`reshard_after_forward=False`), as torchtitan has it.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 tools/bench_fsdp.py --memory schedir|torch

measures how much three steps add to each process's peak memory. Each side needs its own launch,
because the peak of a process never falls.
"""

from __future__ import annotations

import argparse
import warnings

import torch
import torch.distributed as dist
from bench_step import Step, added_by, compare
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

import schedir
from schedir.runtime import Executor

MICROBATCHES, ROWS = 8, 64


def stage_of(mesh: DeviceMesh, width: int, layers: int) -> nn.Module:
    """A stage of layers, each a group of FSDP's own."""
    torch.manual_seed(mesh.get_local_rank("pp"))
    stage = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    )
    for layer in stage:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)
    return stage


def batch_of(mesh: DeviceMesh, width: int) -> tuple[Tensor, Tensor]:
    """The pipeline's own."""
    torch.manual_seed(100 + mesh.get_local_rank("dp"))
    x, y = torch.randn(2, ROWS, width)
    return x, y


def schedir_step(mesh: DeviceMesh, width: int, layers: int) -> tuple[Step, Executor]:
    schedule = schedir.build("1f1b", ranks=mesh["pp"].size(), microbatches=MICROBATCHES)
    stages = {mesh.get_local_rank("pp"): stage_of(mesh, width, layers)}
    x, y = batch_of(mesh, width)
    loss_fn = nn.functional.mse_loss
    executor = Executor(schedir.shard(schedule), stages, loss_fn, torch.optim.AdamW, mesh=mesh)

    def step() -> None:
        executor.step(x, target=y)

    return step, executor


def torch_step(mesh: DeviceMesh, width: int, layers: int) -> Step:
    number, last = mesh.get_local_rank("pp"), mesh["pp"].size() - 1
    module = stage_of(mesh, width, layers)
    group = mesh.get_group("pp")
    stage = PipelineStage(module, number, last + 1, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters())
    x, y = batch_of(mesh, width)

    def step() -> None:
        losses: list[Tensor] = []
        schedule.step(
            *((x,) if number == 0 else ()), target=y if number == last else None, losses=losses
        )
        optimizer.step()
        optimizer.zero_grad()

    return step


def memory(side: str, mesh: DeviceMesh, width: int, layers: int) -> list[int]:
    """What three steps add to the memory of each process, at its peak, in MiB."""
    executors = []

    def step_of(wide: int) -> Step:
        if side != "schedir":
            return torch_step(mesh, wide, layers)
        step, executor = schedir_step(mesh, wide, layers)
        executors.append(executor)
        return step

    found = added_by(step_of, 8, width)
    for executor in executors:
        executor.close()
    return found


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4, help="of a stage")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--memory", choices=["schedir", "torch"], help="at its peak, by process")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model = mesh, args.width, args.layers
    weights = args.layers * (args.width + 1) * args.width * 4 / 2**20
    if args.memory:
        said = f"{args.memory}: MiB added, by process: {memory(args.memory, *model)}"
    else:
        step, executor = schedir_step(*model)
        found = compare(step, torch_step(*model), args.blocks, args.steps)
        executor.close()
        said = "schedir {schedir_ms:.2f} ms, torch {torch_ms:.2f} ms, ratio {ratio:.3f} ".format(
            **found
        ) + "({low:.3f} to {high:.3f})".format(**found)
    if dist.get_rank() == 0:
        print(f"{args.layers} layers of {args.width}, {weights:.0f} MiB a stage: {said}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
