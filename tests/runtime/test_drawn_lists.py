"""Random clean lists, from the first call of an input signature on."""

from __future__ import annotations

import copy
import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from trial_first_call import Reference, loss_fn, optimizer

import schedir
from schedir.runtime import Executor
from tests.joined import drawn_joined
from tests.runtime.kit import numbered
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import examples, sweep


def stages_of(schedule: schedir.Schedule, seed: int) -> list[nn.Module]:
    """Some begin with a layer in place."""
    torch.manual_seed(seed)
    return [
        nn.Sequential(nn.ReLU(inplace=s % 2 == 1), nn.Linear(4, 4), nn.Tanh())
        for s in range(schedule.stages)
    ]


def train_and_compare(schedule: schedir.Schedule, seed: int, rank: int | None) -> None:
    """One shape, the same, another one, the first again, and evaluation between."""
    stages = stages_of(schedule, seed)
    twins = copy.deepcopy(stages)
    reference = Reference(schedule, twins)
    local = numbered(stages) if rank is None else {s: stages[s] for s in schedule.stages_of(rank)}
    make = optimizer if reference.steps else None
    with Executor(schedule, local, loss_fn, make, in_process=rank is None, timeout=60) as executor:
        for rows in (9, 9, 4, 9):
            x, y = torch.randn(2, rows, 4, generator=torch.Generator().manual_seed(rows))
            before = executor.evaluate(x, target=y).loss
            loss = executor.step(x, target=y).loss
            assert loss == reference.step(x, y)
            assert loss == before or not reference.steps or schedule.name != "drawn"
            if not reference.steps:
                for stage, twin in zip(stages, twins, strict=True):
                    for mine, theirs in zip(stage.parameters(), twin.parameters(), strict=True):
                        if mine.grad is not None:
                            assert theirs.grad is not None
                            assert torch.equal(mine.grad, theirs.grad)
                        mine.grad = theirs.grad = None
    for s, stage in local.items():
        for mine, theirs in zip(stage.parameters(), twins[s].parameters(), strict=True):
            assert torch.equal(mine, theirs)


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
