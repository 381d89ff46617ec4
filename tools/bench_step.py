"""Times a training step beside torch.distributed.pipelining's: same processes, model and data.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tools/bench_step.py [--json FILE]

Both sides run in turn in the same processes, in blocks A B B A of `--steps` steps each, without a
pause within a block and with a barrier between blocks. The figure of a block is schedir's time ÷
torch's. The tool prints the median over the blocks and its bootstrap interval; a run of schedir
against schedir before that shows the noise. It also prints schedir's time ÷ the ideal: the busiest
rank's compute plus the schedule's bubble at F = 1, B = 2. There is no optimiser; gradients are
cleared by hand.

    python tools/bench_step.py --overhead [--device cuda] [--json FILE]

times the overhead per compute action over plain autograd in one process: compared with one backward
of the whole model, and with a loop that runs the stages one by one. On a GPU its events measure.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tools/bench_step.py --memory schedir|torch

measures how much three steps add to each rank's peak memory, with boundaries of 4 MiB. Each side
needs its own launch, because the peak of a process never falls.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

import schedir
from schedir.files import write_text
from schedir.runtime import Executor

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import gpt  # the example's model

MICROBATCHES = 8
Step = Callable[[], None]
T = TypeVar("T")


@attrs.frozen
class Model:
    """A model to time: its stages, a batch, and the loss."""

    name: str
    stage: Callable[[int, int], nn.Module]  # (stage, stages) -> module
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    microbatches: int = MICROBATCHES


def linear(name: str, width: int, rows: int, microbatches: int = MICROBATCHES) -> Model:
    """One linear layer and its activation per stage, `rows` rows per microbatch."""

    def stage(index: int, _: int) -> nn.Module:
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def batch() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn((2, microbatches * rows, width), generator=generator)
        return x, y

    return Model(name, stage, batch, nn.functional.mse_loss, microbatches)


def gpt_model() -> Model:
    """The example's model, on random bytes."""
    config = gpt.Config()

    def batch() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = (2, 2 * MICROBATCHES, config.context)
        x, y = torch.randint(gpt.BYTES, shape, generator=generator)
        return x, y

    return Model("gpt", lambda s, n: gpt.build_stage(config, s, n), batch, gpt.loss_fn)


WIDE = linear("wide", 1024, 1024)  # of which a boundary takes 4 MiB

MODELS = {m.name: m for m in (linear("tiny", 16, 2), linear("middle", 256, 32), gpt_model())}

SCHEDULES: dict[str, tuple[str, str, int]] = {
    "fill-drain": ("fill-drain", "ScheduleGPipe", 1),
    "1f1b": ("1f1b", "Schedule1F1B", 1),
    "interleaved-2": ("interleaved-1f1b", "ScheduleInterleaved1F1B", 2),
    "interleaved-4": ("interleaved-1f1b", "ScheduleInterleaved1F1B", 4),
}


def local_stages(model: Model, chunks: int) -> dict[int, nn.Module]:
    """This rank's stages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = ranks * chunks
    return {s: model.stage(s, stages) for s in range(rank, stages, ranks)}


def clear(stages: Mapping[int, nn.Module]) -> None:
    for module in stages.values():
        for parameter in module.parameters():
            parameter.grad = None


def schedir_step(model: Model, name: str, chunks: int) -> tuple[Step, Executor, list[float]]:
    """A step, its executor, and the seconds of compute in every step so far."""
    schedule = schedir.build(
        name,
        ranks=dist.get_world_size(),
        microbatches=model.microbatches,
        chunks=chunks if chunks > 1 else None,
    )
    stages = local_stages(model, chunks)
    executor = Executor(schedule, stages, model.loss)
    x, y = model.batch()
    busy: list[float] = []

    def step() -> None:
        busy.append(executor.step(x, target=y).busy)
        clear(stages)

    return step, executor, busy


def torch_step(model: Model, name: str, chunks: int) -> Step:
    stages = local_stages(model, chunks)
    last = dist.get_world_size() * chunks - 1
    wrapped = [
        PipelineStage(module, s, last + 1, torch.device("cpu")) for s, module in stages.items()
    ]
    generator = getattr(torch_schedules, name)
    given = wrapped if chunks > 1 else wrapped[0]
    schedule = generator(given, model.microbatches, loss_fn=model.loss)
    x, y = model.batch()
    inputs = (x,) if 0 in stages else ()
    target = y if last in stages else None

    def step() -> None:
        losses: list[Tensor] = []
        schedule.step(*inputs, target=target, losses=losses)
        clear(stages)

    return step


def block(step: Step, steps: int) -> float:
    """Seconds per step of `steps` steps back to back, on the slowest rank."""
    dist.barrier()
    started = perf_counter()
    for _ in range(steps):
        step()
    seconds = torch.tensor([(perf_counter() - started) / steps])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def compare(one: Step, other: Step, blocks: int, steps: int) -> dict[str, Any]:
    """The ratio of two steps, in blocks A B B A."""
    for step in (one, other):  # shapes are agreed on and buffers made at the first
        block(step, 3)
    ratios, ones, others = [], [], []
    for _ in range(blocks):
        a, b, c, d = (block(step, steps) for step in (one, other, other, one))
        ratios.append((a + d) / (b + c))
        ones += [a, d]
        others += [b, c]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "ratio": statistics.median(ratios),
        "low": medians[50],
        "high": medians[-51],
        "schedir_ms": 1e3 * statistics.median(ones),
        "torch_ms": 1e3 * statistics.median(others),
    }


def measure(model: Model, label: str, blocks: int, steps: int) -> dict[str, Any]:
    name, theirs, chunks = SCHEDULES[label]
    ours, executor, busy = schedir_step(model, name, chunks)
    again, second, _ = schedir_step(model, name, chunks)
    noise = compare(ours, again, blocks, steps)
    found = compare(ours, torch_step(model, theirs, chunks), blocks, steps)
    # At best the busiest rank computes without a pause but for the schedule's bubble.
    most = torch.tensor([statistics.median(busy[-2 * blocks * steps :])])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    line = schedir.simulate(executor.schedule)
    ideal = 1e3 * float(most) * float(line.makespan) / max(float(r.busy) for r in line.ranks)
    executor.close()
    second.close()
    return {
        "model": model.name,
        "schedule": label,
        **found,
        "over_ideal": found["schedir_ms"] / ideal,
        "noise": [noise["low"], noise["high"]],
    }


def overhead(chunks: int, device: str, blocks: int = 200, steps: int = 5) -> dict[str, Any]:
    """Microseconds per compute action over plain autograd, in one process on trivial modules."""
    modules = [nn.Linear(4, 4, device=device) for _ in range(chunks)]
    x, y = torch.randn(2, 2 * MICROBATCHES, 4, device=device)
    loss_fn = nn.functional.mse_loss
    name = "interleaved-1f1b" if chunks > 1 else "1f1b"
    options = {"chunks": chunks} if chunks > 1 else {}
    schedule = schedir.build(name, ranks=1, microbatches=MICROBATCHES, **options)

    def plain() -> None:
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            for module in modules:
                part = module(part)
            (loss_fn(part, target) / MICROBATCHES).backward()
        clear(stages)

    def staged() -> None:
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            inputs, outputs = [part], []
            for module in modules:
                outputs.append(module(inputs[-1]))
                inputs.append(outputs[-1].detach().requires_grad_())
            roots = [*outputs[:-1], loss_fn(outputs[-1], target) / MICROBATCHES]
            grad = None
            for given, root in zip(reversed(inputs[:-1]), reversed(roots), strict=True):
                torch.autograd.backward(root, grad)
                grad = given.grad
        clear(stages)

    stages = dict(enumerate(modules))

    def per_step(step: Step) -> float:
        if device == "cuda":
            begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begins.record()
            for _ in range(steps):
                step()
            ends.record()
            ends.synchronize()
            return float(begins.elapsed_time(ends)) / 1e3 / steps
        started = perf_counter()
        for _ in range(steps):
            step()
        return (perf_counter() - started) / steps

    with Executor(schedule, stages, loss_fn) as executor:

        def ours() -> None:
            executor.step(x, target=y)
            clear(stages)

        found: dict[str, Any] = {"stages": chunks, "device": device}
        for label, other in (("over plain autograd", plain), ("over staged autograd", staged)):
            for step in (ours, other):
                per_step(step)
            differences = []
            for _ in range(blocks):
                a, b, c, d = (per_step(step) for step in (ours, other, other, ours))
                differences.append((a + d - b - c) / 2)
            actions = 2 * chunks * MICROBATCHES
            per_action = [1e6 * difference / actions for difference in differences]
            low, middle, high = statistics.quantiles(per_action, n=4)
            found[label] = [middle, low, high]
    return found


def memory(side: str, label: str) -> dict[str, Any]:
    """What three steps add to the memory of each rank, at its peak, in MiB."""
    name, theirs, chunks = SCHEDULES[label]
    executors = []

    def step_of(model: Model) -> Step:
        if side != "schedir":
            return torch_step(model, theirs, chunks)
        step, executor, _ = schedir_step(model, name, chunks)
        executors.append(executor)
        return step

    found = added_by(step_of, MODELS["tiny"], WIDE)
    for executor in executors:
        executor.close()
    return {"side": side, "schedule": label, "MiB by rank": found}


def added_by(step_of: Callable[[T], Step], small: T, large: T) -> list[int]:
    """What three steps of a large model add to the memory of each process, at its peak, in MiB;
    those of a small one have what a first step imports come in."""
    for model in (small, large):
        step = step_of(model)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(3):
            step()
    added = torch.tensor([(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024])
    everyone = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, added)
    return [round(float(x)) for x in everyone]


HEAD = (
    "| model | schedule | schedir ms | torch ms | schedir / torch | noise | schedir / ideal |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def row(r: dict[str, Any]) -> str:
    return (
        f"| {r['model']} | {r['schedule']} | {r['schedir_ms']:.2f} | {r['torch_ms']:.2f} | "
        f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f}) | "
        f"{r['noise'][0]:.2f} to {r['noise'][1]:.2f} | {r['over_ideal']:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=[*SCHEDULES])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--overhead", action="store_true", help="per action, in one process")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of --overhead")
    parser.add_argument("--memory", choices=["schedir", "torch"], help="at its peak, by rank")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found: Any
    if args.overhead:
        found = [overhead(chunks, args.device) for chunks in (1, 4)]
        for line in found:
            print("µs per compute action, median and quartiles:", line)
    elif args.memory:
        dist.init_process_group("gloo")
        found = memory(args.memory, args.schedules[0])  # one: a process keeps its peak
        if dist.get_rank() == 0:
            print(found)
    else:
        dist.init_process_group("gloo")
        found = []
        speaks = dist.get_rank() == 0
        if speaks:
            print(HEAD)
        for name in args.models:
            for label in args.schedules:
                found.append(measure(MODELS[name], label, args.blocks, args.steps))
                if speaks:
                    print(row(found[-1]), flush=True)
    if args.json and (args.overhead or dist.get_rank() == 0):
        write_text(args.json, json.dumps(found, indent=2) + "\n")
    if not args.overhead:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
