"""Clipping and ties over ranks: one norm of the whole model, and copies that stay one parameter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import plain_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import schedir
from schedir.runtime import Executor
from schedir.runtime.accelerator import Host
from schedir.runtime.gradients.reduction import Barrier
from schedir.runtime.sharded import local
from tests.runtime.kit import (
    MSE,
    Twins,
    adamw,
    everyone,
    linear_stages,
    message_of,
    microbatches_of,
    noisy_stages,
    random_batch,
    random_batches,
)
from tests.runtime.on_ranks import on_ranks
from tests.runtime.test_replicas_on_ranks import clip


def pair() -> list[nn.Module]:
    """Two stages whose weights are equal."""
    torch.manual_seed(2)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight.data.copy_(first.weight)
    return [first, nn.Sequential(nn.Tanh(), last)]


@on_ranks(2)
def test_tied_copies_are_clipped_and_trained_as_one_parameter(rank: int) -> None:
    """The sum over stages is taken last, which rounds differently from one parameter's sums."""
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    whole = pair()
    local = copy.deepcopy(whole[rank])
    whole[1][1].weight = whole[0].weight  # type: ignore[index]
    model = nn.Sequential(*whole)
    optimizer = adamw(model.parameters())
    ties = [[(0, "weight"), (1, "1.weight")]]
    with Executor(schedule, {rank: local}, MSE, adamw, ties=ties, clip_grad_norm=0.5) as executor:
        for x, y in random_batches(4):
            result = executor.step(x, target=y)
            plain_step([model], MSE, (), microbatches_of((x, y), 4))
            assert result.grad_norm == pytest.approx(clip([model], 0.5), abs=1e-6)
            optimizer.step()
            optimizer.zero_grad()
    mine = dict(local.named_parameters())
    torch.testing.assert_close(mine, dict(whole[rank].named_parameters()), atol=1e-6, rtol=1e-5)
    assert torch.equal(*everyone(mine["weight" if rank == 0 else "1.weight"].detach()))


@on_ranks(2)
def test_clipping_is_that_of_the_whole_model(rank: int) -> None:
    schedule = schedir.build("interleaved-1f1b", ranks=2, microbatches=4)
    twins = Twins(noisy_stages(4), schedule, rank)
    with twins.executor(clip_grad_norm=0.05) as executor:
        for step, (x, y) in enumerate(random_batches(4)):
            result = executor.step(x, target=y)
            twins.accumulate((x, y), seed=(0, step))
            assert result.grad_norm == clip(twins.whole, 0.05)
            twins.update()
    twins.assert_equal()


@on_ranks(3)
def test_the_norm_passes_a_stage_without_parameters(rank: int) -> None:
    schedule = schedir.build("1f1b", ranks=3, microbatches=2)
    twins = Twins([*linear_stages(), nn.Tanh()], schedule, rank)
    x, y = random_batch(rows=4, seed=1)
    with twins.executor(clip_grad_norm=0.05) as executor:
        result = executor.step(x, target=y)
    twins.accumulate((x, y))
    assert result.grad_norm == clip(twins.whole, 0.05)


@on_ranks(3)
def test_ties_may_overlap_in_ranks(rank: int) -> None:
    """Rank 1 makes more groups than the others, which must find each other all the same; twice."""
    schedule = schedir.build("1f1b", ranks=3, microbatches=2)
    for _ in range(2):
        torch.manual_seed(0)
        layers = [(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)]
        layers[1][0].weight.data.copy_(layers[0][0].weight)
        layers[2][1].weight.data.copy_(layers[1][1].weight)
        stage = nn.Sequential(*layers[rank])
        ties = [[(0, "0.weight"), (1, "0.weight")], [(1, "1.weight"), (2, "1.weight")]]
        with Executor(schedule, {rank: stage}, MSE, adamw, ties=ties) as executor:
            x, y = torch.randn(2, 4, 4)
            executor.step(x, target=y)
        found = everyone([layer.weight.detach() for layer in layers[rank]])
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[1][1], found[2][1])


@on_ranks(2)
def test_tied_copies_that_drift_apart_are_found(rank: int) -> None:
    schedule = schedir.build("1f1b", ranks=2, microbatches=4)
    module = linear_stages()[0]
    ties = [[(0, "0.weight"), (1, "0.weight")]]
    x, y = random_batch()

    def train() -> None:
        options: Any = {"ties": ties, "timeout": 60.0}
        with Executor(schedule, {rank: module}, MSE, torch.optim.SGD, **options) as executor:
            executor.optimizers[rank].param_groups[0]["lr"] = 0.01 * (1 + rank)
            for _ in range(3):
                executor.step(x, target=y)

    said = everyone(message_of(train))
    assert any("tied as 0:0.weight and 1:0.weight differs between" in text for text in said)


@on_ranks(2)
def test_the_part_of_a_sharded_gradient_that_is_here_is_kept(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DTensor has no memory of its own to be kept."""
    uses: list[Tensor] = []
    monkeypatch.setattr(Host, "used", lambda _, tensor: uses.append(tensor))
    mesh = init_device_mesh("cpu", (2,))
    shard = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    shard.grad = shard.detach().clone()
    barrier = Barrier(1, lambda: None, Host(torch.device("cpu")), [shard])
    barrier.arrive()
    barrier.leave()
    (used,) = uses
    assert type(used) is Tensor
    assert used.data_ptr() == local(shard.grad).data_ptr()
