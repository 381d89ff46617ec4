"""Run by torchrun on 2 and 3 ranks: stages whose tensors share memory, over gloo.

As tests/runtime/scenarios.py, one function per promise.
"""

from __future__ import annotations

import copy
import random

import torch
import torch.distributed as dist
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.runtime import aliasing
from tests.runtime.registry import Scenarios
from tests.runtime.scenarios import MSE, main

SCENARIOS = Scenarios()


@SCENARIOS.on(2, 3)
def drawn_stages_train_alike(rank: int) -> list[str]:
    """Random placements, orders and stages: as in one piece, or all ranks are told why not."""
    faults = []
    for seed in range(40):
        chance = random.Random(seed)
        schedule = aliasing.draw_schedule(chance, dist.get_world_size())
        whole = aliasing.draw_stages(chance, schedule.stages)
        whole[0] = aliasing.First(whole[0])
        stages = {s: copy.deepcopy(whole[s]) for s in schedule.stages_of(rank)}
        recompute = [s for s in range(schedule.stages) if chance.random() < 0.3]
        (inputs, target) = batch = aliasing.draw_batch(chance, schedule.microbatches)
        try:
            expected_loss, expected = aliasing.plain(whole, batch, schedule.microbatches)
        except RuntimeError:
            continue
        executor = Executor(schedule, stages, aliasing.loss_fn, recompute=recompute, timeout=60)
        try:
            loss = executor.step(inputs, target=target).loss
            executor.close()
        except schedir.ExecutionError as error:
            if "in place" not in str(error) and "inplace" not in str(error):
                faults.append(f"seed {seed}: {error}")
            continue
        found = aliasing.differences(stages, expected, whole)
        if abs(loss - expected_loss) > 1e-6:
            found.append(f"loss {loss} != {expected_loss}")
        faults += [f"seed {seed}: {fault}" for fault in found]
    return faults


@SCENARIOS.on(2)
def a_gradient_that_is_sent_after_the_next_backward(rank: int) -> list[str]:
    """Autograd adds to the position's gradient in place before the other half of it has gone."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos = nn.Parameter(torch.randn(2, 3, 4))
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(torch.tanh(x.flatten(0, 1) + self.pos.flatten(0, 1)))
            return y.view_as(x)

    schedule = schedir.loads(
        "schedir 1\nname late\nmicrobatches 2\nplacement 0 1\n"
        "rank 0: 0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1\n"
        "rank 1: 1RECV_ACT0 1RECV_ACT1 1F0 1F1 1B0 1B1 1SEND_GRAD0 1SEND_GRAD1\n"
    )
    torch.manual_seed(0)
    whole = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Positions()]
    x, y = torch.randn(2, 4, 3, 4)
    module = copy.deepcopy(whole[rank])
    with Executor(schedule, {rank: module}, MSE) as executor:
        executor.step(x, target=y)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (MSE(whole[1](whole[0](a)), b) / 2).backward()
    return [
        f"{name} differs"
        for (name, p), q in zip(module.named_parameters(), whole[rank].parameters(), strict=True)
        if p.grad is None or q.grad is None or not torch.equal(p.grad, q.grad)
    ]


if __name__ == "__main__":
    main(SCENARIOS)
