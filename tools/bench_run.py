"""Times a full pipeline of sleeping stages, and compares it with its simulation.

    python tools/bench_run.py                     # 4 ranks: pipedream by run, 1f1b by steps of 8

Forwards sleep for one slot, backwards for two. Each figure is the median over the blocks of
alternating turns, in slots for each microbatch, followed by the minimum and the maximum.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from in_processes import run_in_processes
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor

BATCH = 8  # microbatches


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor, slot: float) -> Tensor:
        ctx.slot = slot  # type: ignore[attr-defined]
        sleep(slot)
        return x * weight

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        sleep(2 * ctx.slot)  # type: ignore[attr-defined]
        return grad, grad.sum(), None


class Sleeping(nn.Module):
    """One weight, and a slot of time."""

    def __init__(self, slot: float) -> None:
        super().__init__()
        self.weight, self.slot = nn.Parameter(torch.ones(())), slot

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Sleeps.apply(x, self.weight, self.slot)  # type: ignore[no-untyped-call]
        return made


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slot", type=float, default=10.0, help="milliseconds")
    parser.add_argument("--segment", type=int, default=256, help="microbatches")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--out", type=Path, help="of a rank of the benchmark itself")
    args = parser.parse_args()
    if args.out is None:
        given = [a for name in ("ranks", "slot", "segment", "blocks") for a in _option(args, name)]
        out = Path(f"{Path(__file__).stem}.json")
        run_in_processes(args.ranks, Path(__file__), *given, "--out", str(out), limit=540)
        found = json.loads(out.read_text())
        out.unlink()
        _print(args, found)
        return
    found = _measured(args)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(found))
    dist.destroy_process_group()


def _option(args: argparse.Namespace, name: str) -> tuple[str, str]:
    return f"--{name}", str(getattr(args, name))


def _measured(args: argparse.Namespace) -> dict[str, list[float]]:
    """In slots a microbatch, of each turn."""
    dist.init_process_group("gloo")
    rank, slot = dist.get_rank(), args.slot / 1e3
    batches = [(torch.ones(BATCH, 4), torch.ones(BATCH, 4))] * (args.segment // BATCH)
    found: dict[str, list[float]] = {"run": [], "step": []}
    executors = {
        name: Executor(
            schedir.build(target, ranks=args.ranks, microbatches=BATCH),
            {rank: Sleeping(slot)},
            nn.functional.mse_loss,
            sgd,
        )
        for name, target in (("run", "pipedream"), ("step", "1f1b"))
    }

    def by_run() -> None:
        for _ in executors["run"].run(batches, segment=args.segment):
            pass

    def by_step() -> None:
        for x, y in batches:
            executors["step"].step(x, target=y)

    for turn in range(args.blocks + 1):  # the first one learns
        for name, train in (("run", by_run), ("step", by_step)):
            dist.barrier()
            begun = perf_counter()
            train()
            dist.barrier()
            if turn:
                found[name].append((perf_counter() - begun) / slot / args.segment)
    for executor in executors.values():
        executor.close()
    return found


def _print(args: argparse.Namespace, found: dict[str, list[float]]) -> None:
    shape = {"ranks": args.ranks, "microbatches": args.segment}
    simulated = schedir.simulate(schedir.build("pipedream", **shape)).makespan / args.segment
    drained = schedir.simulate(schedir.build("1f1b", ranks=args.ranks, microbatches=BATCH))
    expected = {"run": simulated, "step": drained.makespan / BATCH}
    for name, times in found.items():
        median = statistics.median(times)
        print(
            f"{name}: {median:.3f} slots a microbatch ({min(times):.3f} to {max(times):.3f}), "
            f"simulated {expected[name]:.3f}: {median / expected[name] - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
