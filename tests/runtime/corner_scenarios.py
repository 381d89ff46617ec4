"""Run by torchrun on 2 or 3 ranks: ranks without stages, sparse sums, and what a profile shows.

As tests/runtime/scenarios.py, one function per promise.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir.runtime import Executor
from tests.runtime.reference import accumulate
from tests.runtime.registry import Scenarios
from tests.runtime.scenarios import (
    MSE,
    adamw,
    compare,
    linear_stages,
    main,
    raises,
    random_data,
    split,
)

SCENARIOS = Scenarios()


def fill_drain(ranks: int, placement: Sequence[int]) -> schedir.Schedule:
    """All forwards, then all backwards of 4 microbatches, in so many ranks' lists."""
    lists = [""] * ranks
    for stage, rank in enumerate(placement):
        compute = [f"{stage}{kind}{m}" for kind in "FB" for m in range(4)]
        lists[rank] = " ".join([*compute, f"{stage}OPTIM_STEP"])
    head = f"schedir 1\nname gaps\nmicrobatches 4\nplacement {' '.join(map(str, placement))}\n"
    return schedir.loads(head + "".join(f"rank {r}: {text}\n" for r, text in enumerate(lists)))


@SCENARIOS.on(3)
def ranks_without_stages_take_part(rank: int) -> list[str]:
    """They train nothing, but hear the loss and clip nothing."""
    faults = []
    for placement in ((0, 2), (1, 2), (0, 1), (1,), (2,)):
        whole = linear_stages(len(placement))
        model = nn.Sequential(*copy.deepcopy(whole))
        optimizers = [adamw(stage.parameters()) for stage in model]
        schedule = fill_drain(3, placement)
        local = {s: whole[s] for s in schedule.stages_of(rank)}
        with Executor(schedule, local, MSE, adamw) as executor:
            for step, (x, y) in enumerate(random_data(3)):
                mine = executor.step(x, target=y).loss
                pieces = list(zip(split(x, 4), split(y, 4), strict=True))
                theirs = accumulate(list(model), MSE, optimizers, pieces, None, None)
                if mine != theirs:
                    faults.append(f"{placement}, step {step}: {mine} != {theirs}")
            with torch.no_grad():
                expected = float(MSE(model(x), y))
            tested = executor.evaluate(x, target=y).loss
            if abs(tested - expected) > 1e-6:
                faults.append(f"{placement}: evaluated to {tested}")
            said = executor.infer(x)
            if (said is None) != (placement[-1] != rank):
                faults.append(f"{placement}: infer returns {said}")
        faults += [f for s, module in local.items() for f in compare(module, model[s], s)]
        with Executor(schedule, local, MSE, adamw, clip_grad_norm=0.1) as executor:
            norm = executor.step(x, target=y).grad_norm
            if (norm is None) != (rank not in placement):
                faults.append(f"{placement}: the norm is {norm}")
    return faults


@SCENARIOS.on(2)
def sparse_gradients_are_not_summed(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4))
    schedule = schedir.build("1f1b", ranks=1, microbatches=2)
    tokens, y = torch.randint(7, (4, 3)), torch.randn(4, 3, 4)
    executor = Executor(schedule, {0: stage}, MSE, sgd, mesh=mesh)
    return raises(
        schedir.ExecutionError,
        "shape [7, 4] is sparse and can't be summed",
        lambda: executor.step(tokens, target=y),
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Slow(nn.Module):
    """Computes for a while, so that the next rank waits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        large = torch.ones(700, 700)
        for _ in range(8):
            large = large @ large / 700
        y: Tensor = self.linear(x) * large[0, 0]
        return y


@SCENARIOS.on(2)
def waiting_and_computing_are_apart_in_a_profile(rank: int) -> list[str]:
    schedule = schedir.build("fill-drain", ranks=2, microbatches=2)
    stage = Slow() if rank == 0 else nn.Linear(4, 4)
    x, y = random_data(1, rows=4)[0]
    with Executor(schedule, {rank: stage}, MSE, adamw) as executor:
        executor.step(x, target=y)
        with torch.profiler.profile() as profile:
            executor.step(x, target=y)
    spans = {event.name: event.time_range for event in profile.events()}
    waiting = ["1F0", "1F1"] if rank else ["0B0", "0B1"]
    faults = []
    for name in waiting:
        before, computing = spans.get(f"wait for {name}"), spans.get(name)
        if before is None or computing is None:
            faults.append(f"{name} is not in the profile with its wait: {sorted(spans)}")
        elif before.end > computing.start:
            faults.append(f"{name} waits within its computing")
    # Rank 1 has nothing to do while the first forward runs but to wait for it.
    if rank and spans["wait for 1F1"].elapsed_us() < spans["1F1"].elapsed_us():
        faults.append("the wait for 1F1 is not where it is said to be")
    return faults


@SCENARIOS.on(2)
def what_is_under_way_outlives_a_profile(rank: int) -> list[str]:
    """Sends, and receives posted ahead; work that a profiler knew of would end the process."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    x, y = random_data(1)[0]
    with Executor(schedule, {rank: linear_stages()[rank]}, MSE, adamw) as executor:
        for _ in range(5):
            with torch.profiler.profile():
                executor.step(x, target=y)
    return []


if __name__ == "__main__":
    main(SCENARIOS)
