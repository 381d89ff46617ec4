"""Random clean lists, from the first call of an input signature on."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import recurrence_of
from torch import nn

import schedir
from schedir import Kind
from tests.joined import drawn_joined
from tests.runtime.kit import SometimesCheckpointed, Twins, adamw, random_batch
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import examples, sweep


def train_and_compare(schedule: schedir.Schedule, seed: int, rank: int | None) -> None:
    """One shape, the same, another one, the first again, and evaluation between."""
    torch.manual_seed(seed)
    stages = [
        nn.Sequential(nn.ReLU(), SometimesCheckpointed(nn.Linear(4, 4), nn.Tanh()))
        for _ in range(schedule.stages)
    ]
    twins = Twins(stages, schedule, rank)
    for s, stage in twins.local.items():
        stage.get_submodule("0").inplace = s % 2 == 1  # type: ignore[assignment]
    steps = any(a.kind is Kind.OPTIM_STEP for own in schedule.flat for a in own)
    train = twins.step if steps else twins.accumulate
    with twins.executor(optimizer=adamw if steps else None, timeout=60) as executor:
        for rows in (9, 9, 4, 9):
            x, y = random_batch(rows, seed=rows)
            before = executor.evaluate(x, target=y).loss
            loss = executor.step(x, target=y).loss
            assert loss == train((x, y), recurrence=recurrence_of(schedule))
            assert loss == before or not steps or schedule.name != "drawn"
            twins.assert_equal_gradients()
            for module in (*twins.local.values(), *twins.whole):
                module.zero_grad()
    twins.assert_equal()


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
