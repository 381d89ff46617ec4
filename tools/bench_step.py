"""Times a training step beside torch.distributed.pipelining's: same processes, model and data.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tools/bench_step.py [--json FILE]
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tools/bench_step.py --by-hand [--microbatches 32]

Both sides run in turn in the same processes, in blocks A B B A of `--steps` steps each, without a
pause within a block and with a barrier between blocks. The figure of a block is schedir's time ÷
torch's. The tool prints the median over the blocks and its bootstrap interval; a run of schedir
against schedir before that shows the noise. It also prints schedir's time ÷ the ideal: the busiest
rank's compute plus the schedule's bubble at F = 1, B = 2. There is no optimiser; gradients are
cleared by hand. `--by-hand` takes a textbook loop over gloo in place of torch's pipelining: it has
the same order, knows all shapes, posts every receive before the first forward, and broadcasts the
loss once.

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
from typing import Any

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


@attrs.frozen
class Model:
    """A model to time: its stages, a batch, and the loss."""

    name: str
    stage: Callable[[int, int], nn.Module]  # (stage, stages) -> module
    batch: Callable[[int], tuple[Tensor, Tensor]]  # of so many microbatches
    loss: Callable[[Tensor, Tensor], Tensor]


def linear(name: str, width: int, rows: int) -> Model:
    """One linear layer and its activation per stage, `rows` rows per microbatch."""

    def stage(index: int, _: int) -> nn.Module:
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def batch(microbatches: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn((2, microbatches * rows, width), generator=generator)
        return x, y

    return Model(name, stage, batch, nn.functional.mse_loss)


def gpt_model() -> Model:
    """The example's model, on random bytes."""
    config = gpt.Config()

    def batch(microbatches: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = (2, 2 * microbatches, config.context)
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


def schedir_step(
    model: Model, label: str, microbatches: int = MICROBATCHES
) -> tuple[Step, Executor, list[float]]:
    """A step, its executor, and the seconds of compute in every step so far."""
    name, _, chunks = SCHEDULES[label]
    schedule = schedir.build(
        name,
        ranks=dist.get_world_size(),
        microbatches=microbatches,
        chunks=chunks if chunks > 1 else None,
    )
    stages = local_stages(model, chunks)
    executor = Executor(schedule, stages, model.loss)
    x, y = model.batch(microbatches)
    busy: list[float] = []

    def step() -> None:
        busy.append(executor.step(x, target=y).busy)
        clear(stages)

    return step, executor, busy


def torch_step(model: Model, label: str, microbatches: int = MICROBATCHES) -> Step:
    _, name, chunks = SCHEDULES[label]
    stages = local_stages(model, chunks)
    last = dist.get_world_size() * chunks - 1
    wrapped = [
        PipelineStage(module, s, last + 1, torch.device("cpu")) for s, module in stages.items()
    ]
    generator = getattr(torch_schedules, name)
    given = wrapped if chunks > 1 else wrapped[0]
    schedule = generator(given, microbatches, loss_fn=model.loss)
    x, y = model.batch(microbatches)
    inputs = (x,) if 0 in stages else ()
    target = y if last in stages else None

    def step() -> None:
        losses: list[Tensor] = []
        schedule.step(*inputs, target=target, losses=losses)
        clear(stages)

    return step


def posted(work: dist.Work | None) -> dist.Work:
    assert work is not None  # it is on ranks that are in no group alone
    return work


def loop_step(model: Model, schedule: schedir.Schedule) -> Step:
    """A step in the order of a list without I and W whose neighbouring stages are on different
    ranks. Transfers to higher ranks and transfers to lower ones have a process group each."""
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), schedule.microbatches
    stages, last = local_stages(model, schedule.stages // ranks), schedule.stages - 1
    order = [
        (str(action.kind), action.stage, action.microbatch)
        for action in schedule.flat[rank]
        if str(action.kind) in "FB" and action.microbatch is not None
    ]
    up: dist.ProcessGroup = dist.new_group()
    down: dist.ProcessGroup = dist.new_group()
    (x, y), share = model.batch(count), torch.tensor(1 / count)
    like = x.chunk(count)[0]

    def way(peer: int) -> dist.ProcessGroup:
        return up if peer > rank else down

    def back(peer: int) -> dist.ProcessGroup:
        return down if peer > rank else up

    def step() -> None:
        batch, targets = x.chunk(count), y.chunk(count)
        inputs: dict[tuple[int, int], Tensor] = {}
        outputs: dict[tuple[int, int], Tensor] = {}
        grads: dict[tuple[int, int], Tensor] = {}
        arrives: dict[tuple[str, int, int], dist.Work] = {}
        sent, loss = [], torch.zeros(())
        for kind, s, m in order:
            if kind == "F" and s > 0:
                inputs[s, m] = torch.empty_like(like, requires_grad=True)
                peer, tag = (s - 1) % ranks, 2 * (s * count + m)
                work = dist.irecv(inputs[s, m].detach(), peer, group=back(peer), tag=tag)
                arrives["F", s, m] = posted(work)
            elif kind == "B" and s < last:
                grads[s, m] = torch.empty_like(like)
                peer, tag = (s + 1) % ranks, 2 * (s * count + m) + 1
                work = dist.irecv(grads[s, m], peer, group=back(peer), tag=tag)
                arrives["B", s, m] = posted(work)
        for kind, s, m in order:
            if (kind, s, m) in arrives:
                arrives[kind, s, m].wait()
            if kind == "F":
                output = stages[s](inputs[s, m] if s else batch[m])
                if s == last:
                    output = model.loss(output, targets[m])
                    loss += output.detach() * share
                else:
                    peer, tag = (s + 1) % ranks, 2 * ((s + 1) * count + m)
                    work = dist.isend(output.detach(), peer, group=way(peer), tag=tag)
                    sent.append(posted(work))
                outputs[s, m] = output
            else:
                outputs.pop((s, m)).backward(share if s == last else grads.pop((s, m)))
                if s:
                    grad = inputs.pop((s, m)).grad
                    assert grad is not None
                    peer, tag = (s - 1) % ranks, 2 * ((s - 1) * count + m) + 1
                    sent.append(posted(dist.isend(grad, peer, group=way(peer), tag=tag)))
        for work in sent:
            work.wait()
        dist.broadcast(loss, last % ranks)
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
        "other_ms": 1e3 * statistics.median(others),
    }


def measure(
    model: Model, label: str, microbatches: int, by_hand: bool, blocks: int, steps: int
) -> dict[str, Any]:
    ours, executor, busy = schedir_step(model, label, microbatches)
    again, second, _ = schedir_step(model, label, microbatches)
    noise = compare(ours, again, blocks, steps)
    if by_hand:
        other = loop_step(model, executor.schedule)
    else:
        other = torch_step(model, label, microbatches)
    found = compare(ours, other, blocks, steps)
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
    executors = []
    for model in (MODELS["tiny"], WIDE):  # what a first step imports comes in with the tiny one
        if side == "schedir":
            step, executor, _ = schedir_step(model, label)
            executors.append(executor)
        else:
            step = torch_step(model, label)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(3):
            step()
    added = torch.tensor([(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024])
    everyone = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, added)
    for executor in executors:
        executor.close()
    return {
        "side": side,
        "schedule": label,
        "MiB by rank": [round(float(x)) for x in everyone],
    }


HEAD = (
    "| model | schedule | schedir ms | {0} ms | schedir / {0} | noise | schedir / ideal |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def row(r: dict[str, Any]) -> str:
    return (
        f"| {r['model']} | {r['schedule']} | {r['schedir_ms']:.2f} | {r['other_ms']:.2f} | "
        f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f}) | "
        f"{r['noise'][0]:.2f} to {r['noise'][1]:.2f} | {r['over_ideal']:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=[*SCHEDULES])
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--by-hand", action="store_true", help="beside a loop, not torch")
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
            print(HEAD.format("loop" if args.by_hand else "torch"))
        # The loop takes boundaries of the shape of the input, which a GPT's have not.
        for name in args.models or [n for n in MODELS if n != "gpt" or not args.by_hand]:
            for label in args.schedules:
                how = args.microbatches, args.by_hand, args.blocks, args.steps
                found.append(measure(MODELS[name], label, *how))
                if speaks:
                    print(row(found[-1]), flush=True)
    if args.json and (args.overhead or dist.get_rank() == 0):
        write_text(args.json, json.dumps(found, indent=2) + "\n")
    if not args.overhead:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
