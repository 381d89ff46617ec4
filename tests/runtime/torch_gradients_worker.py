"""Run by torchrun: one step of torch's own schedules, against plain training in one process.

Rank 0 prints one JSON line per case: {"case": …, "error": …}, the error of the parameter whose
gradient is the furthest off on any rank, relative to its largest element.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

CHUNKS = 2  # stages per rank: a V has no other number
V_PLACED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
ROWS = 2  # of a microbatch
WIDTH = 4


def make_stages(number: int) -> list[nn.Module]:
    """All boundaries have one shape, so that a mis-paired transfer arrives and the step ends."""
    torch.manual_seed(7)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())
        for _ in range(number)
    ]


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    shape = (2, microbatches * ROWS, WIDTH)
    x, y = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, y


def stages_of(rank: int, ranks: int, name: str) -> list[int]:
    """Down the ranks and back up for a V, else round and round."""
    second = CHUNKS * ranks - 1 - rank if name in V_PLACED else ranks + rank
    return [rank, second]


def run_torch(case: dict[str, Any], local: dict[int, nn.Module], x: Tensor, y: Tensor) -> None:
    """Leave torch's gradients in the `local` stages."""
    number = CHUNKS * dist.get_world_size()
    cpu = torch.device("cpu")
    schedule = getattr(torch_schedules, case["schedule"])(
        [PipelineStage(module, stage, number, cpu) for stage, module in local.items()],
        case["microbatches"],
        loss_fn=nn.functional.mse_loss,
        defer_pp_recv=case["deferred"],
    )
    inputs = (x,) if 0 in local else ()
    schedule.step(*inputs, target=y if number - 1 in local else None)


def gradients(modules: list[nn.Module]) -> list[Tensor]:
    """Those of all parameters; a missing one counts as zero."""
    found = [parameter.grad for module in modules for parameter in module.parameters()]
    return [torch.zeros(()) if grad is None else grad for grad in found]


def largest_error(case: dict[str, Any]) -> Tensor:
    """The largest relative error in this rank's stages; NaN where a gradient holds one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = make_stages(CHUNKS * ranks)
    local = {s: copy.deepcopy(whole[s]) for s in stages_of(rank, ranks, case["schedule"])}
    x, y = batch(case["microbatches"])
    nn.functional.mse_loss(nn.Sequential(*whole)(x), y).backward()
    run_torch(case, local, x, y)
    pairs = zip(gradients(list(local.values())), gradients([whole[s] for s in local]), strict=True)
    return torch.stack(
        [(mine - right).abs().max() / right.abs().max() for mine, right in pairs]
    ).max()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", required=True)
    cases = json.loads(parser.parse_args().cases)
    warnings.simplefilter("ignore")  # some of torch's schedules warn that they are new
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in cases:
        error = largest_error(case)
        errors = [torch.empty_like(error) for _ in range(dist.get_world_size())]
        dist.all_gather(errors, error)
        if dist.get_rank() == 0:
            print(json.dumps({"case": case, "error": torch.stack(errors).max().item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
