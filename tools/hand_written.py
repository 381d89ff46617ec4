"""A pipeline's step written by hand over gloo, as in a textbook: the floor for a runtime.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tools/hand_written.py [--alternations 20]

It prints the time of a step of schedir ÷ a step of this loop, in the same order on the same
modules: the median and quartiles of paired alternations. The loop knows all shapes, posts every
receive before the first forward, and broadcasts the loss once. Transfers to higher ranks and
transfers to lower ones have a process group each. With `--engine` it calls autograd's engine
directly instead of `Tensor.backward`, which no loop in Python can beat.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Iterator

import attrs
import torch
import torch.distributed as dist
from bench_step import SCHEDULES, Model, Step, block, clear, linear, local_stages, schedir_step
from torch import Tensor
from torch.autograd import Variable

import schedir


def posted(work: dist.Work | None) -> dist.Work:
    assert work is not None  # it is on ranks that are in no group alone
    return work


def order_of(label: str, model: Model) -> list[tuple[str, int, int]]:
    """This rank's compute in order: F or B, the stage and the microbatch."""
    name, _, chunks = SCHEDULES[label]
    options = {"chunks": chunks} if chunks > 1 else {}
    ranks = dist.get_world_size()
    schedule = schedir.build(name, ranks=ranks, microbatches=model.microbatches, **options)
    return [
        (str(action.kind), action.stage, action.microbatch)
        for action in schedule.flat[dist.get_rank()]
        if str(action.kind) in "FB" and action.microbatch is not None
    ]


def loop_step(model: Model, label: str, engine: bool = False) -> Step:
    """A step in the order of a schedule whose neighbouring stages are on different ranks."""
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), model.microbatches
    stages, order = local_stages(model, SCHEDULES[label][2]), order_of(label, model)
    last = ranks * SCHEDULES[label][2] - 1
    up: dist.ProcessGroup = dist.new_group()
    down: dist.ProcessGroup = dist.new_group()
    (x, y), share = model.batch(), torch.tensor(1 / count)
    like = x.chunk(count)[0]

    def way(peer: int) -> dist.ProcessGroup:
        return up if peer > rank else down

    def back(peer: int) -> dist.ProcessGroup:
        return down if peer > rank else up

    def backward(output: Tensor, grad: Tensor) -> None:
        if engine:
            Variable._execution_engine.run_backward(
                (output,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        else:
            output.backward(grad)

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
                backward(outputs.pop((s, m)), share if s == last else grads.pop((s, m)))
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


@attrs.frozen
class Ratio:
    """The median and the quartiles of paired alternations."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:5.2f}  ({self.low:.2f} to {self.high:.2f})"


def ratio(one: Step, other: Step, alternations: int, steps: int) -> Ratio:
    """A step ÷ another, each as long as on the slowest rank, in blocks A B B A."""
    for each in (one, other):
        block(each, 3)
    found = []
    for _ in range(alternations):
        a, b, c, d = (block(each, steps) for each in (one, other, other, one))
        found.append((a + d) / (b + c))
    return Ratio(*statistics.quantiles(found, n=4))


def rows(alternations: int, engine: bool) -> Iterator[tuple[str, Ratio]]:
    for label in ("1f1b", "fill-drain", "interleaved-2", "interleaved-4"):
        name, _, chunks = SCHEDULES[label]
        for microbatches in (8, 32) if chunks == 1 else (8,):
            for kind, width, height in (("tiny", 16, 2), ("middle", 256, 32)):
                model = linear(kind, width, height, microbatches)
                step, executor, _ = schedir_step(model, name, chunks)
                loop = loop_step(model, label, engine)
                steps = 20 if microbatches == 8 else 6
                row = f"{label:14} {kind:7} {microbatches:3} microbatches"
                yield row, ratio(step, loop, alternations, steps)
                executor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--alternations", type=int, default=20)
    parser.add_argument("--engine", action="store_true", help="call autograd's engine directly")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for row, found in rows(options.alternations, options.engine):
        if dist.get_rank() == 0:
            print(row, found, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
