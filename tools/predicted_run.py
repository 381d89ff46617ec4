"""One traced run under torchrun, for `bench_predict.py`: `predicted_run.py RUN FOLDER`.

`RUN` is a `Run` as JSON. `FOLDER` gets the timelines, times of steps, and peaks of memory.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.profiler import ProfilerActivity, profile

import schedir
from schedir import Action, Pipeline, backward, forward, optim_step, schedule
from schedir.runtime import Executor
from schedir.simulator import save_timelines

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import gpt  # the example's model


@schedule(
    "fine-1f1b", chunks=2, placement=lambda pipe: [s // pipe.chunks for s in range(pipe.stages)]
)
def fine_1f1b(pipe: Pipeline, rank: int) -> Iterator[Action]:
    """1F1B, each rank's part of the model cut into stages that follow each other."""
    stages = pipe.stages_of(rank)
    warmup = min(pipe.ranks - rank - 1, pipe.microbatches)
    for m in range(pipe.microbatches + warmup):
        if m < pipe.microbatches:
            yield from (forward(stage, m) for stage in stages)
        if m >= warmup:
            yield from (backward(stage, m - warmup) for stage in reversed(stages))
    yield from map(optim_step, stages)


@attrs.frozen
class Run:
    """A run to make: which schedule of which shape trains which model, and for how many steps after
    how many that are not measured (`warm`), and whether to count the memory that torch allocates,
    which takes time."""

    model: str
    name: str
    ranks: int
    microbatches: int
    chunks: int = 1
    steps: int = 20
    memory: bool = False
    warm: int = 3

    @property
    def schedule(self) -> schedir.Schedule:
        """Its schedule, as it is given to the executor."""
        return schedir.build(
            fine_1f1b if self.name == "fine-1f1b" else self.name,
            ranks=self.ranks,
            microbatches=self.microbatches,
            chunks=self.chunks if self.chunks > 1 else None,
        )


class Nap(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    """A stage that sleeps for a time of its own, backward twice as long as forward."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.seconds = 1e-3 * (5 + 3 * stage % 7)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Nap.apply(self.linear(x), self.seconds)  # type: ignore[no-untyped-call]
        return found


def model_of(run: Run, stages: int) -> tuple[dict[int, nn.Module], Any, Tensor, Tensor]:
    """This rank's stages, the loss, and a batch."""
    own = run.schedule.stages_of(dist.get_rank())
    chance = torch.Generator().manual_seed(1)
    if run.model in ("sleep", "tiny"):
        x, y = torch.randn((2, run.microbatches, 16), generator=chance)
        stage = Sleeper if run.model == "sleep" else lambda _: nn.Linear(16, 16)
        return {s: stage(s) for s in own}, nn.functional.mse_loss, x, y
    config = gpt.Config()
    x, y = torch.randint(gpt.BYTES, (2, 2 * run.microbatches, config.context), generator=chance)
    return {s: gpt.build_stage(config, s, stages) for s in own}, gpt.loss_fn, x, y


class Allocated:
    """The bytes that torch has allocated on this rank since this was made."""

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def peak(self, since: int) -> int:
        """The most since a moment, in nanoseconds of the system's time. Ends the count."""
        self._profiler.stop()
        held, most = 0, 0
        results: Any = self._profiler.profiler
        for event in results.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                if event.start_ns() >= since:
                    most = max(most, held)
        return most


def main() -> None:
    warnings.simplefilter("ignore")
    run, folder = Run(**json.loads(sys.argv[1])), Path(sys.argv[2])
    dist.init_process_group("gloo")
    allocated = Allocated() if run.memory else None
    stages, loss_fn, x, y = model_of(run, run.ranks * run.chunks)

    def optimizer(weights: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights)

    elapsed = []
    with Executor(run.schedule, stages, loss_fn, optimizer, trace=True) as executor:
        for _ in range(run.warm):
            executor.step(x, target=y)
        if run.warm:
            executor.timelines()
        for _ in range(run.steps):
            began = time.time_ns()
            elapsed.append(executor.step(x, target=y).elapsed)
        lines = executor.timelines()
    peaks = [allocated.peak(began) if allocated else 0]  # of the last step
    everyone: list[Any] = [None] * run.ranks
    dist.all_gather_object(everyone, peaks)
    if dist.get_rank() == 0:
        save_timelines(lines, folder / "timelines.json")
        beside = {"elapsed": elapsed, "peaks": [peak for own in everyone for peak in own]}
        (folder / "beside.json").write_text(json.dumps(beside))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
