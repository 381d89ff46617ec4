"""Replicas of a stage whose ranks are all in one process, held against the recurrence that the
lists stand for, and against the same list on processes of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import plain_step, recurrence_of
from torch import nn

import schedir
from schedir.runtime import Executor
from tests.literals import listed
from tests.runtime.features import round_robin
from tests.runtime.kit import (
    MSE,
    Twins,
    assert_equal_gradients,
    gradients,
    linear_stages,
    message_of,
    microbatches_of,
    numbered,
    random_batches,
    sgd,
)
from tests.runtime.lists import ROUNDS, STALE_REPLICAS
from tests.runtime.on_ranks import on_ranks

ROUND_ROBIN = schedir.build(round_robin, ranks=3, microbatches=5)
SCHEDULES = [ROUND_ROBIN, STALE_REPLICAS, ROUNDS]


def whole_numbers(number: int) -> list[nn.Module]:
    torch.manual_seed(3)
    stages: list[nn.Module] = [nn.Linear(2, 2).double() for _ in range(number)]
    with torch.no_grad():
        for p in (p for stage in stages for p in stage.parameters()):
            p.copy_(torch.randint(-3, 4, p.shape))
    return stages


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum() / len(output)


def halves(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def assert_trains(schedule: schedir.Schedule, rank: int | None) -> None:
    twins = Twins(linear_stages(schedule.stages), schedule, rank)
    with twins.executor() as executor:
        for batch in random_batches(3, 2 * schedule.microbatches + 1):
            loss = executor.step(batch[0], target=batch[1]).loss
            expected = twins.step(batch, recurrence=recurrence_of(schedule))
            assert loss == pytest.approx(expected, rel=1e-6)
    twins.assert_equal()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_in_one_process(schedule: schedir.Schedule) -> None:
    assert_trains(schedule, None)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@on_ranks(3)
def test_on_ranks(rank: int, schedule: schedir.Schedule) -> None:
    assert_trains(schedule, rank)


def test_a_version_is_kept_while_a_replica_reads_it() -> None:
    stages = numbered(linear_stages(STALE_REPLICAS.stages))
    with Executor(STALE_REPLICAS, stages, MSE, sgd, in_process=True) as executor:
        weights = executor._engine.stages[0].weights
        ((x, y),) = random_batches(1)
        executor.step(x, target=y)
        assert weights.stashes
        assert len(weights._pool) == 1  # given back
        assert not weights._stashed


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("optimizer", [None, sgd])
def test_gradients_accumulate_on_the_one_module(calls: int, optimizer: Any) -> None:
    """Of small integers, so that every order of sums gives the same."""
    schedule = schedir.build(round_robin, ranks=3, microbatches=4)
    stages = whole_numbers(2)
    plain = copy.deepcopy(stages)
    x, y = torch.randint(-3, 4, (2, 8, 2)).double()
    with Executor(schedule, numbered(stages), summed, optimizer, in_process=True) as executor:
        for _ in range(calls):
            executor.step(x, target=y, update=False)
            plain_step(plain, summed, (), microbatches_of((x, y), 4))
            assert_equal_gradients(gradients(stages), gradients(plain))
        if optimizer is not None:
            executor.step(x, target=y)
            assert gradients(stages) == [None] * 4


def test_tied_replicas_are_scaled_once() -> None:
    """They wait for the tie, each with the sum; of small integers, so that its order is no matter.

    Held against the same training with one replica.
    """
    tied = ["1F0 1F1 1B0 1B1 1OPTIM_STEP", "2F0 2B0 2OPTIM_STEP 2F1 2B1 2OPTIM_STEP"]
    replicas = [f"0F{m} 0B{m} 0REDUCE_GRAD 0OPTIM_STEP" for m in range(2)]
    trained = []
    for placement, lists in (
        ("0,1 2 3", [*replicas, *tied]),
        ("0 1 2", ["0F0 0F1 0B0 0B1 0OPTIM_STEP", *tied]),
    ):
        schedule = schedir.insert_communication(listed(2, placement, *lists))
        stages = whole_numbers(3)
        stages[1].load_state_dict(stages[0].state_dict())
        given: dict[str, Any] = {"ties": [[(0, "weight"), (1, "weight")]], "in_process": True}
        with Executor(schedule, numbered(stages), summed, halves, **given) as executor:
            x, y = torch.randint(-3, 4, (2, 4, 2), generator=torch.Generator()).double()
            executor.step(x, target=y)
        assert torch.equal(stages[0].get_parameter("weight"), stages[1].get_parameter("weight"))
        trained.append([p.detach() for stage in stages for p in stage.parameters()])
    assert all(map(torch.equal, *trained))


def test_a_failed_step_leaves_an_executor_that_works() -> None:
    twins = Twins(linear_stages(), ROUND_ROBIN)
    fails = [True]

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise ValueError("not this one")
        return MSE(output, target)

    ((x, y),) = random_batches(1, rows=11)
    with twins.executor(loss_fn) as executor:
        assert "not this one" in message_of(executor.step, x, target=y)
        for module in twins.local.values():
            module.zero_grad()
        fails[0] = False
        executor.step(x, target=y)
        twins.step((x, y), recurrence=recurrence_of(ROUND_ROBIN))
    twins.assert_equal()


def test_buffers_are_those_of_all_replicas() -> None:
    schedule = schedir.build(round_robin, ranks=3, microbatches=4)
    stages: list[nn.Module] = [nn.BatchNorm1d(4), nn.Linear(4, 4)]
    ((x, y),) = random_batches(1, rows=12)
    with Executor(schedule, numbered(stages), MSE, sgd, in_process=True) as executor:
        executor.step(x, target=y)
        executor.evaluate(x, target=y)
    assert stages[0].num_batches_tracked == 4
