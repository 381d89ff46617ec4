"""Every built-in schedule trains what its order stands for, bit for bit, and, where it has a flush,
what plain training does, to the last digits."""

from __future__ import annotations

import copy

import pytest
import torch
from reference import plain_step, recurrence_of
from torch import nn

import schedir
from schedir import Schedule
from schedir.errors import LoadError
from tests.built_in import EVERY, steps_once
from tests.runtime.kit import MSE, Twins, adamw, microbatches_of, random_batches
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep

STEPS, WIDTH = 3, 4


def shapes(ranks: int) -> tuple[int, ...]:
    """Numbers of microbatches; odd ones show errors of scale, which powers of two hide."""
    return 2 * ranks + 1, 2 * ranks


def built(name: str, ranks: int) -> Schedule | None:
    """The schedule with the first of the numbers of microbatches that it takes."""
    for microbatches in shapes(ranks):
        try:
            return schedir.build(name, ranks=ranks, microbatches=microbatches)
        except LoadError:
            continue
    return None


def assert_trains(schedule: Schedule, rank: int | None) -> None:
    torch.manual_seed(7)
    whole: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(schedule.stages)
    ]
    plain = copy.deepcopy(whole)
    twins = Twins(whole, schedule, rank, adamw)
    optimizers = [adamw(stage.parameters()) for stage in plain]
    with twins.executor() as executor:
        for x, y in random_batches(STEPS, 2 * schedule.microbatches + 1, WIDTH):
            batch = x.double(), y.double()
            pieces = microbatches_of(batch, schedule.microbatches)
            found = executor.step(batch[0], target=batch[1]).loss
            expected = twins.step(batch, recurrence=recurrence_of(schedule))
            assert found == pytest.approx(expected, rel=1e-14)
            plain_step(plain, MSE, optimizers, pieces)
    twins.assert_equal()
    if steps_once(schedule):
        for mine, theirs in zip(whole, plain, strict=True):
            for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@sweep("ranks", [2, 3, 4], quick=[2])
@pytest.mark.parametrize("name", EVERY)
def test_in_one_process(name: str, ranks: int) -> None:
    schedule = built(name, ranks)
    if schedule is not None:
        assert_trains(schedule, None)


@sweep("name", EVERY, quick=["1f1b", "dualpipev", "pipedream"])
@on_ranks(2)
def test_on_two_ranks(rank: int, name: str) -> None:
    schedule = built(name, 2)
    assert schedule is not None
    assert_trains(schedule, rank)


@sweep("name", EVERY, quick=["chimera"])
@on_ranks(4)
def test_on_four_ranks(rank: int, name: str) -> None:
    schedule = built(name, 4)
    assert schedule is not None
    assert_trains(schedule, rank)
