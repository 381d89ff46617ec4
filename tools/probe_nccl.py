"""Trains over NCCL with several ranks on one GPU, and compares with one process, bit for bit.

    python tools/probe_nccl.py --ranks 4              # on one GPU
    python tools/probe_nccl.py --ranks 4 --device cpu # the same over gloo, to try the probe itself

NCCL refuses two ranks on one GPU, unless each claims to be a host of its own: NCCL_HOSTID. Their
traffic then goes through sockets, which is good for correctness and worthless for timing. Every
schedule is run by torchrun, by all ranks in one process (a stream per rank), and, where it is
synchronous, by a plain loop. Also printed: the overhead of a step in one process over plain
autograd, by CUDA events.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor

WIDTH, ROWS, STEPS, MICROBATCHES = 64, 4, 4, 8
SCHEDULES = {"fill-drain": None, "1f1b": None, "interleaved-1f1b": 2, "pipedream": None}
SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
LOSS = nn.functional.mse_loss


def sgd(parameters: object) -> torch.optim.Optimizer:
    """The optimiser of all runs."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]


def stages_of(number: int, device: torch.device) -> list[nn.Module]:
    """The model, the same in all processes."""
    torch.manual_seed(7)
    made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(number)]
    return [stage.to(device) for stage in made]


def batches(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """The data of all steps."""
    generator = torch.Generator().manual_seed(11)
    shape = (2, ROWS * MICROBATCHES, WIDTH)
    drawn = (torch.randn(shape, generator=generator) for _ in range(STEPS))
    return [(x.to(device), y.to(device)) for x, y in drawn]


def plain(stages: list[nn.Module], device: torch.device) -> None:
    """Gradient accumulation in one process."""
    optimizers = [sgd(stage.parameters()) for stage in stages]
    for x, y in batches(device):
        for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            for stage in stages:
                a = stage(a)
            (LOSS(a, b) / MICROBATCHES).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def differing(one: nn.Module, other: nn.Module) -> int:
    """How many of their parameters differ."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return sum(not torch.equal(a, b) for a, b in pairs)


def work(device: torch.device) -> None:
    """One rank's part; rank 0 prints."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, chunks in SCHEDULES.items():
        schedule = schedir.build(name, ranks=ranks, microbatches=MICROBATCHES, chunks=chunks)
        whole = stages_of(schedule.stages, device)
        local = {s: copy.deepcopy(whole[s]) for s in schedule.stages_of(rank)}
        together = dict(enumerate(copy.deepcopy(whole)))
        with Executor(schedule, local, LOSS, sgd) as executor:
            for x, y in batches(device):
                loss = executor.step(x, target=y).loss
        with Executor(schedule, together, LOSS, sgd, in_process=True) as executor:
            for x, y in batches(device):
                same_loss = executor.step(x, target=y).loss == loss
        wrong = sum(differing(module, together[s]) for s, module in local.items())
        if name != "pipedream":
            plain(whole, device)
            wrong += sum(differing(module, whole[s]) for s, module in local.items())
        found: list[object] = [None] * ranks
        dist.all_gather_object(found, (wrong, same_loss))
        if rank == 0:
            equal = all(entry == (0, True) for entry in found)
            print(f"{name}, {ranks} ranks on {device}: {'equal' if equal else found}", flush=True)
    if rank == 0:
        print(f"a step in one process takes {overhead(device)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def overhead(device: torch.device) -> str:
    """What a step of all ranks in one process takes beside plain autograd."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=MICROBATCHES)
    stages = stages_of(2, device)
    x, y = batches(device)[0]

    def loop() -> None:
        for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (LOSS(stages[1](stages[0](a)), b) / MICROBATCHES).backward()

    with Executor(schedule, dict(enumerate(stages)), LOSS, in_process=True) as executor:
        pairs = [
            (milliseconds(lambda: executor.step(x, target=y), device), milliseconds(loop, device))
            for _ in range(20)
        ]
    ours, theirs = (statistics.median(column) for column in zip(*pairs[3:], strict=True))
    return f"{ours:.2f} ms, plain autograd {theirs:.2f} ms (medians)"


def milliseconds(step: Callable[[], object], device: torch.device) -> float:
    """The time of one step, by events on the GPU."""
    if device.type == "cpu":
        started = perf_counter()
        step()
        return 1e3 * (perf_counter() - started)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))


def main() -> None:
    """Launch the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    if "RANK" in os.environ:
        os.environ["NCCL_HOSTID"] = f"schedir-{os.environ['RANK']}"  # before NCCL is loaded
        torch.use_deterministic_algorithms(True)
        work(torch.device(args.device))
        return
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no GPU is visible; --device cpu tries the probe itself, over gloo")
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    command = [sys.executable, "-m", *launch, str(Path(__file__).resolve()), "--device"]
    settings = {**SOCKETS, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, args.device], env={**os.environ, **settings}, timeout=540)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
