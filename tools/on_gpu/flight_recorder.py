"""What torch's flight recorder notes of a transfer, and what a step takes with it.

A transfer is posted within a coalesced group: does it fill one entry of the recorder, or two? With
TORCH_FR_BUFFER_SIZE=0 there is no recorder.
"""

from __future__ import annotations

import pickle
import statistics
from collections import Counter
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import schedir
from on_gpu.rank import arguments, begin, end, left, say, synchronize
from schedir.ir import RECEIVES, SENDS
from schedir.runtime import Executor

STEPS = 50


def main() -> None:
    args = arguments(__doc__).parse_args()
    begin(args.device)
    x, y = torch.randn(2, 16, 64).to(args.device)
    own = dist.get_rank()
    schedule = schedir.build("1f1b", ranks=dist.get_world_size(), microbatches=8)
    stages: dict[int, nn.Module] = {own: nn.Linear(64, 64, device=args.device)}
    loss_fn, sgd = nn.functional.mse_loss, torch.optim.SGD
    with Executor(schedule, stages, loss_fn, sgd, timeout=left() / 2) as executor:
        for _ in range(3):
            executor.step(x, target=y)
        synchronize(args.device)
        before = _entries()
        executor.step(x, target=y)
        synchronize(args.device)
        noted = Counter(name for number, name in _entries().items() if number not in before)
        posted = sum(action.kind in RECEIVES | SENDS for action in executor.schedule.flat[own])
        times = []
        for _ in range(STEPS):
            begun = perf_counter()
            executor.step(x, target=y)
            synchronize(args.device)
            times.append(1e3 * (perf_counter() - begun))
    entries = ", ".join(f"{count} of {name}" for name, count in sorted(noted.items())) or "none"
    say(f"{posted} transfers a step, entries: {entries}; {statistics.median(times):.2f} ms a step")
    end()


def _entries() -> dict[int, str]:
    """The names of what the recorder holds, by number."""
    c10d: Any = torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_nccl_trace", None) or c10d._dump_fr_trace
    options = {"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}
    entries = pickle.loads(dump(**options)).get("entries", ())
    return {entry["record_id"]: entry["profiling_name"] for entry in entries}


if __name__ == "__main__":
    main()
