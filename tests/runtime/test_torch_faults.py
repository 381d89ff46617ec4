"""What torch.distributed.pipelining 2.13 gets wrong at run time, each done right here."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.literals import listed
from tests.runtime.kit import (
    MSE,
    assert_equal_gradients,
    gradients,
    linear_stages,
    microbatches_of,
    numbered,
)


def built(microbatches: int) -> schedir.Schedule:
    return schedir.build("1f1b", ranks=2, microbatches=microbatches)


def plain(
    stages: dict[int, nn.Module], x: Tensor, y: Tensor, order: Sequence[int]
) -> list[Tensor | None]:
    """The gradients of a copy, by accumulation in this order."""
    model = nn.Sequential(*copy.deepcopy(list(stages.values())))
    model.zero_grad()
    pieces = microbatches_of((x, y), len(order))
    for m in order:
        (MSE(model(pieces[m][0]), pieces[m][1]) / len(order)).backward()
    return gradients([model])


def test_outputs_and_losses_belong_to_their_microbatch_not_to_the_order_of_arrival() -> None:
    schedule = listed(2, "0 1", "0F0 0F1 0B1 0B0 0OPTIM_STEP", "1F1 1F0 1B1 1B0 1OPTIM_STEP")
    stages = numbered(linear_stages(2))
    x, y = torch.randn(2, 6, 4)
    with Executor(schedule, stages, MSE, in_process=True) as executor:
        result = executor.step(x, target=y, outputs=True)
    model = nn.Sequential(*stages.values())
    outputs = [model(piece).detach() for piece in x.chunk(2)]
    assert result.outputs is not None
    assert all(map(torch.equal, result.outputs, outputs))
    losses = [float(MSE(a, b)) for a, b in zip(outputs, y.chunk(2), strict=True)]
    assert (result.loss, [*result.losses]) == ((3 * losses[0] + 3 * losses[1]) / 6, losses)
    assert_equal_gradients(gradients(stages.values()), plain(stages, x, y, (1, 0)))


def test_two_steps_accumulate_two_gradients() -> None:
    stages = numbered(linear_stages(2))
    x, y = torch.randn(2, 8, 4)
    with Executor(built(4), stages, MSE, in_process=True) as e:
        e.step(x, target=y)
        once = copy.deepcopy(gradients(stages.values()))
        e.step(x, target=y)
    assert_equal_gradients(once, plain(stages, x, y, range(4)))
    for twice, grad in zip(gradients(stages.values()), once, strict=True):
        assert grad is not None
        torch.testing.assert_close(twice, 2 * grad)


def test_finding_shapes_runs_no_module_on_garbage() -> None:
    seen: list[Tensor] = []

    class Records(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:  # not in the fake run
                seen.append(x.detach().clone())
            return x

    torch.manual_seed(1)
    stages: dict[int, nn.Module] = {
        0: nn.Sequential(nn.Embedding(5, 4), nn.Flatten()),
        1: nn.Sequential(Records(), nn.BatchNorm1d(8)),
    }
    twin = copy.deepcopy(stages)
    tokens, y = torch.randint(5, (8, 2)), torch.randn(8, 8)
    with Executor(built(4), stages, MSE, in_process=True) as e:
        e.step(tokens, target=y)
    for piece in tokens.chunk(4):
        twin[1](twin[0](piece))
    assert len(seen) == 8  # four here, four in the twin
    assert torch.equal(stages[1][1].running_mean, twin[1][1].running_mean)  # type: ignore[index]
