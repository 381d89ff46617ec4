"""Tied parameters where the caller steps: each copy's `.grad` is the plain model's.

All numbers are small integers in double precision, so that every order of sums gives the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import schedir
from schedir.runtime import Executor
from tests.built_in import SYNCHRONOUS
from tests.literals import listed
from tests.runtime.features import round_robin
from tests.runtime.kit import everyone
from tests.runtime.on_ranks import on_ranks

WITHOUT_STEPS = listed(
    2,
    "0 1",
    "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
    "1RECV_ACT0 1F0 1B0 1SEND_GRAD0 1RECV_ACT1 1F1 1B1 1SEND_GRAD1",
)


def whole_numbers(number: int) -> list[nn.Module]:
    """Stages of which the first and the last have equal weights."""
    torch.manual_seed(3)
    stages = [nn.Linear(2, 2).double() for _ in range(number)]
    with torch.no_grad():
        for parameter in (p for stage in stages for p in stage.parameters()):
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
        stages[-1].weight.copy_(stages[0].weight)
    return [*stages]


def tied(stages: Sequence[nn.Module]) -> nn.Sequential:
    """A copy of the whole model, in which both weights are one parameter."""
    model = nn.Sequential(*copy.deepcopy([*stages]))
    model[-1].weight = model[0].weight
    return model


def ties_of(number: int) -> list[list[tuple[int, str]]]:
    return [[(0, "weight"), (number - 1, "weight")]]


def summed(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum() / len(output)


def batches(number: int, rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [*torch.randint(-2, 3, (number, 2, rows, 2), generator=generator).double()]


def assert_gradients_of_plain_training(
    stages: dict[int, nn.Module],
    model: nn.Sequential,
    step: Callable[..., object],
    microbatches: int,
    pipelines: int = 1,
    own: int = 0,
) -> None:
    """After calls that accumulate, with updates and without, and after the caller has cleared."""
    for number, whole in enumerate(batches(5, 2 * microbatches * pipelines)):
        x, y = (t.chunk(pipelines)[own] for t in whole)
        step(x, target=y, update=number % 2 == 0)
        pieces = zip(*(t.chunk(microbatches * pipelines) for t in whole), strict=True)
        for a, b in pieces:
            (summed(model(a), b) / microbatches / pipelines).backward()
        for stage, module in stages.items():
            for name, parameter in module.named_parameters():
                expected = model[stage].get_parameter(name).grad
                assert parameter.grad is not None
                assert expected is not None
                assert torch.equal(parameter.grad, expected), (number, stage, name)
        if number == 2:
            for module in (*stages.values(), model):
                module.zero_grad()


def schedules() -> list[schedir.Schedule]:
    built = [schedir.build(name, ranks=2, microbatches=4) for name in SYNCHRONOUS]
    return [*built, WITHOUT_STEPS]


@pytest.mark.parametrize("schedule", schedules(), ids=lambda s: s.name)
def test_the_caller_steps_tied_copies(schedule: schedir.Schedule) -> None:
    whole = whole_numbers(schedule.stages)
    model, stages = tied(whole), dict(enumerate(whole))
    options: dict[str, Any] = {"ties": ties_of(schedule.stages), "in_process": True}
    with Executor(schedule, stages, summed, **options) as executor:
        assert_gradients_of_plain_training(stages, model, executor.step, schedule.microbatches)
        before = [p.grad.clone() for m in whole for p in m.parameters() if p.grad is not None]
        x, y = batches(1, 2 * schedule.microbatches)[0]
        executor.evaluate(x, target=y)
        executor.infer(x)
        after = [p.grad for m in whole for p in m.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_replicas_in_one_process_have_their_part_in_the_sum() -> None:
    schedule = schedir.build(round_robin, ranks=3, microbatches=4)
    whole = whole_numbers(2)
    model, stages = tied(whole), dict(enumerate(whole))
    with Executor(schedule, stages, summed, ties=ties_of(2), in_process=True) as executor:
        assert_gradients_of_plain_training(stages, model, executor.step, 4)


@on_ranks(3)
def test_replicas_on_ranks_have_their_part_in_the_sum(rank: int) -> None:
    schedule = schedir.build(round_robin, ranks=3, microbatches=4)
    whole = whole_numbers(2)
    model = tied(whole)
    stages = {stage: whole[stage] for stage in schedule.stages_of(rank)}
    with Executor(schedule, stages, summed, ties=ties_of(2)) as executor:
        assert_gradients_of_plain_training(stages, model, executor.step, 4)


@on_ranks(2)
def test_the_caller_steps_tied_copies_on_ranks(rank: int) -> None:
    for schedule in schedir.build("1f1b", ranks=2, microbatches=4), WITHOUT_STEPS:
        whole = whole_numbers(2)
        model, stages = tied(whole), {rank: whole[rank]}
        with Executor(schedule, stages, summed, ties=ties_of(2)) as executor:
            assert_gradients_of_plain_training(stages, model, executor.step, schedule.microbatches)
            grad = whole[rank].get_parameter("weight").grad
            assert grad is not None
            assert torch.equal(*everyone(grad))


@on_ranks(4)
def test_the_caller_steps_tied_copies_of_two_pipelines(rank: int) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    at = mesh.get_local_rank("pp")
    whole = whole_numbers(2)
    model, stages = tied(whole), {at: whole[at]}
    with Executor(schedule, stages, summed, ties=ties_of(2), mesh=mesh) as executor:
        assert_gradients_of_plain_training(
            stages, model, executor.step, 4, pipelines=2, own=mesh.get_local_rank("dp")
        )


def test_a_copy_without_a_gradient_gets_that_of_the_others() -> None:
    """And where none has one, none gets zeros."""

    class Detached(nn.Linear):
        used = False

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight if self.used else self.weight.detach()
            return nn.functional.linear(x, weight, self.bias)

    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = {0: Detached(2, 2), 1: Detached(2, 2)}
    with torch.no_grad():
        stages[1].weight.copy_(stages[0].weight)
    x, y = torch.randn(2, 4, 2)
    with Executor(schedule, {**stages}, summed, ties=ties_of(2), in_process=True) as executor:
        executor.step(x, target=y)
        assert [module.weight.grad for module in stages.values()] == [None, None]
    stages[1].used = not stages[0].used
    with Executor(schedule, {**stages}, summed, ties=ties_of(2), in_process=True) as executor:
        executor.step(x, target=y)
        assert stages[0].weight.grad is not None
        assert stages[1].weight.grad is not None
        assert torch.equal(stages[0].weight.grad, stages[1].weight.grad)


def test_a_failed_call_leaves_what_was_accumulated_before() -> None:
    class Fails(nn.Linear):
        failing = False

        def forward(self, x: Tensor) -> Tensor:
            if self.failing:
                raise ValueError("not now")
            return super().forward(x)

    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    last = Fails(2, 2).double()
    whole = [whole_numbers(1)[0], last]
    last.load_state_dict(whole[0].state_dict())
    x, y = batches(1, 4)[0]
    with Executor(
        schedule, dict(enumerate(whole)), summed, ties=ties_of(2), in_process=True
    ) as executor:
        executor.step(x, target=y)
        before = [m.get_parameter("weight").grad for m in whole]
        kept = [grad.clone() for grad in before if grad is not None]
        last.failing = True
        with pytest.raises(schedir.ExecutionError, match="not now"):
            executor.step(x, target=y)
        after = [m.get_parameter("weight").grad for m in whole]
        assert [torch.equal(a, b) for a, b in zip(kept, after, strict=True) if b is not None] == [
            True,
            True,
        ]
