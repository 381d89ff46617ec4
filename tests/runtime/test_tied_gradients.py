"""Tied parameters where the caller steps: each copy's `.grad` is the plain model's.

All numbers are small integers in double precision, so that every order of sums gives the same.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir.runtime import Executor
from tests.built_in import SYNCHRONOUS
from tests.literals import CROSSING
from tests.runtime.features import round_robin
from tests.runtime.kit import (
    assert_equal_gradients,
    everyone,
    gradients,
    message_of,
    microbatches_of,
    numbered,
)
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_replicas import summed, whole_numbers
from tests.runtime.test_replicas_on_ranks import pipelines


def equal_ends(number: int) -> list[nn.Module]:
    """Stages of which the first and the last have equal weights."""
    stages = whole_numbers(number)
    stages[-1].get_parameter("weight").data.copy_(stages[0].get_parameter("weight"))
    return stages


def tied(stages: Sequence[nn.Module]) -> nn.Sequential:
    """A copy of the whole model, in which both weights are one parameter."""
    model = nn.Sequential(*copy.deepcopy([*stages]))
    model[-1].weight = model[0].weight
    return model


def ties_of(number: int) -> list[list[tuple[int, str]]]:
    return [[(0, "weight"), (number - 1, "weight")]]


def batches(number: int, rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [*torch.randint(-2, 3, (number, 2, rows, 2), generator=generator).double()]


def assert_gradients_of_plain_training(
    executor: Executor, model: nn.Sequential, pipelines: int = 1, own: int = 0
) -> None:
    """After calls that accumulate, with updates and without, and after the caller has cleared."""
    stages, microbatches = executor.stages, executor.schedule.microbatches
    for number, whole in enumerate(batches(5, 2 * microbatches * pipelines)):
        x, y = (t.chunk(pipelines)[own] for t in whole)
        executor.step(x, target=y, update=number % 2 == 0)
        for a, b in microbatches_of((whole[0], whole[1]), microbatches * pipelines):
            (summed(model(a), b) / microbatches / pipelines).backward()
        mine = gradients(stages.values())
        assert None not in mine
        assert_equal_gradients(mine, gradients(model[stage] for stage in stages))
        if number == 2:
            for module in (*stages.values(), model):
                module.zero_grad()


ROUND_ROBIN = schedir.build(round_robin, ranks=3, microbatches=4)
BUILT = [schedir.build(name, ranks=2, microbatches=4) for name in SYNCHRONOUS]


@pytest.mark.parametrize("schedule", [*BUILT, CROSSING, ROUND_ROBIN], ids=lambda s: s.name)
def test_the_caller_steps_tied_copies(schedule: schedir.Schedule) -> None:
    """Replicas have their part in the sum."""
    whole = equal_ends(schedule.stages)
    model, stages = tied(whole), numbered(whole)
    options: dict[str, Any] = {"ties": ties_of(schedule.stages), "in_process": True}
    with Executor(schedule, stages, summed, **options) as executor:
        assert_gradients_of_plain_training(executor, model)
        before = copy.deepcopy(gradients(whole))
        x, y = batches(1, 2 * schedule.microbatches)[0]
        executor.evaluate(x, target=y)
        executor.infer(x)
        assert_equal_gradients(gradients(whole), before)


@on_ranks(3)
def test_replicas_on_ranks_have_their_part_in_the_sum(rank: int) -> None:
    whole = equal_ends(2)
    model = tied(whole)
    stages = {stage: whole[stage] for stage in ROUND_ROBIN.stages_of(rank)}
    with Executor(ROUND_ROBIN, stages, summed, ties=ties_of(2)) as executor:
        assert_gradients_of_plain_training(executor, model)


@on_ranks(2)
def test_the_caller_steps_tied_copies_on_ranks(rank: int) -> None:
    for schedule in (BUILT[0], CROSSING):
        whole = equal_ends(2)
        model, stages = tied(whole), {rank: whole[rank]}
        with Executor(schedule, stages, summed, ties=ties_of(2)) as executor:
            assert_gradients_of_plain_training(executor, model)
            grad = whole[rank].get_parameter("weight").grad
            assert grad is not None
            assert torch.equal(*everyone(grad))


@on_ranks(4)
def test_the_caller_steps_tied_copies_of_two_pipelines(rank: int) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    mesh = pipelines()
    at = mesh.get_local_rank("pp")
    whole = equal_ends(2)
    model, stages = tied(whole), {at: whole[at]}
    with Executor(schedule, stages, summed, ties=ties_of(2), mesh=mesh) as executor:
        assert_gradients_of_plain_training(executor, model, 2, mesh.get_local_rank("dp"))


def test_a_copy_without_a_gradient_gets_that_of_the_others() -> None:
    """And where none has one, none gets zeros."""

    class Detached(nn.Linear):
        used = False

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight if self.used else self.weight.detach()
            return nn.functional.linear(x, weight, self.bias)

    schedule = schedir.build("1f1b", ranks=2, microbatches=2)
    stages = [Detached(2, 2), Detached(2, 2)]
    stages[1].weight.data.copy_(stages[0].weight)
    x, y = torch.randn(2, 4, 2)
    given: dict[str, Any] = {"ties": ties_of(2), "in_process": True}
    with Executor(schedule, numbered(stages), summed, **given) as executor:
        executor.step(x, target=y)
        assert [module.weight.grad for module in stages] == [None, None]
    stages[1].used = True
    with Executor(schedule, numbered(stages), summed, **given) as executor:
        executor.step(x, target=y)
    first, last = (module.weight.grad for module in stages)
    assert first is not None
    assert last is not None
    assert torch.equal(first, last)


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
    given: dict[str, Any] = {"ties": ties_of(2), "in_process": True}
    with Executor(schedule, numbered(whole), summed, **given) as executor:
        executor.step(x, target=y)
        kept = copy.deepcopy([m.get_parameter("weight").grad for m in whole])
        last.failing = True
        assert "not now" in message_of(executor.step, x, target=y)
        assert_equal_gradients([m.get_parameter("weight").grad for m in whole], kept)
