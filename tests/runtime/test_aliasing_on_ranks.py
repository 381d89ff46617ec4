"""Stages whose tensors share memory, over gloo."""

from __future__ import annotations

import torch
from torch import nn

from tests.literals import listed
from tests.runtime import aliasing
from tests.runtime.kit import Twins
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep


@on_ranks(2, 3)
@sweep("seed", range(40), quick=range(5))
def test_drawn_stages_train_as_in_one_piece(rank: int, ranks: int, seed: int) -> None:
    """Random placements, orders and stages: as in one piece, or all ranks are told why not."""
    refused, differs = aliasing.run(seed, ranks, rank)
    assert not differs
    allowed = "plain training fails", "in place", "inplace"
    assert not refused or any(text in refused for text in allowed)


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
