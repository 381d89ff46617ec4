"""The MiB of the device that an executor's communicators take.

NCCL itself says, in a file, which ones it has made. The first executor's memory has what NCCL makes
once in it; so a second one is made beside it, and that is measured.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import schedir
from on_gpu.rank import arguments, begin, end, left, say
from on_gpu.reopened import memory
from schedir.runtime import Executor


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--schedule", default="1f1b")
    args = parser.parse_args()
    begin(args.device)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "nccl")
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
        first, once, _ = _added(args.device, args.schedule, log)
        second, taken, made = _added(args.device, args.schedule, log)
        first.close()
        second.close()
    if not made:
        raise SystemExit("NCCL has said of no communicator that it is made")
    say(
        f"an executor of {args.schedule} takes {taken:.0f} MiB for {made} ends of communicators on "
        f"{dist.get_world_size()} ranks, {taken / made:.1f} MiB each; the first one {once:.0f} MiB"
    )
    end()


def _added(device: str, name: str, log: Path) -> tuple[Executor, float, int]:
    """Another executor, with the MiB that it takes on all ranks, and how many ends of communicators
    they have made."""
    ranks, own = dist.get_world_size(), dist.get_rank()
    schedule = schedir.build(name, ranks=ranks, microbatches=ranks)
    stages: dict[int, nn.Module] = {
        s: nn.Linear(4, 4, device=device) for s in schedule.stages_of(own)
    }
    dist.barrier()
    before, made_before = memory(device), _made(log)
    dist.barrier()
    executor = Executor(
        schedule, stages, nn.functional.mse_loss, torch.optim.SGD, timeout=left() / 2
    )
    dist.barrier()
    taken = memory(device) - before
    made: list[int] = [0] * ranks
    dist.all_gather_object(made, _made(log) - made_before)
    return executor, taken, sum(made)


def _made(log: Path) -> int:
    """How many communicators NCCL says that this process has made."""
    if not log.exists():
        return 0
    return sum("Init COMPLETE" in line for line in log.read_text(errors="replace").splitlines())


if __name__ == "__main__":
    main()
