"""Stages whose tensors share memory, over gloo."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

import schedir
from schedir.runtime import Executor
from tests.literals import listed
from tests.runtime import aliasing
from tests.runtime.kit import Twins
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep


@on_ranks(2, 3)
@sweep("seed", range(40), quick=range(5))
def test_drawn_stages_train_as_in_one_piece(rank: int, ranks: int, seed: int) -> None:
    """Random placements, orders and stages: as in one piece, or all ranks are told why not."""
    chance = random.Random(seed)
    schedule = aliasing.draw_schedule(chance, ranks)
    whole = aliasing.draw_stages(chance, schedule.stages)
    whole[0] = aliasing.First(whole[0])
    stages = {s: copy.deepcopy(whole[s]) for s in schedule.stages_of(rank)}
    recompute = [s for s in range(schedule.stages) if chance.random() < 0.3]
    (inputs, target) = batch = aliasing.draw_batch(chance, schedule.microbatches)
    try:
        expected_loss, expected = aliasing.plain(whole, batch, schedule.microbatches)
    except RuntimeError:  # plain training fails
        return
    executor = Executor(schedule, stages, aliasing.loss_fn, recompute=recompute, timeout=60)
    try:
        loss = executor.step(inputs, target=target).loss
        executor.close()
    except schedir.ExecutionError as error:
        refused = str(error)
        assert "in place" in refused or "inplace" in refused
        return
    assert aliasing.differences(stages, expected, whole) == []
    assert loss == pytest.approx(expected_loss, abs=1e-6)


@on_ranks(2)
def test_a_gradient_may_be_sent_after_the_next_backward(rank: int) -> None:
    """Autograd adds to the position's gradient in place before the other half of it has gone."""
    schedule = listed(
        2,
        "0 1",
        "0F0 0SEND_ACT0 0F1 0SEND_ACT1 0RECV_GRAD0 0B0 0RECV_GRAD1 0B1",
        "1RECV_ACT0 1RECV_ACT1 1F0 1F1 1B0 1B1 1SEND_GRAD0 1SEND_GRAD1",
    )
    torch.manual_seed(0)
    twins = Twins([nn.Sequential(nn.Linear(4, 4), nn.Tanh()), aliasing.Positions()], schedule, rank)
    x, y = torch.randn(2, 4, 3, 4)
    with twins.executor(optimizer=None) as executor:
        executor.step(x, target=y)
    twins.accumulate((x, y))
    twins.assert_equal_gradients()
