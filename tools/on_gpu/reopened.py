"""Opens and closes many executors: neither memory nor threads may grow.

python -m on_gpu.reopened [--executors 20]
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import schedir
from on_gpu.rank import arguments, begin, end, left, rank, say, synchronize
from schedir.runtime import Executor

RANKS = 2
WARM = 5  # executors after which all that is made once is there
SLACK = 64  # MiB, which is less than a communicator takes each time


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--executors", type=int, default=20)
    args = parser.parse_args()
    begin(args.device)
    x, y = torch.randn(2, 8, 4).to(args.device)
    found = []
    for _ in range(args.executors):
        open_and_close(args.device, x, y)
        if dist.is_initialized():
            dist.barrier()  # the memory is that of the device, which the other rank uses too
        found.append((memory(args.device), threads()))
    (mebibytes, number), (mebibytes_now, number_now) = found[WARM - 1], found[-1]
    said = (
        f"after {WARM} and {args.executors} executors {mebibytes:.0f} and {mebibytes_now:.0f} MiB, "
        f"{number} and {number_now} threads"
    )
    if mebibytes_now > mebibytes + SLACK or number_now > number:
        raise SystemExit(f"they leave something: {said}")
    say(said)
    end()


def open_and_close(device: str, x: Tensor, y: Tensor) -> None:
    own = rank()
    schedule = schedir.build("1f1b", ranks=RANKS, microbatches=4)
    here = range(RANKS) if own is None else schedule.stages_of(own)
    stages: dict[int, nn.Module] = {stage: nn.Linear(4, 4, device=device) for stage in here}
    sgd, alone = torch.optim.SGD, own is None
    loss_fn = nn.functional.mse_loss
    with Executor(schedule, stages, loss_fn, sgd, in_process=alone, timeout=left() / 2) as executor:
        executor.step(x, target=y)
        executor.step(x, target=y)


def memory(device: str) -> float:
    """The MiB that are taken of the device by anybody; on the CPU, by this process."""
    if device == "cpu":
        return _status("VmRSS") / 2**10
    synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free) / 2**20


def threads() -> int:
    """Those of this process, whoever has started them."""
    return _status("Threads")


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    main()
