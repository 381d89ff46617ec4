"""Stages that keep state outside their tensors train as they do in one process: a pipeline runs
their code exactly as often as its list says, on real values."""

from __future__ import annotations

import random
from typing import Any

import torch
from reference import recurrence_of
from torch import Tensor, nn

import schedir
from tests.built_in import EVERY
from tests.runtime.kit import Twins, random_batches
from tests.runtime.on_ranks import on_ranks
from tests.sweeps import sweep

ONE_COPY = [name for name in EVERY if name not in ("1f1b-rr", "chimera", "dualpipe")]
"""Schedules in which one rank holds each stage, and so its state."""


class AddsToGrad(torch.autograd.Function):
    """Adds to a parameter's gradient itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.weight = weight
        return x + weight.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        own = grads[0].sum(0)
        ctx.weight.grad = own if ctx.weight.grad is None else ctx.weight.grad + own
        return grads[0], None


class Stateful(nn.Module):
    """A layer with state of all kinds, by which its output is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.register_forward_hook(self.count)
        self.calls = 0
        self.chance = random.Random(0)
        self.scale = torch.ones(())
        self.by_shape: dict[tuple[int, ...], Tensor] = {}
        self.shift = nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.ones(4), persistent=False)
        self.mean: Tensor

    def count(self, *_: object) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():  # a branch on data
            raise ValueError("not a number")
        size = x.detach().abs().mean()
        self.scale = 0.9 * self.scale + 0.1 * size
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        first = self.by_shape.setdefault(tuple(x.shape), size + 1)
        y: Tensor = AddsToGrad.apply(torch.tanh(self.layer(x)), self.shift)  # type: ignore[no-untyped-call]
        count = min(1.0, self.calls / 10)
        return y * count * self.chance.random() * self.scale * first * self.mean.clone()


def assert_trains(name: str, ranks: int, rank: int | None) -> None:
    schedule = schedir.build(name, ranks=ranks, microbatches=8)
    torch.manual_seed(0)
    twins = Twins([Stateful() for _ in range(schedule.stages)], schedule, rank)
    with twins.executor() as executor:
        for batch in random_batches(3, rows=15):  # the last microbatch is smaller
            found = executor.step(batch[0], target=batch[1]).loss
            assert found == twins.step(batch, recurrence=recurrence_of(schedule))
    twins.assert_equal()
    for s, stage in twins.local.items():
        plain: Any = twins.whole[s]
        assert stage.calls == plain.calls == 3 * 8
        assert torch.equal(stage.mean, plain.mean)  # type: ignore[arg-type]


@sweep("name", ONE_COPY, quick=["interleaved-zb", "pipedream"])
def test_in_one_process(name: str) -> None:
    assert_trains(name, 2, None)


@on_ranks(2)
@sweep("name", ONE_COPY, quick=["interleaved-zb", "pipedream", "zbv"])  # neighbours on a rank
def test_on_two_ranks(rank: int, name: str) -> None:
    assert_trains(name, 2, rank)


@on_ranks(4)
@sweep("name", ONE_COPY, quick=())
def test_on_four_ranks(rank: int, name: str) -> None:
    assert_trains(name, 4, rank)
