"""What a compute action takes beside the same work without a pipeline: schedir, and torch's.

    python -m on_gpu.overhead [--device cpu]

All stages are in one process, on trivial modules, so that what is timed is the host's work; on a
GPU its events take the time. The loop that both are compared with runs the stages one by one, each
with a backward of its own, as a pipeline has to.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, unlisted
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import schedir
from on_gpu.rank import arguments, begin, end, say
from schedir.runtime import Executor

STAGES, MICROBATCHES, WIDTH, ROWS = 4, 8, 64, 2
LOSS = nn.functional.mse_loss


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--blocks", type=int, default=60)
    args = parser.parse_args()
    begin(args.device)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # with NaN, which takes time
    modules: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, device=args.device) for _ in range(STAGES)]
    x, y = torch.randn(2, MICROBATCHES * ROWS, WIDTH, device=args.device)
    shape = {"ranks": 1, "microbatches": MICROBATCHES, "chunks": STAGES}
    schedule = schedir.build("interleaved-1f1b", **shape)

    def loop() -> None:
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            _one_by_one(modules, part, target)

    with Executor(schedule, dict(enumerate(modules)), LOSS, in_process=True) as executor:
        steps: dict[str, Callable[[], object]] = {
            "schedir": lambda: executor.step(x, target=y),
            "the loop": loop,
        }
        theirs = _torch_step(modules, args.device, x, y)
        with suppress(RuntimeError):  # before torch 2.13 it sends to itself, which gloo refuses
            theirs()
            steps["torch"] = theirs
        times = {name: _times(step, args) for name, step in steps.items()}
    actions = 2 * STAGES * MICROBATCHES
    plain = statistics.median(times.pop("the loop"))
    found = {n: 1e3 * (statistics.median(own) - plain) / actions for n, own in times.items()}
    said = ", ".join(f"{name} {over:.1f} µs" for name, over in found.items())
    say(f"{said} a compute action over the loop, which takes {1e3 * plain / actions:.1f} µs")
    end()


def _one_by_one(modules: list[nn.Module], part: Tensor, target: Tensor) -> None:
    given, made = [part], []
    for module in modules:
        made.append(module(given[-1]))
        given.append(made[-1].detach().requires_grad_())
    roots = [*made[:-1], LOSS(made[-1], target) / MICROBATCHES]
    grad = None
    for leaf, root in zip(reversed(given[:-1]), reversed(roots), strict=True):
        torch.autograd.backward(root, grad)
        grad = leaf.grad


def _torch_step(
    modules: list[nn.Module], device: str, x: Tensor, y: Tensor
) -> Callable[[], object]:
    """The same of torch.distributed.pipelining, on a group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    on = torch.device(device)
    schedule = ScheduleInterleaved1F1B(
        [PipelineStage(module, s, STAGES, on) for s, module in enumerate(modules)],
        MICROBATCHES,
        loss_fn=LOSS,
    )
    return lambda: schedule.step(x, target=y, losses=[])


def _times(step: Callable[[], object], args: Namespace) -> list[float]:
    """The milliseconds of a step, again and again, once it is warm."""
    for _ in range(5):
        step()
    return [_timed(step, args.device) for _ in range(args.blocks)]


def _timed(step: Callable[[], object], device: str) -> float:
    if device == "cpu":
        begun = perf_counter()
        step()
        return 1e3 * (perf_counter() - begun)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    step()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


if __name__ == "__main__":
    main()
