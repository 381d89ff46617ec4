"""Random clean lists, from the first call of an input signature on."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import plain_step, recurrence_of
from torch import nn

import schedir
from schedir import Kind
from schedir.runtime import Executor
from tests.joined import drawn_joined
from tests.runtime.kit import (
    MSE,
    adamw,
    assert_equal_gradients,
    assert_equal_stages,
    gradients,
    microbatches_of,
    numbered,
    random_batch,
)
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import examples, sweep


def stages_of(schedule: schedir.Schedule, seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.Tanh()) for _ in range(schedule.stages)]


def train_and_compare(schedule: schedir.Schedule, seed: int, rank: int | None) -> None:
    """One shape, the same, another one, the first again, and evaluation between."""
    stages, twins = stages_of(schedule, seed), stages_of(schedule, seed)
    for stage in stages[1::2]:
        stage.get_submodule("0").inplace = True  # type: ignore[assignment]
    local = numbered(stages) if rank is None else {s: stages[s] for s in schedule.stages_of(rank)}
    make = adamw if any(a.kind is Kind.OPTIM_STEP for own in schedule.flat for a in own) else None
    optimizers = [make(twin.parameters()) for twin in twins] if make else []
    with Executor(schedule, local, MSE, make, in_process=rank is None, timeout=60) as executor:
        for rows in (9, 9, 4, 9):
            x, y = random_batch(rows, seed=rows)
            before = executor.evaluate(x, target=y).loss
            loss = executor.step(x, target=y).loss
            pieces = microbatches_of((x, y), schedule.microbatches)
            assert loss == plain_step(twins, MSE, optimizers, pieces, recurrence_of(schedule))
            assert loss == before or not make or schedule.name != "drawn"
            theirs = gradients(twins[s] for s in local)
            assert_equal_gradients(gradients(local.values()), theirs)
            for module in (*stages, *twins):
                module.zero_grad()
    assert_equal_stages(local, twins)


def drawn_list(seed: int) -> schedir.Schedule | None:
    """A random list; None where it is not clean."""
    schedule = drawn_joined(random.Random(seed))
    return schedule if schedir.check(schedule, channel="async").ok else None


@examples(60)
@given(st.integers(0, 1 << 32))
def test_drawn_lists_train_as_their_meaning_says(seed: int) -> None:
    schedule = drawn_list(seed)
    if schedule is not None:
        train_and_compare(schedule, seed, None)


@on_ranks(3)
@sweep("first", range(0, 50, 10), quick=[0])
def test_drawn_lists_on_ranks(rank: int, first: int) -> None:
    found = 0
    for seed in range(100 * first, 100 * first + 1000):
        schedule = drawn_list(seed)
        if schedule is not None and schedule.ranks == 3:
            train_and_compare(schedule, seed, rank)
            found += 1
        if found == 10:
            return
    raise AssertionError("too few lists are clean")
