"""Batches on several ranks, each of which reads them."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import schedir
from schedir.runtime import Executor
from schedir.training import Batches
from tests.runtime.kit import MSE, adamw, everyone, linear_stages, message_of
from tests.runtime.on_ranks import on_ranks

ON_TWO = schedir.build("1f1b", ranks=2, microbatches=4)


def executor_of(rank: int, schedule: schedir.Schedule) -> Executor:
    modules = linear_stages(schedule.stages)
    stages = {stage: modules[stage] for stage in schedule.stages_of(rank)}
    return Executor(schedule, stages, MSE, adamw, timeout=60)


def trained(executor: Executor, batches: Batches) -> list[float]:
    return [executor.step(inputs, target=target).loss for inputs, target in batches]


@on_ranks(2)
def test_a_rank_that_reads_other_data_is_told(rank: int) -> None:
    """Such as one that shuffles by a generator seeded by its rank."""
    generator = torch.Generator().manual_seed(rank)
    data = TensorDataset(*torch.randn(2, 24, 4))
    loader = DataLoader(data, 8, shuffle=True, generator=generator)
    executor = executor_of(rank, ON_TWO)
    executor.steps = 7
    said = everyone(message_of(trained, executor, Batches(loader)))
    assert "`inputs` is another batch on rank 1 at step 7 than on rank 0 at its step 7" in said[1]
    assert "the first to fail was rank 1" in said[0]


@on_ranks(2)
def test_a_last_batch_too_short_to_be_cut_names_drop_last(rank: int) -> None:
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(*torch.randn(2, 19, 4, generator=draw))
    with executor_of(rank, ON_TWO) as executor:
        short = Batches(DataLoader(data, 8))
        for inputs, target in short:  # the tail is evaluated all the same
            executor.evaluate(inputs, target=target)
        said = message_of(trained, executor, short)
        assert "3 rows can't be split into 4 microbatches" in said
        assert "drop_last=True" in said
        assert len(trained(executor, Batches(DataLoader(data, 8, drop_last=True)))) == 2
